"""Workers as threads of one process, whose collectives meet in memory: training with N workers without a job.

For measuring what compression does to a training, which needs the engine, not a network. It times nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from hvd_gradcomp.collectives import Allgather, Allreduce, Request


class Workers:
    """`count` workers; `run` lets all of them do something together."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.transports = [InProcess(self, rank) for rank in range(count)]
        self._requests: dict[str, dict[int, Request]] = {}
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

    def start(self, rank: int, request: Request, name: str) -> tuple[str, dict[int, Request]]:
        """Hand in a request; the last worker's makes it complete."""
        with self._changed:
            meeting = self._requests.setdefault(name, {})
            meeting[rank] = request
            if len(meeting) == self.count:
                del self._requests[name]
                self._changed.notify_all()
        return name, meeting

    def wait(self, rank: int, handle: tuple[str, dict[int, Request]]) -> torch.Tensor:
        """The result for `rank`, added or gathered in rank order."""
        _, meeting = handle
        with self._changed:
            self._changed.wait_for(lambda: len(meeting) == self.count)
        requests = [meeting[each] for each in range(self.count)]
        mine = requests[rank]
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
        starts = [sum(each.splits[:rank]) for each in requests]
        return torch.cat(
            [each.payload[start : start + each.splits[rank]] for each, start in zip(requests, starts, strict=True)]
        )


class InProcess:
    """The `Transport` of one worker."""

    def __init__(self, among: Workers, rank: int) -> None:
        self._among = among
        self.rank = rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all."""
        return tuple(range(self._among.count))

    @property
    def workers(self) -> int:
        """How many there are."""
        return self._among.count

    def adds(self, kind: str) -> bool:
        """As Horovod: not bfloat16."""
        return kind != "bfloat16"

    def start(self, request: Request, name: str) -> Any:
        """See `Transport.start`."""
        return self._among.start(self.rank, request, name)

    def wait(self, handle: Any) -> torch.Tensor:
        """See `Transport.wait`."""
        return self._among.wait(self.rank, handle)
