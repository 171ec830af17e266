"""Hash functions and permutations of integers, the same on every backend: positions that workers draw alike.

Permutations are made of polynomials modulo the prime 2**31 - 1, in int64: a random polynomial of degree 3 is a 4-wise
independent function, and four rounds of such functions in a Feistel network make a permutation that nobody could tell
from a random one by looking at a few of its values. Random access (any place without the ones before it) is what Philox
gives as well, but only a permutation gives places that are all different, at a cost that does not grow with the tensor.
Where pairs of values have to be independent and no more, a multiplication and a shift are enough (`pairwise`).

Sources: M. N. Wegman, J. L. Carter, "New hash functions and their use in authentication and set equality", JCSS 1981;
M. Naor, O. Reingold, "On the construction of pseudorandom permutations: Luby-Rackoff revisited", J. Cryptology 1999;
M. Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without primes",
STACS 1996.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from hvd_gradcomp.ops.base import Array, Ops

_PRIME_BITS = 31
PRIME = 2**_PRIME_BITS - 1
_ROUNDS = 4
_CHUNK = 1 << 16


def coefficients(key: int, count: int) -> tuple[int, ...]:
    """`count` numbers in [1, PRIME) that follow from a 64-bit `key`."""
    return tuple(word % 2**64 % (PRIME - 1) + 1 for word in words(key, count))


def words(key: int, count: int) -> tuple[int, ...]:
    """`count` signed 64-bit numbers that follow from a 64-bit `key`."""
    digest = hashlib.shake_128(key.to_bytes(8, "little")).digest(8 * count)
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(count))


def pairwise(ops: Ops, x: Array, factor: int, term: int) -> Array:
    """The upper 32 bits of factor * x + term modulo 2**64, for int64 x in [0, 2**32): pairwise independent.

    Args:
        factor: a random signed 64-bit number.
        term: another one.

    Returns:
        int64, shape (n,), in [0, 2**32).
    """
    return ops.bit_and(ops.shift_right(x * factor + term, 32), 0xFFFFFFFF)


def polynomial(ops: Ops, x: Array, factors: Sequence[int]) -> Array:
    """factors[0] + factors[1] x + factors[2] x^2 + ... modulo PRIME, for int64 x in [0, PRIME).

    Returns:
        int64, shape (n,), in [0, PRIME].
    """
    value = x * factors[-1] + factors[-2]
    for factor in reversed(factors[:-2]):
        value = _reduced(ops, value) * x + factor
    return _reduced(ops, value)


def draw_positions(ops: Ops, count: int, size: int, key: int, like: Array) -> Array:
    """`count` distinct positions in [0, size), each as likely as any other, in random order.

    The permutation runs over the next power of two above `size`, and places beyond `size` are left out; so the cost is
    about 50 to 100 passes over `count` (not `size`) numbers.

    Args:
        count: 0 <= count <= size.
        size: at most 2**31 - 1.
        key: 64 bits; the same key gives the same positions everywhere.
        like: an array on the device where the positions are wanted.

    Returns:
        int64, shape (count,).
    """
    if count == size:
        return ops.arange(size, like)
    factors = coefficients(key, 4 * _ROUNDS)
    # Small tensors get a larger domain: halves of one or two bits would leave few permutations to choose from.
    bits = max(6, (size - 1).bit_length())
    share = size / 2**bits
    found: list[Array] = [ops.arange(0, like)]
    missing, start = count, 0
    while missing:
        # Enough that one turn almost always does, never more than there are, and no more than stay in a core's cache:
        # so a frame that asks for many positions costs little memory besides these.
        wanted = missing + 4 * math.sqrt(missing * (1 - share)) + 4 * (1 - share)
        tried = min(math.ceil(wanted / share), 2**bits - start, _CHUNK)
        places = _permuted(ops, ops.arange(tried, like) + start, bits, factors)
        inside = places if share == 1 else ops.take(places, ops.nonzero(places < size))
        found.append(inside[:missing])
        missing -= len(found[-1])
        start += tried
    return ops.concat(found)


def _permuted(ops: Ops, x: Array, bits: int, factors: Sequence[int]) -> Array:
    """A permutation of [0, 2**bits): each half in turn is moved by a function of the other one."""
    low_bits = bits // 2
    high, low = ops.shift_right(x, low_bits), ops.bit_and(x, (1 << low_bits) - 1)
    for turn in range(_ROUNDS):
        chosen = factors[4 * turn : 4 * turn + 4]
        if turn % 2:
            high = ops.bit_and(high + polynomial(ops, low, chosen), (1 << (bits - low_bits)) - 1)
        else:
            low = ops.bit_and(low + polynomial(ops, high, chosen), (1 << low_bits) - 1)
    return high * (1 << low_bits) + low


def _reduced(ops: Ops, x: Array) -> Array:
    """Values of 0 <= x < 2**63 modulo PRIME, as numbers in [0, PRIME]."""
    # 2**31 = 1 modulo PRIME, so the upper bits are simply added; three times, until nothing is left above.
    for _ in range(3):
        x = ops.bit_and(x, PRIME) + ops.shift_right(x, _PRIME_BITS)
    return x
