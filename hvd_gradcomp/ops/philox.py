"""A counter-based random generator, written once over the primitives, so that every backend draws the same numbers.

Philox4x32-10 turns a 64-bit key and a 128-bit counter into four 32-bit words by ten rounds of multiplication. There is
no state: a draw depends on the key and its place alone, so workers that share a key draw alike without talking, and a
restored run needs nothing saved.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_gradcomp.ops.base import Array, Ops

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
# Counters taken at once: their words stay in a core's cache over the ten rounds.
_CHUNK = 1 << 14


def philox4x32(ops: Ops, counter: tuple[Array, Array, Array, Array], key: int) -> tuple[Array, Array, Array, Array]:
    """Four random words for each counter.

    Args:
        counter: four int64 arrays, shape (m,), of 32-bit words, the lowest first.
        key: 64 bits.

    Returns:
        Four int64 arrays, shape (m,), with values in [0, 2**32).
    """
    x0, x1, x2, x3 = counter
    key0, key1 = key & _MASK, key >> 32 & _MASK
    for _ in range(_ROUNDS):
        # The product of two 32-bit words fills all 64 bits of an int64. The shift brings in copies of the sign bit,
        # which the mask takes away.
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        high0 = ops.bit_and(ops.shift_right(product0, 32), _MASK)
        high1 = ops.bit_and(ops.shift_right(product1, 32), _MASK)
        x0 = ops.bit_xor(ops.bit_xor(high1, x1), key0)
        x2 = ops.bit_xor(ops.bit_xor(high0, x3), key1)
        x1, x3 = ops.bit_and(product1, _MASK), ops.bit_and(product0, _MASK)
        key0, key1 = key0 + _KEY_STEPS[0] & _MASK, key1 + _KEY_STEPS[1] & _MASK
    return x0, x1, x2, x3


def uniform(ops: Ops, count: int, key: int, like: Array) -> Array:
    """`count` draws, uniform over the multiples of 2**-24 in [0, 1).

    Draw number k is word k % 4 of counter k // 4, its upper 24 bits divided by 2**24; so fewer draws are a prefix of
    more. About 30 passes over the draws, in cache.

    Args:
        key: 64 bits; see `Context.key`.
        like: an array on the device where the draws are wanted.

    Returns:
        float32, shape (count,).
    """
    parts = [ops.zeros(0, "float32", like)]
    for start in range(0, -(-count // 4), _CHUNK):
        size = min(_CHUNK, -(-count // 4) - start)
        block = ops.arange(size, like) + start
        zeros = ops.zeros(size, "int64", like)
        # A tensor has less than 2**33 counters, and the second word takes their upper bits.
        counter = (ops.bit_and(block, _MASK), ops.shift_right(block, 32), zeros, zeros)
        words = ops.interleave(philox4x32(ops, counter, key))
        parts.append(ops.cast(ops.shift_right(words, 8), "float32") * 2.0**-24)
    return ops.concat(parts)[:count]
