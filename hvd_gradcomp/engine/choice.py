"""Which way the gradients of a bucket take: the given method and collective, or dense where that moves fewer bytes.

Functions of settings and sizes only, so that all workers choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvd_gradcomp.collectives import moves_fewer_bytes
from hvd_gradcomp.compressors import BF16, FP16, Compressor, NoCompression
from hvd_gradcomp.engine.buckets import Parameter
from hvd_gradcomp.engine.passage import KIND_BYTES
from hvd_gradcomp.engine.units import units_of
from hvd_gradcomp.errors import ConfigurationError

if TYPE_CHECKING:
    from hvd_gradcomp.engine.choosing import Chooser

# What a dense exchange of gradients in a 16-bit format sends; others go as float32.
_DENSE: dict[str, Compressor] = {"float16": FP16(), "bfloat16": BF16()}
_UNCHANGED = NoCompression()


def choose(
    compressor: Compressor,
    parameters: Sequence[Parameter],
    workers: int,
    nodes: Sequence[int],
    chooser: Chooser | None = None,
    given: Compressor | None = None,
) -> tuple[Compressor, str]:
    """The method, `compressor` or a dense one, and how its payloads meet.

    Args:
        parameters: those of a bucket that have a gradient.
        workers: how many exchange.
        nodes: the number of workers on each node; empty where nobody asked, or where it does not matter.
        chooser: what `collective="auto"` goes by.
        given: the method as the user gave it, where a policy has changed it to `compressor`.
    """
    if compressor.meets != "gather":
        return compressor, "allgather"
    payload, dense = bucket_bytes(compressor, parameters)
    collective = compressor.collective
    if collective == "auto" and chooser is not None:
        elements = sum(parameter.size for parameter in parameters)
        collective = chooser.cheapest(given or compressor, payload, dense, elements)
        return (dense_for(parameters), "allgather") if collective == "dense" else (compressor, collective)
    if collective == "hierarchical":
        # With one worker on each node there is nothing to add up first; on a single node, nothing in between.
        collective, workers = (collective, len(nodes)) if nodes else ("allgather", workers)
    if compressor.votes or moves_fewer_bytes(payload, dense, workers, collective):
        return compressor, collective
    return dense_for(parameters), "allgather"


def bucket_bytes(compressor: Compressor, parameters: Sequence[Parameter]) -> tuple[float, float]:
    """Bytes of a bucket's payload, about, and of its gradients as they are."""
    units = units_of(parameters, compressor.granularity)
    payload = sum(compressor.expected_bytes(unit.size) for unit in units)
    return payload, float(sum(KIND_BYTES[parameter.kind] * parameter.size for parameter in parameters))


def dense_for(parameters: Sequence[Parameter]) -> Compressor:
    """A dense exchange in the format that all parameters have, or in float32."""
    kinds = {parameter.kind for parameter in parameters}
    return _DENSE.get(kinds.pop(), _UNCHANGED) if len(kinds) == 1 else _UNCHANGED


def require_collective(compressor: Compressor) -> None:
    """Refuse a collective that does not fit the method.

    Raises:
        ConfigurationError: it does not.
    """
    for each in compressor.members():
        if each.collective == "allgather":
            continue
        if each.meets != "gather":
            raise ConfigurationError(
                f"{each}: collective={each.collective} is for payloads that cannot be added, and those of this "
                "method are, or have a way of their own: leave collective out"
            )
        if each.learns:
            raise ConfigurationError(
                f"{each}: a scale that lasts belongs to a whole tensor, and collective={each.collective} compresses "
                "shares of it: leave out decay and every, or collective"
            )
        if each.collective == "hierarchical" and each.votes:
            raise ConfigurationError(
                f"{each}: collective=hierarchical adds the gradients of a node, and here each worker has a vote of its "
                "own: take collective=scatter_reduce"
            )
        if each.collective == "hierarchical" and not each.memory.is_linear:
            raise ConfigurationError(
                f"{each}: collective=hierarchical adds the gradients of a node before anything else, and "
                f"{each.memory} has to see those of each worker (clip). Leave out clip, or take "
                "collective=scatter_reduce"
            )
