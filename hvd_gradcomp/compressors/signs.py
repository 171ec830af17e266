"""Sign methods: one bit a value, and nothing, one number or two for each block to scale it with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hvd_gradcomp.compressors.base import Context
from hvd_gradcomp.compressors.blocks import TINY, Ratios, check_block, length_of
from hvd_gradcomp.compressors.chain import ValueCode
from hvd_gradcomp.feedback import Memory, NoMemory
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import WHOLE, block_count, spread
from hvd_gradcomp.wire.signs import encode_two_values


@dataclass(frozen=True)
class Sign(ValueCode):
    """signSGD with majority vote: each worker sends signs, and the result is the sign that most of them sent.

    Decoded = sign(v), where sign(0) = 1, as +1 or -1; result = sign(sum over the workers), an average in {-1, 0, 1}
    (0 where the vote is split evenly; with op=Sum, the worker count times that). 1 bit a value, three passes.

    The scale of the gradient is gone, for which reason no tensor is too small to take part, and no worker count makes
    the engine exchange gradients instead. So choose a learning rate as for Adam (1e-4 to 1e-3), not as for SGD. Biased.
    Votes are no sums, so error feedback cannot account for what they drop, and by default there is no memory; for error
    feedback use `ScaledSign`. Signum is `Sign(memory=Momentum(0.9))`, which sends the sign of an average of gradients:
    recommended, since it lowers the noise that flips signs. Fewer than half of the workers, whatever they send, cannot
    turn a sign on which all others agree.

    Use it with many workers and noisy links. Not where some workers see gradients that others do not: small but
    consistent components count as much as large ones.

    References:
        J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: Compressed Optimisation for Non-Convex
        Problems", ICML 2018.
        J. Bernstein, J. Zhao, K. Azizzadenesheli, A. Anandkumar, "signSGD with Majority Vote is Communication Efficient
        And Fault Tolerant", ICLR 2019 (Signum).
    """

    spec_name: ClassVar[str] = "sign"
    votes: ClassVar[bool] = True

    memory: Memory = field(default=NoMemory(), kw_only=True)
    dense_below: int = field(default=0, kw_only=True)

    def value_bits(self) -> float:
        return 1.0

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        one = ops.zeros(block_count(WHOLE, len(values)), "float32", values) + 1.0
        return _two_values(ops, values, -one, one, WHOLE)

    def combine(self, ops: Ops, total: Array, workers: int) -> Array:
        votes = ops.where(total > 0, total * 0.0 + workers, total * 0.0)
        return ops.where(total < 0, votes - workers, votes)


@dataclass(frozen=True)
class ScaledSign(ValueCode):
    """EF-signSGD: the signs, times the mean magnitude of their block.

    decoded = mean(|v|) * sign(v), where sign(0) = 1. 1 + 64 / block bits a value, about eight passes.
    Biased, a contraction: ||v - decoded||^2 = (1 - ||v||_1^2 / (d ||v||_2^2)) ||v||_2^2 in a block of d values, which
    for a normal distribution is 36 % of ||v||^2. Always use error feedback, the default. Payloads do not add up.

    The method to begin with at one bit a value: the scale is kept, so the learning rate of SGD stays right.

    Args:
        block: values that share a scale, a power of two; None, the paper's choice, means the whole tensor. Shorter
            blocks (1024) follow scales that differ within a tensor.

    References:
        S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes", ICML 2019.
    """

    spec_name: ClassVar[str] = "scaled_sign"

    block: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self.block)

    def value_bits(self) -> float:
        return 1 + 64 / length_of(self.block)

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        block = length_of(self.block)
        means = Ratios.of(ops, values, block).mean_magnitude(ops)
        return _two_values(ops, values, -means, means, block)


@dataclass(frozen=True)
class OneBit(ValueCode):
    """1-bit SGD: each value becomes the mean of the values of its sign in its block.

    decoded = mean of {v >= 0} where v >= 0, mean of {v < 0} elsewhere. 1 + 64 / block bits a value, about twelve
    passes. Biased, a contraction, never further from v than `ScaledSign` of the same block:
    ||v - decoded||^2 = ||v||^2 - n+ mean+^2 - n- mean-^2. Always use error feedback, the default. Payloads do not add.

    Against `ScaledSign` it keeps the mean of the block, which matters where gradients lean to one side (biases, layers
    after a ReLU), for twice the numbers a block. The paper takes a column of the weight matrix for a block; here it is
    `block` consecutive values.

    Args:
        block: values that share two means, a power of two; None means the whole tensor.

    References:
        F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-Bit Stochastic Gradient Descent and its Application to
        Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
    """

    spec_name: ClassVar[str] = "onebit"

    block: int | None = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self.block)

    def value_bits(self) -> float:
        return 1 + 64 / length_of(self.block)

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        block = length_of(self.block)
        ratios = Ratios.of(ops, values, block)
        high, low = ratios.mean_where(ops, values > -TINY), ratios.mean_where(ops, values <= -TINY)
        return _two_values(ops, values, low, high, block)


def _two_values(ops: Ops, values: Array, low: Array, high: Array, block: int) -> tuple[Array, Array]:
    """The bytes, and what they decode to. A negative subnormal counts as zero: not every backend can see its sign."""
    positive = values > -TINY
    coded = encode_two_values(ops, ops.cast(positive, "uint8"), low, high, block.bit_length() - 1)
    count = len(values)
    return coded, ops.where(positive, spread(ops, high, block, count), spread(ops, low, block, count))
