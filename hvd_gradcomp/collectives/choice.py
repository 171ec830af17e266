"""Which exchange moves fewer bytes. A pure function of sizes, so that all workers choose the same."""

from __future__ import annotations


def moves_fewer_bytes(payload: float, dense: float, workers: int, collective: str = "allgather") -> bool:
    """Whether an exchange of `payload` bytes from each worker beats a ring allreduce of `dense` bytes.

    An allgather brings each worker (N - 1) payloads, a scatter_reduce 2 (N - 1) / N; the ring allreduce 2 (N - 1) / N
    times the dense bytes.
    """
    return payload < dense if collective == "scatter_reduce" else payload * workers < 2 * dense
