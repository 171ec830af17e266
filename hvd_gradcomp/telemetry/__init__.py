"""Counting what was sent and how long it took. Imported by the engine, the doors and the command line only."""

from hvd_gradcomp.telemetry.counters import BucketCounters, Counters

__all__ = ["BucketCounters", "Counters"]
