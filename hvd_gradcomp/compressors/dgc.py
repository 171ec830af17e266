"""Deep Gradient Compression: top-k with momentum correction, clipping and a warm-up of the ratio, under one name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.compressors.topk import TopK
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import Memory, MomentumCorrection
from hvd_gradcomp.ops import Array, Ops

# Each stage of the warm-up sends a quarter of the one before it: 25 %, 6.25 %, 1.5625 %, 0.4 %.
_STAGES = 4
_QUARTER = 0.25


@dataclass(frozen=True)
class DGC(TopK):
    """`TopK` as Deep Gradient Compression uses it: 0.1 % of the values, chosen from residuals that carry momentum.

    Selection is that of `TopK` (a sampled bound first, then exact); so are bits, contraction and cost. The memory is
    `MomentumCorrection`, whose docstring has the formulas; clipping is its option: `memory=dgc(clip=1.0)`. During the
    first `warmup_steps` steps the ratio falls in equal stages 25 %, 6.25 %, 1.5625 %, 0.4 %, never below `ratio`; then
    it is `ratio`. Early gradients change fast, and what is held back of them grows stale.

    Use it for the smallest ratios (0.1 %), where plain error feedback delays momentum too long. Give the optimizer
    momentum 0. Compose it with a value code: `DGC(0.001) >> FP16()` sends what the paper's code does.

    Args:
        ratio: fraction of the values to send after the warm-up, 0 < ratio <= 1.
        warmup_steps: steps of the whole warm-up; 0 for none. The paper takes the first four epochs.

    References:
        Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth
        for Distributed Training", ICLR 2018.
    """

    spec_name: ClassVar[str] = "dgc"

    ratio: float = 0.001
    warmup_steps: int = 0

    memory: Memory = field(default=MomentumCorrection(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ConfigurationError(f"warmup_steps must be a number of steps >= 0, got {self.warmup_steps!r}")

    def with_ratio(self, ratio: float) -> Compressor:
        # Whoever sets the ratio has taken the warm-up into their own hands.
        return replace(self, ratio=ratio, warmup_steps=0)

    def at(self, step: int) -> TopK:
        ratio = self.ratio
        if step < self.warmup_steps:
            ratio = max(ratio, _QUARTER ** (1 + _STAGES * step // self.warmup_steps))
        return TopK(ratio, memory=self.memory, dense_below=self.dense_below, granularity=self.granularity)

    def select(self, ops: Ops, x: Array, context: Context) -> Array:
        return self.at(context.step).select(ops, x, context)
