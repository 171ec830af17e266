"""A cluster in one process: workers are threads, and their collectives meet in memory, matched by name.

It behaves as Horovod does where that matters to the engine: a request begins at once and completes when all workers
have begun theirs, in whatever order; its memory belongs to the transport until then, and an allreduce writes its sum
there; a name that is begun twice, and requests that do not match, are errors at every worker. Unlike Horovod it never
hangs: a worker that waits for one that has stopped, or waits too long, fails. It measures no time and uses no network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from hvd_gradcomp.collectives import Allgather, Allreduce, Alltoall, Request
from hvd_gradcomp.ops import Array, ops_for

#: Changes what a worker sends: (rank in the job, name, request) -> the request that arrives.
Tamper = Callable[[int, str, Request], Request]


class ClusterError(Exception):
    """What Horovod would report as an error of its own, or as a stall."""


@dataclass(frozen=True)
class Sent:
    """One request as it was begun: its memory copied at that moment."""

    name: str
    request: Request


class _Meeting:
    """One collective: the requests that have come so far, and in the end each worker's result."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.requests: dict[int, Request] = {}
        self.results: dict[int, Array] | None = None
        self.error: str | None = None

    @property
    def over(self) -> bool:
        return self.results is not None or self.error is not None


class Cluster:
    """`workers` workers, among whom `run` runs a function.

    Args:
        workers: how many.
        adds: the formats that an allreduce can add; without "float16" and "bfloat16" sums take two rounds.
        ranks: the workers' ranks in the job, by which errors call them; unlike their places by default, so that a
            message that confuses the two does not pass.
        tamper: may change what a worker sends on its way.
        timeout: seconds after which a wait is taken for a hang.
        nodes: the number of workers on each node; by default all are on one.

    Attributes:
        sent: for each worker, the requests that it began, in its order.
    """

    def __init__(
        self,
        workers: int,
        *,
        adds: Sequence[str] = ("float32", "float16"),
        ranks: Sequence[int] | None = None,
        tamper: Tamper | None = None,
        timeout: float = 10.0,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.workers = workers
        self.ranks = tuple(ranks or (10 + 3 * worker for worker in range(workers)))
        self.adds = tuple(adds)
        self.tamper = tamper
        self.timeout = timeout
        self.nodes = tuple(nodes or (workers,))
        self.sent: list[list[Sent]] = [[] for _ in range(workers)]
        self._meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def run(self, work: Callable[[MemoryTransport], Any]) -> list[Any]:
        """What `work` returned on each worker; the first error of any worker is raised."""
        outcomes = self.outcomes(work)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        # A worker that merely waited in vain for another is not the cause.
        for error in sorted(errors, key=lambda each: isinstance(each, ClusterError)):
            raise error
        return outcomes

    def outcomes(self, work: Callable[[MemoryTransport], Any]) -> list[Any]:
        """What `work` returned, or the exception it raised, on each worker."""
        outcomes: list[Any] = [None] * self.workers
        self._gone.clear()
        self._meetings.clear()

        def worker(rank: int) -> None:
            try:
                outcomes[rank] = work(MemoryTransport(self, rank))
            except BaseException as error:
                outcomes[rank] = error
            with self._changed:
                self._gone.add(rank)
                self._changed.notify_all()

        threads = [threading.Thread(target=worker, args=(rank,), daemon=True) for rank in range(1, self.workers)]
        for thread in threads:
            thread.start()
        worker(0)
        for thread in threads:
            thread.join(self.timeout + 5)
        return outcomes

    # -- for MemoryTransport ------------------------------------------------------------------------------------------

    def start(
        self, rank: int, request: Request, name: str, members: Sequence[int]
    ) -> tuple[_Meeting, Request, Request]:
        """Begin among `members`; the handle is the collective, the request, and a copy of it as it was."""
        snapshot = _copied(request)
        arriving = self.tamper(self.ranks[rank], name, _copied(request)) if self.tamper else request
        with self._changed:
            self.sent[rank].append(Sent(name, snapshot))
            key = (name, tuple(members))
            meeting = self._meetings.setdefault(key, _Meeting(key[1]))
            if rank in meeting.requests:
                raise ClusterError(f"worker {rank} began {name!r} twice")
            meeting.requests[rank] = arriving
            if len(meeting.requests) == len(members):
                del self._meetings[key]
                _complete(meeting, name)
                self._changed.notify_all()
        return meeting, request, snapshot

    def wait(self, rank: int, handle: tuple[_Meeting, Request, Request]) -> Array:
        """The result for `rank`, as soon as it is there."""
        meeting, request, snapshot = handle
        with self._changed:
            if not self._changed.wait_for(lambda: meeting.over or self._absent(meeting), self.timeout):
                raise ClusterError("hang: some worker did not begin this collective in time")
        if meeting.error:
            raise ClusterError(meeting.error)
        if meeting.results is None:
            raise ClusterError(f"hang: workers {sorted(self._absent(meeting))} stopped without this collective")
        if not isinstance(request, Allreduce) and not _equal(request.payload, snapshot.payload):
            raise ClusterError("the payload was changed while it was under way")
        return meeting.results[rank]

    def _absent(self, meeting: _Meeting) -> set[int]:
        return (self._gone & set(meeting.members)) - set(meeting.requests)


@dataclass(frozen=True)
class MemoryTransport:
    """One worker's view of the cluster, or of some of its workers: the `Transport` of an engine."""

    cluster: Cluster
    place: int
    members: tuple[int, ...] = ()

    @property
    def _members(self) -> tuple[int, ...]:
        return self.members or tuple(range(self.cluster.workers))

    @property
    def rank(self) -> int:
        """This worker's place among them."""
        return self._members.index(self.place)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers' ranks in the job."""
        return tuple(self.cluster.ranks[member] for member in self._members)

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self._members)

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """As the cluster was told: workers in a row share a node."""
        ends = list(accumulate(self.cluster.nodes, initial=0))
        return tuple(tuple(range(start, end)) for start, end in pairwise(ends))

    def part(self, groups: Sequence[Sequence[int]]) -> MemoryTransport:
        """The workers of that group which this one is in."""
        (mine,) = (group for group in groups if self.rank in group)
        return MemoryTransport(self.cluster, self.place, tuple(self._members[rank] for rank in mine))

    def adds(self, kind: str) -> bool:
        """As the cluster was told."""
        return kind in self.cluster.adds

    def start(self, request: Request, name: str) -> Any:
        """See `Transport.start`."""
        return self.cluster.start(self.place, request, name, self._members)

    def wait(self, handle: Any) -> Array:
        """See `Transport.wait`."""
        return self.cluster.wait(self.place, handle)


def _complete(meeting: _Meeting, name: str) -> None:
    requests = [meeting.requests[rank] for rank in sorted(meeting.requests)]
    first = requests[0]
    alike = {
        (type(each), getattr(each, "kind", None), getattr(each, "op", None), _values_length(each)) for each in requests
    }
    if len(alike) > 1:
        meeting.error = f"mismatched requests for {name!r}: {alike}"
        return
    ops = ops_for(first.values if isinstance(first, Allreduce) else first.payload)
    if isinstance(first, Allgather):
        meeting.results = {rank: ops.concat([each.payload for each in requests]) for rank in meeting.requests}
    elif isinstance(first, Allreduce):
        add = _max if first.op == "max" else _sum
        total = add(ops, [each.values for each in requests], first.kind)
        # As Horovod does, into the memory of the request.
        meeting.results = {
            rank: ops.accumulate(ops.clear(each.values), total) for rank, each in meeting.requests.items()
        }
    else:
        parts = [_parts(each) for each in requests]
        places = {rank: place for place, rank in enumerate(sorted(meeting.requests))}
        meeting.results = {rank: ops.concat([part[place] for part in parts]) for rank, place in places.items()}


def _sum(ops: Any, vectors: list[Array], kind: str) -> Array:
    """Added one after another, and rounded each time, in the format `kind`."""
    total = ops.copy(vectors[0])
    for vector in vectors[1:]:
        total = ops.unpack_float(ops.pack_float(ops.accumulate(total, vector), kind), kind)
    return total


def _max(ops: Any, vectors: list[Array], kind: str) -> Array:
    """The largest of each element."""
    total = ops.copy(vectors[0])
    for vector in vectors[1:]:
        total = ops.where(vector > total, vector, total)
    return total


def _parts(request: Alltoall) -> list[Array]:
    ends = [sum(request.splits[: place + 1]) for place in range(len(request.splits))]
    assert ends[-1] == len(request.payload)
    return [request.payload[end - length : end] for end, length in zip(ends, request.splits, strict=True)]


def _values_length(request: Request) -> int | None:
    return len(request.values) if isinstance(request, Allreduce) else None


def _copied(request: Request) -> Request:
    if isinstance(request, Allreduce):
        return replace(request, values=ops_for(request.values).copy(request.values))
    return replace(request, payload=ops_for(request.payload).copy(request.payload))


def _equal(x: Array, y: Array) -> bool:
    return len(x) == len(y) and bool((x == y).all())
