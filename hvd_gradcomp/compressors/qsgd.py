"""QSGD: stochastic rounding to few levels of a norm, in a code that is short where most levels are zero."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import NormalDist
from typing import ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.compressors.blocks import LARGEST, Ratios, block_max, check_block, length_of, usable
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.compressors.linear import bits_for, check_seed, quantize
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import Memory, NoMemory
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.levels import MOST_LEVELS, encode_levels, gamma_bits, level_bits

_QUANTILES = 1000


@dataclass(frozen=True)
class QSGD(ValueCode):
    """Quantized SGD: decoded = norm * sign(v) * level / s, with E[decoded] = v.

    In a bucket of d values v, norm = ||v||_2 (or max|v|), r = s |v| / norm, and level is r rounded up or down at random
    so that its mean is r. Unbiased, with variance E||decoded - v||^2 <= min(d / s^2, sqrt(d) / s) ||v||_2^2 for the L2
    norm (Lemma 3.1 of the paper), <= d max|v|^2 / (4 s^2) for the maximum.

    Levels take log2(2 s + 1) bits, rounded up, or an Elias gamma code where that is shorter: with the L2 norm most
    levels are zero, and 4 levels in buckets of 512 take about 1.5 bits a value instead of 4. 32 / bucket bits more for
    the norm. About ten passes, and 30 in cache for the draws. Payloads do not add up.

    No memory by default: the variance is the price of having no bias, and error feedback needs an error that is smaller
    than the values, which holds only where the bound above is below one. Use it where no memory is to spare or where
    theory asks for unbiased gradients; more levels or the maximum where training suffers from the noise.

    Args:
        levels: s, levels on each side of zero, 1 to 127.
        norm: "l2" or "max".
        bucket: values that share a norm, a power of two; None means the whole tensor.
        seed: of the draws; workers draw differently, and anew at every step.

    References:
        D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient
        Quantization and Encoding", NeurIPS 2017.
    """

    spec_name: ClassVar[str] = "qsgd"

    levels: int = 4
    norm: str = "l2"
    bucket: int | None = 512
    seed: int = 0
    memory: Memory = field(default=NoMemory(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.levels, bool) or not isinstance(self.levels, int) or not 1 <= self.levels <= MOST_LEVELS:
            raise ConfigurationError(f"levels must be 1 to {MOST_LEVELS}, got {self.levels!r}")
        if self.norm not in ("l2", "max"):
            raise ConfigurationError(f"norm must be 'l2' or 'max', got {self.norm!r}")
        check_block(self.bucket, "bucket")
        check_seed(self.seed)

    def with_ratio(self, ratio: float) -> Compressor:
        return replace(self, levels=(1 << (bits_for(ratio) - 1)) - 1)

    def value_bits(self) -> float:
        bucket = length_of(self.bucket)
        return min(level_bits(self.levels), _gamma_bits(self.levels, self.norm, bucket)) + 32 / bucket

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        bucket = length_of(self.bucket)
        if self.norm == "l2":
            norms = Ratios.of(ops, values, bucket).norm(ops)
        else:
            norms = ops.clip(block_max(ops, ops.abs(values), bucket), 0.0, LARGEST)
        steps = usable(ops, ops.divide(norms, self.levels))
        levels, decoded = quantize(ops, values, steps, bucket, self.levels, context.key(self.seed))
        whole = ops.cast(levels, "int64")
        coded = encode_levels(ops, whole, steps, bucket.bit_length() - 1, self.levels, shorter=True)
        return coded, decoded


@cache
def _gamma_bits(levels: int, norm: str, bucket: int) -> float:
    """Bits of a level in the gamma code where values are normal, as gradients nearly are."""
    normal = NormalDist()
    # A whole tensor is taken for one of 2**16 values. The largest of d values exceeds its median in half of all cases.
    size = min(bucket, 1 << 16)
    norms = math.sqrt(size) if norm == "l2" else normal.inv_cdf((1 + 0.5 ** (1 / size)) / 2)
    total = 0.0
    for quantile in range(_QUANTILES):
        ratio = min(levels, levels * normal.inv_cdf(0.5 + (quantile + 0.5) / _QUANTILES / 2) / norms)
        low = math.floor(ratio)
        total += gamma_bits(low) + (ratio - low) * (gamma_bits(low + 1) - gamma_bits(low))
    return total / _QUANTILES
