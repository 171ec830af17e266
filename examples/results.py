"""What a training of the examples gave, and how two of them are shown side by side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """What one training gave. Bytes are sums over all workers and steps; with one worker there are none."""

    compression: str
    workers: int
    epochs: int
    seed: int
    test_accuracy: float
    dense_bytes: int
    sent_bytes: int
    sent_ratio: float | None
    seconds: float
    #: what rank 0 counted, see `hvd_gradcomp.telemetry.BucketCounters`
    counters: dict[str, float]


def print_side_by_side(results: list[Result]) -> None:
    """A line for each figure, a column for each training."""
    rows = {
        "compression": [each.compression for each in results],
        "test accuracy": [f"{each.test_accuracy:.4f}" for each in results],
        "bytes a dense run sends": [f"{each.dense_bytes:,}" for each in results],
        "bytes sent": [f"{each.sent_bytes:,}" for each in results],
        "ratio": ["-" if each.sent_ratio is None else f"{each.sent_ratio:.2%}" for each in results],
        "seconds": [f"{each.seconds:.1f}" for each in results],
    }
    for name, cells in rows.items():
        print(f"{name:<24}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
