"""Local SGD without a framework: when workers meet, what they compare, and how their changes become the next anchor.

    no compression, no outer optimizer      p = average of the workers' p, by Horovod's allreduce
    otherwise                               change = average over workers of compressed(anchor - p), error fed
                                            anchor = anchor - change, or a step of the outer optimizer along it
                                            p = anchor

The anchor is what all workers agreed on when they last met. A door brings the tensors (`Replica`); steps are its own.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hvd_gradcomp.collectives import Allgather, Transport
from hvd_gradcomp.compressors import Compressor, NoCompression
from hvd_gradcomp.compressors.base import as_compressor
from hvd_gradcomp.engine.agreement import compare_settings, settings_message
from hvd_gradcomp.engine.buckets import Parameter
from hvd_gradcomp.engine.reduction import Reduction
from hvd_gradcomp.errors import ConfigurationError, NonFiniteError
from hvd_gradcomp.ops import Array, ops_for
from hvd_gradcomp.policy.local_steps import Clock, LocalSteps
from hvd_gradcomp.telemetry import BucketCounters, Counters


class Replica(Protocol):
    """The tensors of one worker, in a framework.

    Attributes:
        anchors: parameter name -> what all workers had in common when they last met; {} before the first step.
    """

    anchors: dict[str, Any]

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Those that are trained, in the same order on all workers; they travel as float32."""

    @property
    def buffers(self) -> Sequence[str]:
        """The names of what else is averaged."""

    @property
    def like(self) -> Array:
        """An array on the device that collectives use."""

    @property
    def has_outer(self) -> bool:
        """Whether an outer optimizer applies the averaged change."""

    def outer_settings(self) -> str:
        """By what workers compare their outer optimizers."""

    def outer_state(self) -> Any:
        """What the outer optimizer keeps; None where there is none."""

    def load_outer_state(self, state: Any) -> None:
        """The reverse, after `start`."""

    def start(self, values: Mapping[str, Any] | None) -> int:
        """Make anchors, and a new outer optimizer of them: from the parameters, or from saved anchors.

        Returns:
            A checksum of their bytes.
        """

    def changes(self) -> dict[str, Array]:
        """Parameter name -> anchor - parameter, in memory that the engine may keep."""

    def advance(self, change: Mapping[str, Array]) -> None:
        """Take the anchors and the parameters along the workers' average change (float32, flat)."""

    def average(self, what: str, counted: BucketCounters) -> None:
        """Replace "parameters" or "buffers" by their average over the workers, in place; see `count_whole`."""


class Meetings:
    """The workers that train a model on their own, and meet now and then.

    Args:
        replica: this worker's tensors.
        sync_every: see `policy.local_steps`.
        compressor: for the change since the last meeting; None averages the parameters.
        transport: among the workers.
        scope: precedes the names of collectives.

    Attributes:
        clock: the steps of this worker.
        reduction: exchanges changes; what is not sent of them is in it.
    """

    def __init__(
        self,
        replica: Replica,
        sync_every: LocalSteps,
        compressor: Compressor | None,
        transport: Transport,
        scope: str,
    ) -> None:
        self._replica = replica
        self.clock = Clock(sync_every)
        self._has_anchors = compressor is not None or replica.has_outer
        self._compressor = compressor or NoCompression()
        self._transport = transport
        self._scope = scope
        # Of the anchors that the workers have not compared yet.
        self._unchecked: int | None = None
        self.reduction = Reduction(self._compressor, replica.parameters, transport, scope=scope)

    @property
    def counters(self) -> Counters:
        """What was sent so far by this worker; `dense_bytes` are those of meeting at the same steps uncompressed."""
        return self.reduction.counters

    def before_step(self) -> None:
        """Before the first step: what the parameters are now is what the workers have in common."""
        if self._has_anchors and not self._replica.anchors:
            self._unchecked = self._replica.start(None)

    def after_steps(self, count: int = 1) -> None:
        """Count local steps, and meet if it is time for it."""
        if self.clock.count(count):
            self.synchronize()

    def synchronize(self) -> None:
        """Compare settings with all workers; then, if they have taken steps, bring parameters and buffers together.

        Raises:
            ConfigurationError: workers were given different settings, have taken different numbers of steps, or began
                with different parameters.
            NonFiniteError: some worker's change holds NaN or infinity; nothing was changed.
        """
        self._agree()
        if self.clock.since_meeting:
            if self._has_anchors:
                self._exchange_changes()
            else:
                self._average("parameters")
            self._average("buffers")
        self.clock.meet()

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all workers after a meeting; with a warning where they are between two."""
        if self.clock.since_meeting:
            warnings.warn(
                f"this state is saved {self.clock.since_meeting} steps after the workers last met, so it is this "
                "worker's alone: call synchronize() before saving what all are to load",
                stacklevel=3,
            )
        return {
            **self.clock.state_dict(),
            "anchors": dict(self._replica.anchors),
            "outer": self._replica.outer_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`.

        Raises:
            ConfigurationError: it belongs to another model, or to other options.
        """
        replica = self._replica
        saved: Mapping[str, Any] = state["anchors"]
        expected = {each.name: each.shape for each in replica.parameters}
        if saved and {name: tuple(each.shape) for name, each in saved.items()} != expected:
            raise ConfigurationError(
                "the state was saved for other parameters than these: load it into the same model, with the same names "
                f"(saved: {_few(saved)}; here: {_few(expected)})"
            )
        if (state["outer"] is None) == replica.has_outer and saved:
            raise ConfigurationError(
                "the state was saved with an outer optimizer and is loaded without one, or the other way round: "
                "make LocalSGD (or DiLoCo) as it was made for the training that saved it"
            )
        replica.anchors.clear()
        self._unchecked = None
        if saved and self._has_anchors:
            self._unchecked = replica.start(saved)
            if replica.has_outer:
                replica.load_outer_state(state["outer"])
        self.clock.load_state_dict(state)

    # -- meeting ------------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        replica, transport = self._replica, self._transport
        like = replica.like
        ops = ops_for(like)
        own = {
            **self.clock.settings(),
            "compression": str(self._compressor),
            "outer": replica.outer_settings(),
            "parameters": zlib.crc32(repr([(each.name, each.shape) for each in replica.parameters]).encode()),
            "buffers": sorted(replica.buffers),
        }
        if self._has_anchors:
            own["starting values (see hvd.broadcast_parameters)"] = self._unchecked
        message = settings_message(ops, own, like)
        received = transport.wait(transport.start(Allgather(message), f"{self._scope}settings"))
        compare_settings(ops, received, transport.ranks, transport.rank)
        self._unchecked = None

    def _average(self, what: str) -> None:
        if self._transport.workers > 1 and (what == "parameters" or self._replica.buffers):
            self._replica.average(what, self.counters.bucket(what))

    def _exchange_changes(self) -> None:
        changes = self._replica.changes()
        mean = self.reduction.reduce(changes) if self._transport.workers > 1 else changes
        if not all(ops_for(each).all_finite(each) for each in mean.values()):
            raise NonFiniteError(
                "the parameters of some worker hold NaN or infinity, or changed by more than float32 can hold, since "
                "the workers last met: lower the learning rate or meet more often, and load the last checkpoint"
            )
        self._replica.advance(mean)


def count_whole(counted: BucketCounters, elements: int, size: int) -> None:
    """Count an exchange of `elements` values, `size` bytes, that Horovod adds as they are."""
    counted.exchanges += 1
    counted.elements += elements
    counted.kept += elements
    counted.dense_bytes += size
    counted.sent_bytes += size
    counted.received_bytes += size


def change_compressor(compression: object, none: object) -> Compressor | None:
    """What was given as `compression=`, where None and Horovod's `Compression.none` stand for averaging parameters.

    Raises:
        ConfigurationError: it is something else than a compressor of this package.
    """
    if compression is None or compression is none:
        return None
    compressor = as_compressor(compression)
    if compressor is None:
        raise ConfigurationError(
            f"compression must be a compressor of hvd_gradcomp or None, got {compression!r}; "
            "instead of hvd.Compression.fp16 use FP16()"
        )
    return compressor


def _few(names: Mapping[str, object]) -> str:
    first = ", ".join(list(names)[:3])
    return f"{len(names)} beginning with {first}"
