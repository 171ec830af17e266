"""Training steps on a simulated cluster: engines that exchange gradients, and what each of them sent, decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from arrays import array_of, as_numpy
from simulated_cluster import Cluster, MemoryTransport, Sent

from hvd_gradcomp.collectives import Allgather, Allreduce
from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine import Bucket, Engine, Parameter
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.payload import split_payloads

#: Parameter name -> gradient of one worker; None is "takes another way in this step".
Gradients = Mapping[str, np.ndarray | None]


def parameters_of(shapes: Sequence[tuple[int, ...]], kind: str = "float32") -> list[Parameter]:
    """Parameters p0, p1, ... of these shapes."""
    return [Parameter(f"p{index}", int(np.prod(shape)), kind, shape) for index, shape in enumerate(shapes)]


def engines_of(
    cluster: Cluster, compressor: Compressor, parameters: Sequence[Parameter], **options: Any
) -> list[Engine]:
    """An engine for each worker of the cluster, all alike."""
    return [
        Engine(compressor, parameters, MemoryTransport(cluster, rank), **options) for rank in range(cluster.workers)
    ]


def step(
    cluster: Cluster,
    engines: Sequence[Engine],
    ops: Ops,
    gradients: Sequence[Gradients],
    orders: Sequence[Sequence[str]] | None = None,
) -> list[dict[str, np.ndarray]]:
    """One step of all workers.

    Args:
        gradients: of each worker.
        orders: in which order each worker hands in its gradients.

    Returns:
        Each worker's results.
    """

    def work(transport: MemoryTransport) -> dict[str, Array]:
        engine, mine = engines[transport.rank], gradients[transport.rank]
        for name in orders[transport.rank] if orders else mine:
            one = mine[name]
            engine.submit(name, None if one is None else array_of(ops, one))
        return engine.finish()

    return [{name: as_numpy(result) for name, result in results.items()} for results in cluster.run(work)]


def residuals_of(engine: Engine) -> dict[str, np.ndarray]:
    """A copy of the residuals, zeros where there is none."""
    return {
        each.name: as_numpy(engine.residuals[each.name])
        if each.name in engine.residuals
        else np.zeros(each.size, np.float32)
        for each in engine.parameters
    }


def decode_sent(engine: Engine, ops: Ops, sent: Sequence[Sent]) -> dict[str, np.ndarray]:
    """What the worker's bytes of one step say, by parameter: read from what it handed to collectives, nothing else."""
    found: dict[str, np.ndarray] = {}
    by_name = {f"{engine.scope}{bucket.name}": bucket for bucket in engine.buckets}
    for each in sent:
        bucket = by_name.get(each.name)
        # Other names are those of the settings and of second rounds, which carry sums.
        if bucket is not None:
            found |= _decode(engine, ops, bucket, each.request)
    return found


def _decode(engine: Engine, ops: Ops, bucket: Bucket, request: Any) -> dict[str, np.ndarray]:
    if isinstance(request, Allgather):
        fingerprint = engine.fingerprint(bucket.parameters)
        (received,) = split_payloads(ops, request.payload, engine.transport.ranks[:1], fingerprint)
        blanks = {each.name: ops.zeros(each.size, "float32", request.payload) for each in bucket.parameters}
        decoded = {name: engine.compressor.decode_add(ops, received.frames, out) for name, out in blanks.items()}
        received.frames.end()
        return {name: as_numpy(out) for name, out in decoded.items()}
    compressor = engine.compressor
    # A dense exchange goes in the format of the gradients.
    kind = compressor.sum_kind if compressor.meets == "sum" else bucket.parameters[0].kind
    values = request.values if isinstance(request, Allreduce) else ops.unpack_float(request.payload, kind)
    parts = np.split(as_numpy(values), np.cumsum([each.size for each in bucket.parameters])[:-1])
    return {each.name: part for each, part in zip(bucket.parameters, parts, strict=True)}
