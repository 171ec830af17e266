"""What an exchange costs: bytes that a worker sends and receives, and seconds, by formulas from sizes and a network.

A model of latency and bandwidth, no more: it knows nothing of the time to compress, which `engine/rehearsal.py`
measures, nor of other traffic, or of what overlaps. Pure functions of their arguments, so that workers that agree on
the arguments choose the same. The networks are measured elsewhere, with the transport's own collectives.

References:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvd_gradcomp.errors import ConfigurationError


@dataclass(frozen=True)
class Network:
    """What connects the workers.

    Attributes:
        latency_s: seconds of a whole collective that carries next to nothing, among all workers, with all that comes
            before its first byte (Horovod's negotiation).
        bytes_per_s: what can be sent, and at the same time received: between nodes by a node's network card, which
            its workers share; within a node by each worker.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s) and self.bytes_per_s > 0):
            raise ConfigurationError(f"expected latency_s >= 0 and bytes_per_s > 0, got {self}")


#: costs nothing: what is sent within a node, where only the network between the nodes is known
FREE = Network(0.0, math.inf)


@dataclass(frozen=True)
class Topology:
    """Which workers share a node; those of a node have ranks in a row, as horovodrun places them.

    Attributes:
        local_sizes: the number of workers of each node.
    """

    local_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.local_sizes or min(self.local_sizes) < 1:
            raise ConfigurationError(f"expected one worker or more on each of one node or more, got {self.local_sizes}")

    @classmethod
    def even(cls, workers: int, nodes: int | None = None) -> Topology:
        """`workers` spread over `nodes` (by default one worker a node), the first nodes taking one more if need be."""
        count = workers if nodes is None else nodes
        if not 1 <= count <= workers:
            raise ConfigurationError(f"{workers} workers cannot be spread over {count} nodes: expected 1 to {workers}")
        return cls(tuple(workers // count + (node < workers % count) for node in range(count)))

    @property
    def workers(self) -> int:
        """How many there are on all nodes."""
        return sum(self.local_sizes)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.local_sizes)


@dataclass(frozen=True)
class Links:
    """The networks of a topology: between its nodes, and within each."""

    between: Network
    within: Network = FREE


@dataclass(frozen=True)
class Cost:
    """What one exchange costs.

    Attributes:
        sent_bytes: by each worker (the one that sends most), to others, on its node or not.
        received_bytes: by each worker (the one that receives most).
        between_bytes: what a node's network card sends for all its workers (the one that sends most).
        seconds: from the first worker's start to the last one's end.
    """

    sent_bytes: float
    received_bytes: float
    between_bytes: float
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        return Cost(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.between_bytes + other.between_bytes,
            self.seconds + other.seconds,
        )


NOTHING = Cost(0.0, 0.0, 0.0, 0.0)


def dense_allreduce(dense_bytes: float, topology: Topology, links: Links) -> Cost:
    """A ring allreduce of a dense vector of `dense_bytes`: each worker sends 2 (N - 1) / N of it."""
    workers = topology.workers
    return _ring(2 * (workers - 1) / workers * dense_bytes, topology, links)


def allgather(payload_bytes: float, topology: Topology, links: Links) -> Cost:
    """Every worker gets every other's payload of `payload_bytes`: N - 1 of them, sent round a ring."""
    return _ring((topology.workers - 1) * payload_bytes, topology, links)


def alltoall(payload_bytes: float, topology: Topology, links: Links) -> Cost:
    """Every worker sends one N-th of its `payload_bytes` to each worker, itself included (which costs nothing)."""
    workers = topology.workers
    part = payload_bytes / workers
    between = max(local * (workers - local) for local in topology.local_sizes) * part
    within = (max(topology.local_sizes) - 1) * part
    moved = (workers - 1) * part
    return Cost(moved, moved, between, _seconds(within, between, topology, links))


def scatter_reduce(payload_bytes: float, topology: Topology, links: Links, reduced_bytes: float | None = None) -> Cost:
    """An alltoall of parts of the payloads to their owners, and an allgather of what the owners made of them.

    Each worker sends (N - 1) / N of two payloads, whatever N is.

    Args:
        payload_bytes: of each worker's payload.
        reduced_bytes: of all owners' results together; by default as many as one payload.
    """
    reduced = payload_bytes if reduced_bytes is None else reduced_bytes
    first = alltoall(payload_bytes, topology, links)
    return first + allgather(reduced / topology.workers, topology, links)


def hierarchical(
    payload_bytes: float,
    dense_bytes: float,
    topology: Topology,
    links: Links,
    *,
    across: str = "allgather",
) -> Cost:
    """Dense within the nodes, compressed between them: reduce-scatter on each node, exchange of shards, allgather.

    Each of a node's L workers owns 1 / L of the node's sum, compresses it and exchanges it with the same shard of the
    other nodes; so 1 / L of a payload crosses between the nodes for each worker and other node.

    Args:
        payload_bytes: of a whole gradient, compressed.
        dense_bytes: of a whole gradient.
        across: how shards meet between the nodes, "allgather" or "scatter_reduce".

    Raises:
        ConfigurationError: `across` is neither.
    """
    if across not in ("allgather", "scatter_reduce"):
        raise ConfigurationError(f'across must be "allgather" or "scatter_reduce", got {across!r}')
    # Where nodes are uneven the shards are those of the smallest, on which each worker owns most.
    local = min(topology.local_sizes)
    cost = NOTHING
    if topology.nodes > 1:
        # One worker of each node for a shard; the card carries the shards of all.
        nodes = Topology.even(topology.nodes)
        card = Network(links.between.latency_s, links.between.bytes_per_s / local)
        exchange = scatter_reduce if across == "scatter_reduce" else allgather
        shard = exchange(payload_bytes / local, nodes, Links(card))
        cost += Cost(shard.sent_bytes, shard.received_bytes, shard.between_bytes * local, shard.seconds)
    if max(topology.local_sizes) > 1:
        largest = max(topology.local_sizes)
        moved = (largest - 1) / largest * dense_bytes
        one_way = Cost(moved, moved, 0.0, links.within.latency_s + moved / links.within.bytes_per_s)
        cost += one_way + one_way
    return cost


#: Kind of collective -> what one of a number of bytes costs.
COSTS: dict[str, Callable[[float, Topology, Links], Cost]] = {
    "allreduce": dense_allreduce,
    "allgather": allgather,
    "alltoall": alltoall,
}


def request_seconds(kind: str, size: float, topology: Topology, links: Mapping[str, Links]) -> float:
    """Seconds of one collective.

    Args:
        kind: of `COSTS`; with "node " before it among the workers of each node at once, with "across " among those of
            different nodes that own the same share, all shares at once.
        size: bytes that a worker hands in.
        links: kind of collective -> the networks.
    """
    where, _, what = kind.rpartition(" ")
    if where == "node":
        return COSTS[what](size, Topology.even(max(topology.local_sizes), nodes=1), links[what]).seconds
    if where == "across":
        between = links[what].between
        # One worker of each node for a share; the card carries those of all.
        card = Network(between.latency_s, between.bytes_per_s / min(topology.local_sizes))
        return COSTS[what](size, Topology.even(topology.nodes), Links(card)).seconds
    return COSTS[what](size, topology, links[what]).seconds


def way_seconds(
    way: str, payload_bytes: float, dense_bytes: float, topology: Topology, links: Mapping[str, Links], across: str
) -> float:
    """Seconds of the collectives of one exchange, on networks as each kind of collective sees them.

    Args:
        way: "dense", "allgather", "scatter_reduce" or "hierarchical".
        payload_bytes: of each worker's payload.
        dense_bytes: of the gradients.
        links: kind of collective -> the networks.
        across: see `hierarchical`.
    """
    if way == "dense":
        return dense_allreduce(dense_bytes, topology, links["allreduce"]).seconds
    if way == "scatter_reduce":
        first = alltoall(payload_bytes, topology, links["alltoall"])
        return (first + allgather(payload_bytes / topology.workers, topology, links["allgather"])).seconds
    if way == "hierarchical":
        return hierarchical(payload_bytes, dense_bytes, topology, links["allgather"], across=across).seconds
    return allgather(payload_bytes, topology, links["allgather"]).seconds


def fit_network(points: Sequence[tuple[float, float]]) -> Network:
    """Latency and bandwidth from measured (bytes, seconds): the smallest gives one, the largest the other.

    What lies between is not fitted: shaped and buffered networks carry the first bytes faster than they can go on, and
    a line through all points would promise that speed to a whole gradient.

    Raises:
        ConfigurationError: there are not two different sizes.
    """
    (small, latency), (large, seconds) = min(points), max(points)
    if small == large:
        raise ConfigurationError(f"expected collectives of two different sizes or more, got {list(points)}")
    return Network(latency, (large - small) / (seconds - latency) if seconds > latency else float("inf"))


def _ring(edge_bytes: float, topology: Topology, links: Links) -> Cost:
    """A collective in which each worker passes `edge_bytes` in all to the next; one edge leaves each node."""
    between = edge_bytes if topology.nodes > 1 else 0.0
    within = edge_bytes if max(topology.local_sizes) > 1 else 0.0
    return Cost(edge_bytes, edge_bytes, between, _seconds(within, between, topology, links))


def _seconds(within: float, between: float, topology: Topology, links: Links) -> float:
    """Seconds of a flat collective: both networks are busy at once, so the slower one says how long."""
    if topology.workers == 1:
        return 0.0
    network = links.between if topology.nodes > 1 else links.within
    return network.latency_s + max(within / links.within.bytes_per_s, between / links.between.bytes_per_s)
