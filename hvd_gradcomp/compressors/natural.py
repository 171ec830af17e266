"""Natural compression: stochastic rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hvd_gradcomp.compressors.base import Context
from hvd_gradcomp.compressors.blocks import TINY
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.compressors.linear import check_seed
from hvd_gradcomp.feedback import Memory, NoMemory
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.powers import LARGEST_EXPONENT, encode_powers, powers_of_two

_MANTISSA_BITS = 23


@dataclass(frozen=True)
class Natural(ValueCode):
    """C_nat: each value becomes one of the two powers of two around it, with its sign.

    For |v| = 2**e (1 + f), 0 <= f < 1: decoded = sign(v) 2**(e + 1) with probability f, else sign(v) 2**e, so that
    E[decoded] = v. Unbiased, variance E||decoded - v||^2 <= ||v||^2 / 8 (Theorem 1 of the paper), the lowest of the
    unbiased codes here, and independent of how the values are distributed: there are no scales.

    The sign and float32's own 8 exponent bits are 9 bits; as the exponents of one tensor lie close together, they are
    sent in as few bits as their range needs: 6 to 7 a value for most gradients. About 12 passes, and 30 in cache for
    the draws. Payloads do not add up. Subnormal values count as zero, and values above 2**127 become 2**127.

    No memory by default: there is no bias to correct. Error feedback works as well (1/8 is well below one), and so does
    any sparsifier in front. Use it where the scale of values varies wildly; `Int8` is more exact for the same bytes.

    Args:
        seed: of the draws; workers draw differently, and anew at every step.

    References:
        S. Horvath, C.-Y. Ho, L. Horvath, A. N. Sahu, M. Canini, P. Richtarik, "Natural Compression for Distributed
        Deep Learning", MSML 2022.
    """

    spec_name: ClassVar[str] = "natural"

    seed: int = 0
    memory: Memory = field(default=NoMemory(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)

    def value_bits(self) -> float:
        return 7.0

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        magnitudes = ops.abs(values)
        bits = ops.cast(ops.from_bytes(ops.bytes_of(magnitudes), "int32"), "int64")
        # A draw below the fraction carries into the exponent: the fraction's bits are its probability.
        draws = ops.cast(ops.uniform(len(values), context.key(self.seed), values) * 2.0**_MANTISSA_BITS, "int64")
        exponents = ops.clip(ops.shift_right(bits + draws, _MANTISSA_BITS), 0, LARGEST_EXPONENT)
        exponents = ops.where(magnitudes >= TINY, exponents, 0)
        negative = ops.cast(values <= -TINY, "int64")
        powers = powers_of_two(ops, exponents)
        return encode_powers(ops, exponents, negative), ops.where(negative > 0, -powers, powers)
