"""Workers as threads of one process, whose collectives meet in memory: training with N workers without a job.

For measuring what compression does to a training, which needs the engine, not a network. It times nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from hvd_gradcomp.collectives import Allgather, Allreduce, Request


@dataclass
class Meeting:
    """A collective of some ranks, and the requests that have come so far, by rank."""

    members: tuple[int, ...]
    requests: dict[int, Request] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.requests) == len(self.members)


class Workers:
    """`count` workers; `run` lets all of them do something together.

    Args:
        count: how many.
        nodes: the number of workers on each node, `count` in all; by default all are on one.
    """

    def __init__(self, count: int, nodes: Sequence[int] = ()) -> None:
        if nodes and sum(nodes) != count:
            raise ValueError(f"nodes must give the number of workers on each node, {count} in all; got {nodes}")
        self.count = count
        ends = list(accumulate(nodes or (count,)))
        self.nodes = tuple(tuple(range(end - size, end)) for end, size in zip(ends, nodes or (count,), strict=True))
        self.transports = [InProcess(self, rank, tuple(range(count))) for rank in range(count)]
        self._meetings: dict[tuple[str, tuple[int, ...]], Meeting] = {}
        self._changed = threading.Condition()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` returned for each rank.

        Raises:
            RuntimeError: some worker failed; its error is the cause.
        """
        results: list[Any] = [None] * self.count
        errors: list[BaseException] = []

        def worker(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                with self._changed:
                    self._changed.notify_all()

        threads = [threading.Thread(target=worker, args=(rank,), daemon=True) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not errors:
                thread.join(0.5)
        if errors:
            raise RuntimeError(f"a worker failed: {errors[0]}") from errors[0]
        return results

    def start(self, rank: int, request: Request, name: str, members: tuple[int, ...]) -> Meeting:
        """Hand in a request of one of `members`; the last one's makes it complete."""
        with self._changed:
            meeting = self._meetings.setdefault((name, members), Meeting(members))
            meeting.requests[rank] = request
            if meeting.is_complete:
                del self._meetings[name, members]
                self._changed.notify_all()
        return meeting

    def wait(self, rank: int, meeting: Meeting) -> torch.Tensor:
        """The result for `rank`, added or gathered in the order of ranks."""
        with self._changed:
            self._changed.wait_for(lambda: meeting.is_complete)
        requests = [meeting.requests[each] for each in meeting.members]
        mine = meeting.requests[rank]
        if isinstance(mine, Allgather):
            return torch.cat([each.payload for each in requests])
        if isinstance(mine, Allreduce):
            values = torch.stack([each.values for each in requests])
            if mine.op == "max":
                return values.amax(0)
            # As Horovod adds: in the format itself, one after another.
            total = values[0].to(getattr(torch, mine.kind), copy=True)
            for each in values[1:]:
                total += each.to(total.dtype)
            return total.to(torch.float32)
        place = meeting.members.index(rank)
        return torch.cat([each.payload.split(each.splits)[place] for each in requests])


class InProcess:
    """The `Transport` of one worker.

    Args:
        among: all workers.
        worker: its rank among all of them.
        ranks: those that meet here, ascending.
    """

    def __init__(self, among: Workers, worker: int, ranks: tuple[int, ...]) -> None:
        self._among = among
        self._worker = worker
        self.ranks = ranks

    @property
    def rank(self) -> int:
        """The worker's rank among those that meet."""
        return self.ranks.index(self._worker)

    @property
    def workers(self) -> int:
        """How many meet."""
        return len(self.ranks)

    def adds(self, kind: str) -> bool:
        """As Horovod: not bfloat16."""
        return kind != "bfloat16"

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """See `Transport.nodes`."""
        found = [tuple(self.ranks.index(rank) for rank in node if rank in self.ranks) for node in self._among.nodes]
        return tuple(node for node in found if node)

    def part(self, groups: Sequence[Sequence[int]]) -> InProcess:
        """See `Transport.part`."""
        mine = next(group for group in groups if self.rank in group)
        return InProcess(self._among, self._worker, tuple(sorted(self.ranks[place] for place in mine)))

    def start(self, request: Request, name: str) -> Meeting:
        """See `Transport.start`."""
        return self._among.start(self._worker, request, name, self.ranks)

    def wait(self, handle: Meeting) -> torch.Tensor:
        """See `Transport.wait`."""
        return self._among.wait(self._worker, handle)
