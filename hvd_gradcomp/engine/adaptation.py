"""Asks a policy which method the next step uses, and tells it what the workers measured: the same on all of them.

Measuring takes place in few steps. Each worker notes how much of its gradients was left over; the workers then gather
these few numbers and take their mean in rank order. What the mean says to the policy is in `policy`.
"""

from __future__ import annotations

import math
import struct
import time
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.compressors.adaptive import Adaptive, left_by
from hvd_gradcomp.compressors.base import Context
from hvd_gradcomp.engine.units import Unit
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops, ops_for
from hvd_gradcomp.policy import Observed, State
from hvd_gradcomp.telemetry import Counters

# gain, candidate's gain, norm of the gradient, seconds of a step, bytes sent in a step, seconds of its exchange
_NUMBERS = struct.Struct("<6d")


@dataclass
class _Sums:
    """Squared L2 norms over the tensors of one step on this worker."""

    whole: float = 0.0
    left: float = 0.0
    candidate_left: float = 0.0
    gradient: float = 0.0


class Adaptation:
    """The compressor of one engine as it is at each step.

    Args:
        compressor: as the user gave it.

    Attributes:
        state: of the policy; () without one.
        in_use: the state that the step under way goes by.
        measuring: whether this step's gradients are looked at.
        like: an empty array on the device of the gradients.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.state: State = compressor.adapts.init() if compressor.adapts else ()
        self.measuring = False
        self.like: Array = None
        self.in_use = self.state
        self._sums = _Sums()
        self._candidate: float | None = None
        # Since the last observation: when it was, steps that ended; bytes sent and seconds spent on exchanges before.
        self._since: float | None = None
        self._steps = 0
        self._bytes_before = 0
        self._waited_before = 0.0

    # -- a step, in the order of the calls ----------------------------------------------------------------------------

    def begin(self, step: int, agreed: bool, like: Array) -> None:
        """Fix what holds for all buckets of a step.

        Args:
            step: its number, from 0.
            agreed: whether the workers know that their settings and states are alike; until they do, all do what the
                policy does at first, which needs no state, and measure nothing.
            like: an array on the device of the gradients.
        """
        policy = self.compressor.adapts
        if policy is None:
            return
        self.in_use = self.state if agreed else policy.init()
        self.measuring = agreed and policy.observes(step)
        # A view would keep the gradient's memory.
        self.like = ops_for(like).zeros(0, "uint8", like)
        self._sums = _Sums()
        self._candidate = policy.candidate(self.in_use, step) if self.measuring else None

    def method(self, step: int) -> Compressor:
        """How to compress in step `step`."""
        policy = self.compressor.adapts
        if policy is None:
            return self.compressor.at(step)
        assert isinstance(self.compressor, Adaptive)
        return self.compressor.chosen(policy.ratio(self.in_use, step))

    @property
    def looks(self) -> bool:
        """Whether `note_gradient` and `note` are wanted in this step."""
        policy = self.compressor.adapts
        return self.measuring and policy is not None and policy.observes_gradients

    @property
    def looks_further(self) -> bool:
        """Whether `note` will want to know what was sent."""
        return self._candidate is not None

    def note_gradient(self, ops: Ops, gradient: Array) -> None:
        """Look at a gradient (float32, (n,)) before its residual is added."""
        self._sums.gradient += norm(ops, gradient) ** 2

    def note(
        self,
        ops: Ops,
        unit: Unit,
        whole: float,
        residual: Array | None,
        sent: Array | None,
        context: Context,
    ) -> None:
        """Look at what became of a unit.

        Args:
            whole: the L2 norm of the vector that was compressed.
            residual: float32 (n,), what was not sent; None where everything was.
            sent: float32 (n,), what was, if `looks_further`; its memory may be reused.
        """
        sums = self._sums
        left = 0.0 if residual is None else norm(ops, residual) ** 2
        sums.whole += whole**2
        sums.left += left
        if sent is not None and self._candidate is not None:
            first = unit.parameters[0]
            smaller = self.compressor.with_ratio(self._candidate).of(first.name, first.shape)
            sums.candidate_left += left + norm(ops, left_by(ops, smaller, sent, context)) ** 2

    def message(self, ops: Ops, sent_bytes: int, waited_s: float) -> Array:
        """What this worker measured, as uint8, for an allgather.

        Args:
            sent_bytes: by this worker since the start.
            waited_s: seconds that it spent on exchanges since the start.
        """
        sums, now = self._sums, time.perf_counter()
        steps = max(1, self._steps)
        seconds = 0.0 if self._since is None else (now - self._since) / steps
        # Counters may have been reset by their user.
        sent = sent_bytes - self._bytes_before if sent_bytes >= self._bytes_before else sent_bytes
        waited = waited_s - self._waited_before
        self._since, self._steps, self._bytes_before, self._waited_before = now, 0, sent_bytes, waited_s
        numbers = (
            _gain(sums.left, sums.whole),
            _gain(sums.candidate_left, sums.whole),
            math.sqrt(sums.gradient),
            seconds,
            sent / steps,
            waited / steps,
        )
        return ops.from_host(_NUMBERS.pack(*numbers), self.like)

    def observed(self, ops: Ops, gathered: Array, ranks: Sequence[int]) -> Observed:
        """What all workers measured, the same bits on each.

        Raises:
            PayloadError: `gathered` does not hold the numbers of each worker.
        """
        data = ops.to_host(gathered)
        if len(data) != _NUMBERS.size * len(ranks):
            raise PayloadError(
                f"ranks {list(ranks)} sent {len(data)} bytes of measurements, expected {_NUMBERS.size} from each: "
                "check that all workers run the same version of hvd_gradcomp"
            )
        rows = list(_NUMBERS.iter_unpack(data))
        # In rank order, so that every worker gets the same bits.
        # A worker that looked at nothing (its gradients were zero, or others of its node own them) has no say in gains.
        having = [row for row in rows if row[0] >= 0] or [(1.0, 1.0)]
        gain, candidate = (sum(row[place] for row in having) / len(having) for place in range(2))
        length, seconds, sent_bytes = (sum(row[place] for row in rows) / len(rows) for place in range(2, 5))
        candidate = candidate if self.looks_further else None
        return Observed(gain, candidate, length, seconds, sent_bytes, min(row[5] for row in rows))

    def to_predict(self) -> tuple[float | None, ...]:
        """Ratios of which the policy wants to be told what they will take, the same on all workers."""
        policy = self.compressor.adapts
        return () if policy is None else policy.to_predict(self.state)

    def conclude(self, observed: Observed) -> None:
        """Tell the policy what all workers measured."""
        policy = self.compressor.adapts
        assert policy is not None
        self.state = policy.update(self.state, observed)
        # What came after the step was measured belongs to none.
        self._since = time.perf_counter()

    def end(self, counters: Counters) -> None:
        """Count a step that is over.

        Args:
            counters: of the engine.
        """
        self.measuring = False
        self._steps += 1
        if self._since is None and self.compressor.adapts is not None:
            # The first step holds what is done once only; it is not timed.
            self._since, self._steps, self._waited_before = time.perf_counter(), 1, counters.waited_s

    def report(self, step: int) -> dict[str, float]:
        """What the policy would show at step `step`; {} without one."""
        policy = self.compressor.adapts
        return {} if policy is None else policy.report(self.state, step)

    # -- what lasts ---------------------------------------------------------------------------------------------------

    def saved(self) -> tuple[float, ...]:
        """The policy's state for a checkpoint: a number for its hyper-parameters, then its own; () without one."""
        return (self._number(), *self.state) if self.compressor.adapts else ()

    def load(self, saved: Sequence[float]) -> None:
        """Go on from what `saved` returned; from nothing, or another policy's, begin anew."""
        policy = self.compressor.adapts
        if policy is None:
            return
        self.state = policy.init()
        numbers = tuple(float(each) for each in saved)
        if numbers and numbers[0] != self._number():
            warnings.warn(
                f"the checkpoint holds the state of another policy than {policy}, which begins anew", stacklevel=2
            )
        elif numbers:
            self.state = numbers[1:]
        self.in_use = self.state
        self._since = None

    def _number(self) -> float:
        return float(zlib.crc32(str(self.compressor.adapts).encode()))


def norm(ops: Ops, x: Array) -> float:
    """The L2 norm of float32 `x` (n,)."""
    if not len(x):
        return 0.0
    # Divided by the largest magnitude first: the square of a large value would be infinite.
    largest = float(ops.row_max(ops.abs(x), len(x))[0])
    if not 0 < largest < math.inf:
        return largest
    unit = x / largest
    return largest * math.sqrt(float(ops.matmul(unit, unit, 1, len(x), 1)[0]))


def _gain(left: float, whole: float) -> float:
    """1 - left / whole; -1 of nothing."""
    return max(0.0, 1 - left / whole) if whole > 0 else -1.0
