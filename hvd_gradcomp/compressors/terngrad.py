"""TernGrad: each value becomes -s, 0 or s at random, so that its mean is right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hvd_gradcomp.compressors.base import Context
from hvd_gradcomp.compressors.blocks import LARGEST, Ratios, block_max, check_block, length_of, usable
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.compressors.linear import check_seed, quantize
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import Memory, NoMemory
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.trits import encode_trits


@dataclass(frozen=True)
class TernGrad(ValueCode):
    """Ternary gradients with a scale for each layer, after clipping.

    sigma = sqrt(mean(v^2)), w = v limited to [-c sigma, c sigma], s = max|w|, decoded = s sign(w) b where b is 1 with
    probability |w| / s, else 0. E[decoded] = w: unbiased but for what is clipped (1.2 % of normal values for c = 2.5);
    variance E||decoded - w||^2 = s ||w||_1 - ||w||_2^2, which for normal values is about ||w||^2.
    1.6 bits a value (five trits in a byte), about twelve passes, and 30 in cache for the draws. Payloads do not add up.
    sigma is taken about zero instead of the mean, so that a tensor of equal values is not clipped away.

    No memory by default, as in the paper: it is the averaging over workers and steps that brings the noise down, so use
    it with many workers or large batches. Error feedback would add up the errors, which are as large as the values;
    `ScaledSign` with error feedback is the better choice at about the same bits where memory is to spare.

    Args:
        clip: c, at least 1, in units of sigma; None does not clip, and then one outlier makes s and the variance large.
        block: values that share a scale, a power of two; None, the paper's choice, means the whole tensor.
        seed: of the draws; workers draw differently, and anew at every step.

    References:
        W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: Ternary Gradients to Reduce Communication in
        Distributed Deep Learning", NeurIPS 2017.
    """

    spec_name: ClassVar[str] = "terngrad"

    clip: float | None = 2.5
    block: int | None = None
    seed: int = 0
    memory: Memory = field(default=NoMemory(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.clip, (int, float)) and not isinstance(self.clip, bool)
        if self.clip is not None and not (number and 1 <= self.clip <= 1e6):
            raise ConfigurationError(f"clip must be a number with 1 <= clip <= 1e6, or None, got {self.clip!r}")
        check_block(self.block)
        check_seed(self.seed)

    def value_bits(self) -> float:
        return 1.6 + 32 / length_of(self.block)

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        block = length_of(self.block)
        scales = self.scales(ops, values)
        # Levels beyond one are cut by `quantize`, which is the clipping.
        levels, decoded = quantize(ops, values, scales, block, 1, context.key(self.seed))
        return encode_trits(ops, levels, scales, block.bit_length() - 1), decoded

    def scales(self, ops: Ops, values: Array) -> Array:
        """s of each block: shape (count,) to (blocks,)."""
        block = length_of(self.block)
        largest = ops.clip(block_max(ops, ops.abs(values), block), 0.0, LARGEST)
        if self.clip is not None:
            sigma = Ratios.of(ops, values, block).root_mean_square(ops)
            clips = sigma < largest * (1 / self.clip)
            largest = ops.where(clips, ops.where(clips, sigma, 0.0) * self.clip, largest)
        return usable(ops, largest)
