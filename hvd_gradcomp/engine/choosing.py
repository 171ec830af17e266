"""Which exchange a bucket takes with `collective="auto"`: the cheapest by the cost model, the same on all workers.

The model's formulas are in `policy/cost.py`. What it is told of the network and of this machine's speed is measured
once, when the workers have agreed on their settings, or configured, and averaged over the workers, so that all choose
alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_gradcomp.collectives import Transport, agree, configured_network, measure
from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine.buckets import Parameter
from hvd_gradcomp.engine.choice import bucket_bytes
from hvd_gradcomp.engine.nodes import Nodes
from hvd_gradcomp.engine.rehearsal import rehearse
from hvd_gradcomp.ops import Array, ops_for
from hvd_gradcomp.policy.cost import COSTS, FREE, Links, Network, Topology, fit_network, way_seconds

#: Bytes that a worker hands in (of an allgather: that it receives) when the network is measured: large enough that
#: latency does not count, small enough to take no time even on slow links.
_BYTES = {"allreduce": 4 << 20, "allgather": 2 << 20, "alltoall": 2 << 20}
# So many times as long as a dense exchange on the network alone: no computing could make good for it.
_HOPELESS = 2.0
# Bytes per second; what is faster costs nothing.
_FASTEST = 1e12


@dataclass(frozen=True)
class Chooser:
    """What choices go by.

    Attributes:
        topology: which workers share a node.
        links: the networks between and within nodes, as seen by each kind of collective.
        nodes: how a hierarchical exchange would go; None where it cannot.
        computing: method -> way -> seconds for each element; of methods that are not there nothing is known, and ways
            that are not are hopeless.
    """

    topology: Topology
    links: Mapping[str, Links]
    nodes: Nodes | None
    computing: Mapping[Compressor, Mapping[str, float]] = field(default_factory=dict)

    def cheapest(self, method: Compressor, payload: float, dense: float, elements: int) -> str:
        """One of "dense", "allgather", "scatter_reduce" and "hierarchical".

        Args:
            method: of the bucket, as the user gave it.
            payload: bytes of the bucket, compressed, from one worker.
            dense: bytes of the bucket as it is.
            elements: of the bucket.
        """

        rates = self.computing.get(method)

        def seconds(way: str) -> float:
            rate = rates.get(way, math.inf) if rates else 0.0
            return self.network_s(way, payload, dense) + elements * rate

        return min(self.ways(method), key=seconds)

    def ways(self, method: Compressor) -> list[str]:
        """Those that are open to `method`."""
        # Votes are counted, which no sum can stand in for.
        found = ["allgather", "scatter_reduce"] if method.votes else ["dense", "allgather", "scatter_reduce"]
        # Some methods have to see each worker's gradients before they are added.
        may_add = method.memory.is_linear and not method.votes
        return [*found, "hierarchical"] if self.nodes is not None and may_add else found

    def network_s(self, way: str, payload: float, dense: float) -> float:
        """Seconds that the collectives of an exchange take."""
        across = self.nodes.collective if self.nodes is not None else "allgather"
        return way_seconds(way, payload, dense, self.topology, self.links, across)


def make_chooser(
    transport: Transport,
    nodes: Nodes,
    name: str,
    like: Array,
    buckets: Mapping[Compressor, Sequence[Sequence[Parameter]]],
) -> Chooser:
    """Measure, unless it was configured, and agree. A collective call.

    Args:
        name: of the collectives.
        like: an array on the device that collectives use.
        buckets: method -> the buckets that it compresses, the same on all workers.
    """
    useful = nodes if nodes.is_useful else None
    local = nodes.local if nodes.is_useful else None
    topology = Topology(nodes.sizes)
    chooser = Chooser(topology, networks(transport, nodes.sizes, local, name, like), useful)
    rates = {}
    if configured_network() or transport.workers == 1:
        return chooser
    for method, its in buckets.items():
        # The one with the model's last layers, and the one with its first ones, which has the smallest tensors.
        samples = [its[place] for place in sorted({0, len(its) - 1})]
        elements = sum(each.size for sample in samples for each in sample)
        payload, dense = (
            sum(found) for found in zip(*(bucket_bytes(method, sample) for sample in samples), strict=True)
        )
        wires = {way: chooser.network_s(way, payload, dense) for way in chooser.ways(method)}
        for way, wire in wires.items():
            if wire < _HOPELESS * wires.get("dense", math.inf):
                parts = [rehearse(method, sample, nodes.sizes, way, like) for sample in samples]
                rates[method, way] = sum(max(each.before_s + each.after_s, 1e-9) for each in parts) / elements
    agreed = agree(ops_for(like), transport, list(rates.values()), f"{name}.computing", like) if rates else []
    computing: dict[Compressor, dict[str, float]] = {}
    for (method, way), rate in zip(rates, agreed, strict=True):
        computing.setdefault(method, {})[way] = rate
    return Chooser(topology, chooser.links, useful, computing)


def networks(
    transport: Transport, sizes: Sequence[int], local: Transport | None, name: str, like: Array
) -> dict[str, Links]:
    """The networks as each kind of collective sees them: configured or measured, the same numbers on all workers.

    Args:
        transport: among all workers.
        sizes: the number of workers on each node.
        local: among those of this worker's node; None where the network within nodes does not matter.
        name: of the collectives.
        like: an array on the device that collectives use.
    """
    ops, workers, one_node = ops_for(like), transport.workers, len(sizes) == 1
    if workers == 1:
        return dict.fromkeys(COSTS, Links(FREE))
    told = [number for network in configured_network() for number in network]
    if told:
        numbers = agree(ops, transport, told, f"{name}.agreed", like)
        between = Network(numbers[0], numbers[1])
        within = Network(numbers[2], numbers[3]) if len(numbers) > 2 else between if one_node else FREE
        return dict.fromkeys(COSTS, Links(between, within))
    flat = Topology.even(workers) if one_node else Topology(tuple(sizes))
    numbers = [number for kind in COSTS for number in _fitted(transport, kind, flat, f"{name}.network", like)]
    if local is not None:
        its = Topology.even(local.workers)
        numbers += [1.0, 1.0] if local.workers == 1 else _fitted(local, "alltoall", its, f"{name}.node", like)
    numbers = agree(ops, transport, numbers, f"{name}.agreed", like)
    found = [Network(*numbers[place : place + 2]) for place in range(0, len(numbers), 2)]
    inside = FREE
    if local is not None:
        # Workers that are alone on their node have said 1, and so nothing.
        share = workers / sum(size for size in sizes if size > 1)
        last = found.pop()
        inside = Network(last.latency_s**share, last.bytes_per_s**share)
    return {kind: Links(network, network if one_node else inside) for kind, network in zip(COSTS, found, strict=True)}


def _fitted(transport: Transport, kind: str, topology: Topology, name: str, like: Array) -> list[float]:
    """Latency, and bytes per second on the busiest link, from a small and a large collective."""
    # How many bytes that link carries is what the cost model says for a network of one byte a second.
    unit = Links(Network(0.0, 1.0), FREE)
    large = _BYTES[kind] // (transport.workers - 1) if kind == "allgather" else _BYTES[kind]
    points = [
        (COSTS[kind](size, topology, unit).seconds, measure(ops_for(like), transport, kind, size, name, like))
        for size in (4, max(large, 64 << 10))
    ]
    network = fit_network(points)
    return [network.latency_s, min(network.bytes_per_s, _FASTEST)]
