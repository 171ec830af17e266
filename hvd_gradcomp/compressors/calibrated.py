"""Linear quantization whose scale is calibrated: from each step, a moving mean, or every so many steps; and clipped."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.compressors.blocks import LARGEST, length_of, usable
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.compressors.linear import Linear, bits_for, quantize
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback.memory import number, require_number
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.levels import MOST_LEVELS, encode_levels, encode_linear8

#: The part of a tensor's state: the scale in use, and sum and count of what was observed since it was made.
_PART = "calibration"


@dataclass(frozen=True)
class Calibrated(ValueCode):
    """`Linear` with one scale for the tensor that need not be the largest magnitude of the moment.

    With s = 2**(bits - 1) - 1, m_t the `percentile` of the magnitudes of step t, and c_t the scale:

        step = c_t / s,    level = round(v / step) in [-s, s],    decoded = level * step
        c_t = m_t                                                   by default
        c_t = decay * c_{t-1} + (1 - decay) * m_t                   moving, with decay > 0
        c_t = mean of m over the last `every` steps                 made anew every `every` steps, with every > 1

    Magnitudes above the scale are clipped to it. A percentile below 100 keeps a few outliers from making the step
    coarse for all others, and a scale that moves slowly keeps one odd step from doing so. Biased; what is clipped or
    rounded comes back by error feedback (the default). `bits` bits a value and 4 bytes a tensor. Payloads do not add
    up: each worker calibrates by its own gradients. Cost: as `Linear`, and a selection where percentile < 100.

    The scale lives with the residual and is saved with it (that of one worker); a dense step in between forgets it.

    Args:
        bits: 2 to 8.
        percentile: 0 < percentile <= 100, of the magnitudes (after a sparsifier, of those that were selected).
        decay: 0 <= decay < 1.
        every: steps between two calibrations.

    References:
        S. Migacz, "8-bit Inference with TensorRT", GTC 2017 (calibration); the percentile is that of H. Wu et al.,
        "Integer Quantization for Deep Learning Inference: Principles and Empirical Evaluation", 2020.
    """

    spec_name: ClassVar[str] = "calibrated"

    bits: int = 8
    percentile: float = 100.0
    decay: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ConfigurationError(f"bits must be 2 to 8, got {self.bits!r}")
        require_number(self, "percentile", "0 < percentile <= 100", 0 < number(self.percentile) <= 100)
        require_number(self, "decay", "0 <= decay < 1", 0 <= number(self.decay) < 1)
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigurationError(f"every must be a number of steps >= 1, got {self.every!r}")
        if self.every > 1 and self.decay:
            raise ConfigurationError(f"give decay or every, not both (got decay={self.decay}, every={self.every})")

    def with_ratio(self, ratio: float) -> Compressor:
        return replace(self, bits=bits_for(ratio))

    @property
    def learns(self) -> bool:
        return self.every > 1 or self.decay > 0

    def value_bits(self) -> float:
        return self.bits

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        if not len(values):
            # Nothing was observed: what is known stays.
            context.kept.update({part: x for part, x in context.state.items() if part == _PART})
            return Linear(bits=self.bits, block=None).encode_values(ops, values, context)
        block, most = length_of(None), (1 << (self.bits - 1)) - 1
        scale = self._scale(ops, ops.abs(values), context)
        steps = usable(ops, ops.zeros(1, "float32", values) + min(scale, LARGEST) / most)
        levels, decoded = quantize(ops, values, steps, block, most)
        if most == MOST_LEVELS:
            return encode_linear8(ops, ops.cast(levels, "int8"), steps, block.bit_length() - 1), decoded
        return encode_levels(ops, ops.cast(levels, "int64"), steps, block.bit_length() - 1, most), decoded

    def _scale(self, ops: Ops, magnitudes: Array, context: Context) -> float:
        """The scale of this step; what the next one has to know goes to `context.kept`."""
        observed = self._observed(ops, magnitudes)
        if self.every == 1 and not self.decay:
            return observed
        known = context.state.get(_PART)
        scale, total, count = (0.0, 0.0, 0.0) if known is None else (float(known[place]) for place in range(3))
        if self.decay:
            scale = observed if known is None else self.decay * scale + (1 - self.decay) * observed
        else:
            if count >= self.every:
                scale, total, count = total / count, 0.0, 0.0
            scale = observed if known is None else scale
            total, count = total + observed, count + 1
        parts = [ops.zeros(1, "float32", magnitudes) + value for value in (scale, total, count)]
        context.kept[_PART] = ops.concat(parts)
        return scale

    def _observed(self, ops: Ops, magnitudes: Array) -> float:
        beyond = math.floor((1 - self.percentile / 100) * len(magnitudes))
        if beyond:
            return float(ops.kth_largest(magnitudes, beyond + 1))
        return float(ops.row_max(magnitudes, len(magnitudes))[0])
