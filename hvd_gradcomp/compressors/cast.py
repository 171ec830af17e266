"""Sixteen-bit floats, and no compression at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.compressors.base import Context
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.ops.base import FLOAT_BYTES
from hvd_gradcomp.wire.values import encode_floats

# The largest finite values of the formats: beyond them a value would round to infinity.
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
# By how much of itself a value may grow when it is rounded to the format.
_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class NoCompression(ValueCode):
    """Send gradients as they are, through Horovod's own fused allreduce; counted, and bfloat16 travels too.

    Nothing is left over; what an earlier compressor left over is sent with the first gradient.
    """

    meets: ClassVar[str] = "dense"
    spec_name: ClassVar[str] = "none"

    def value_bits(self) -> float:
        return 32

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        return encode_floats(ops, values, "float32"), values


@dataclass(frozen=True)
class _Cast(ValueCode):
    """Round to nearest even in a 16-bit float format. Payloads add up, so an allreduce adds them.

    16 bits a value, two passes. With error feedback the rounding error is sent later, and so is the part of a value
    that exceeds about the largest number of the format divided by the worker count (so that no sum overflows).
    """

    meets: ClassVar[str] = "sum"

    def value_bits(self) -> float:
        return 8.0 * FLOAT_BYTES[self.sum_kind]

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        rounded = self._rounded(ops, values, 1)
        return encode_floats(ops, rounded, self.sum_kind), rounded

    def summands(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        rounded = self._rounded(ops, x, context.workers)
        return rounded, x - rounded

    def from_sum(self, ops: Ops, total: Array, size: int, context: Context) -> Array:
        return total

    def _rounded(self, ops: Ops, x: Array, workers: int) -> Array:
        largest = _LARGEST[self.sum_kind]
        if workers > 1:
            # The value is rounded, and so may be each of the workers - 1 sums on the way: all of that can be upwards.
            largest /= workers * (1 + _ROUNDING[self.sum_kind]) ** workers
        packed = ops.pack_float(ops.clip(x, -largest, largest), self.sum_kind)
        return ops.unpack_float(packed, self.sum_kind)


@dataclass(frozen=True)
class FP16(_Cast):
    """IEEE half precision: 11 significant bits, magnitudes from 6e-8 to 65504.

    As Horovod's `Compression.fp16`, and with error feedback. Prefer `BF16` for gradients of very different sizes.
    """

    spec_name: ClassVar[str] = "fp16"
    sum_kind: ClassVar[str] = "float16"


@dataclass(frozen=True)
class BF16(_Cast):
    """bfloat16: 8 significant bits, the range of float32.

    Horovod refuses to add bfloat16, so the payloads meet by an alltoall of bytes, are added in float32, rounded once
    more, and gathered: the same number of bytes as a bfloat16 allreduce would move.
    """

    spec_name: ClassVar[str] = "bf16"
    sum_kind: ClassVar[str] = "bfloat16"
