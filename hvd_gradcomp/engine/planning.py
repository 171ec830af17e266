"""How much longer steps become by the exchanges that a policy considers, predicted where training runs.

The network is measured and each exchange rehearsed, on all workers together; what comes of it is the planner's model
(`policy/planner.py`). Nothing that an engine keeps is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvd_gradcomp.collectives import agree
from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.compressors.adaptive import Adaptive
from hvd_gradcomp.engine.buckets import Bucket
from hvd_gradcomp.engine.choosing import networks
from hvd_gradcomp.engine.rehearsal import Rehearsed, rehearse
from hvd_gradcomp.ops import ops_for
from hvd_gradcomp.policy.cost import Topology
from hvd_gradcomp.policy.planner import FORWARD_SHARE, Compute, Machines, Method, Sending, predict

if TYPE_CHECKING:
    from hvd_gradcomp.engine.engine import Engine

# What agreement needs to be above zero, in seconds and in bytes.
_LEAST = 1e-9


def predicted_waits(engine: Engine, ratios: Sequence[float | None], alone_s: float) -> tuple[float, ...]:
    """Seconds by which a step becomes longer by its exchange at each of `ratios`. A collective call.

    Args:
        engine: between two steps.
        ratios: those of a policy; None for dense.
        alone_s: of a step without any exchange, the same on all workers.

    Returns:
        The same bits on every worker.
    """
    transport, like = engine.transport, engine.adaptation.like
    nodes = engine.nodes
    sizes = nodes.sizes if nodes is not None else tuple(len(node) for node in transport.nodes())
    local = nodes.local if nodes is not None and nodes.is_useful else None
    name = f"{engine.settings_name}.plan"
    machines = Machines(Topology(sizes), networks(transport, sizes, local, name, like))
    alone_s = max(0.0, alone_s)
    compute = Compute(FORWARD_SHARE * alone_s, (1 - FORWARD_SHARE) * alone_s)
    found = []
    for number, ratio in enumerate(ratios):
        method = _method(engine, ratio, sizes, f"{name}.{number}")
        step_s = predict(method, machines, compute).step_s
        assert step_s is not None
        found.append(step_s - alone_s)
    return tuple(found)


def _method(engine: Engine, ratio: float | None, sizes: Sequence[int], name: str) -> Method:
    """What an exchange of all buckets at `ratio` takes to compute, and what it asks of the network."""
    adaptive, like = engine.compressor, engine.adaptation.like
    assert isinstance(adaptive, Adaptive)
    # Buckets that are alike are rehearsed by the first and the last of them, and the rest go by their sizes.
    alike: dict[tuple[Compressor, str], list[Bucket]] = {}
    for bucket in engine.buckets:
        first = bucket.parameters[0]
        given = adaptive.of(bucket.name, first.shape)
        compressor = adaptive.chosen(ratio).of(bucket.name, first.shape)
        is_dense = compressor.meets == "dense"
        method, way = (given, "dense") if is_dense else engine.chosen(compressor, bucket.parameters, given)
        alike.setdefault((compressor, way) if method is compressor else (given, "dense"), []).append(bucket)
    kinds: list[tuple[str, ...]] = []
    numbers: list[float] = []
    for (method, way), buckets in alike.items():
        samples = [buckets[place] for place in sorted({0, len(buckets) - 1})]
        rehearsed = [rehearse(method, sample.parameters, sizes, way, like) for sample in samples]
        kinds.append(tuple(kind for kind, _ in rehearsed[0].requests))
        numbers += _rates(rehearsed, sum(sample.size for sample in samples))
    agreed = iter(agree(ops_for(like), engine.transport, numbers, name, like))
    sendings: dict[int, Sending] = {}
    before = after = 0.0
    for asked, buckets in zip(kinds, alike.values(), strict=True):
        elements = sum(bucket.size for bucket in buckets)
        before += elements * next(agreed)
        after += elements * next(agreed)
        rates = [next(agreed) for _ in asked]
        for bucket in buckets:
            requests = tuple((kind, rate * bucket.size) for kind, rate in zip(asked, rates, strict=True))
            sendings[bucket.index] = Sending(4.0 * bucket.size, requests)
    return Method("it", "", tuple(sendings[index] for index in sorted(sendings)), before, after)


def _rates(rehearsed: Sequence[Rehearsed], elements: int) -> list[float]:
    """For each element: seconds before and after the first collective, and bytes of each collective."""
    sums = [sum(each.before_s for each in rehearsed), sum(each.after_s for each in rehearsed)]
    sums += [sum(sizes) for sizes in zip(*([size for _, size in each.requests] for each in rehearsed), strict=True)]
    return [max(each, _LEAST) / elements for each in sums]
