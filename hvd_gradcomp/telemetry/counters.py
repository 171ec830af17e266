"""Counters of one optimizer on this worker, for each bucket and in all."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from time import perf_counter
from types import TracebackType


@dataclass
class BucketCounters:
    """Sums since the start (or the last `reset`) over one bucket's exchanges on this worker.

    Attributes:
        exchanges: how often the bucket was exchanged.
        dense_bytes: bytes of the gradients as they are, which a dense run hands to allreduce.
        sent_bytes: bytes this worker handed to collectives, headers included.
        node_bytes: those of `sent_bytes` that went to collectives among the workers of this node only.
        received_bytes: bytes of other workers' payloads; of a dense or added exchange, the bytes of the result.
        elements: gradient values.
        kept: gradient values in the payloads sent, of sparse and dense ones alike.
        compress_seconds: time in error feedback, selecting and coding.
        exchange_seconds: time spent waiting for collectives (what overlaps with other work is not waited for).
        decompress_seconds: time in checking, decoding and averaging.
        scattered: exchanges by way of owners (scatter_reduce).
        nodewise: exchanges in which a node's gradients were added before anything was compressed (hierarchical).
        fallbacks: exchanges sent dense because compression would have moved more bytes at this worker count.
        non_finite: exchanges that were passed on as NaN because some worker's gradient was not finite.
    """

    exchanges: int = 0
    dense_bytes: int = 0
    sent_bytes: int = 0
    node_bytes: int = 0
    received_bytes: int = 0
    elements: int = 0
    kept: int = 0
    compress_seconds: float = 0.0
    exchange_seconds: float = 0.0
    decompress_seconds: float = 0.0
    scattered: int = 0
    nodewise: int = 0
    fallbacks: int = 0
    non_finite: int = 0

    def timed(self, phase: str) -> Stopwatch:
        """A context that adds its duration to `<phase>_seconds`."""
        return Stopwatch(self, f"{phase}_seconds")


@dataclass
class Counters:
    """The counters of all buckets by name; small tensors, which Horovod fuses itself, are under "dense"."""

    buckets: dict[str, BucketCounters] = field(default_factory=dict)
    _waited_before: float = 0.0

    def bucket(self, name: str) -> BucketCounters:
        """The counters of bucket `name`, made on first use."""
        found = self.buckets.get(name)
        if found is None:
            found = self.buckets[name] = BucketCounters()
        return found

    @property
    def total(self) -> BucketCounters:
        """The sums over all buckets."""
        sums = BucketCounters()
        for item in fields(BucketCounters):
            setattr(sums, item.name, sum(getattr(bucket, item.name) for bucket in self.buckets.values()))
        return sums

    @property
    def waited_s(self) -> float:
        """Seconds of compressing, waiting and decoding since the start, over all resets."""
        phases = (
            each.compress_seconds + each.exchange_seconds + each.decompress_seconds for each in self.buckets.values()
        )
        return self._waited_before + sum(phases)

    def reset(self) -> None:
        """Start again from zero."""
        self._waited_before = self.waited_s
        self.buckets.clear()


class Stopwatch:
    """Adds the seconds between enter and exit to one field."""

    def __init__(self, counters: BucketCounters, attribute: str) -> None:
        self._counters = counters
        self._attribute = attribute

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        passed = perf_counter() - self._start
        setattr(self._counters, self._attribute, getattr(self._counters, self._attribute) + passed)
