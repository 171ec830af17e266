"""The value codes under test, and what all tests of them do: code, decode, draw again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from arrays import array_of, as_numpy

from hvd_gradcomp.compressors import Context, Int8, Linear, OneBit, ScaledSign, Sign, ValueCode
from hvd_gradcomp.ops import Array, Ops, backend
from hvd_gradcomp.wire.parts import Reader

CONTEXT = Context(rank=1, workers=2, name="layer.weight", step=3)

#: Every value code, with every setting that leads to other bytes.
CODES: tuple[ValueCode, ...] = (
    Int8(block=64),
    Int8(block=None),
    *(Linear(bits=bits, block=32) for bits in range(2, 9)),
    Linear(bits=2, block=1),
    Linear(bits=4, block=None),
    Linear(bits=8, block=64, rounding="stochastic"),
    Linear(bits=3, block=64, rounding="stochastic", seed=5),
    Sign(),
    ScaledSign(),
    ScaledSign(block=32),
    OneBit(block=64),
    OneBit(block=None),
)


def coded(code: ValueCode, ops: Ops, values: np.ndarray, context: Context = CONTEXT) -> tuple[Array, np.ndarray]:
    """The bytes of float32 `values` in `code`, and the values that the encoder says they decode to."""
    data, decoded = code.encode_values(ops, array_of(ops, values), context)
    return data, as_numpy(decoded)


def decoded(code: ValueCode, ops: Ops, data: Array, count: int) -> np.ndarray:
    """The values behind `data`, which must be used up by them."""
    reader = Reader(ops, data)
    values = code.decode_values(reader, count)
    reader.end()
    return as_numpy(values)


def through(code: ValueCode, values: np.ndarray, context: Context = CONTEXT) -> np.ndarray:
    """What `values` are after coding and decoding."""
    ops = backend("numpy")
    return decoded(code, ops, coded(code, ops, values, context)[0], len(values))


def repeated(code: ValueCode, values: np.ndarray, times: int) -> Iterator[np.ndarray]:
    """`through` with the draws of `times` different steps."""
    return (through(code, values, Context(name="layer.weight", step=step)) for step in range(times))


def assert_unbiased(code: ValueCode, values: np.ndarray, times: int = 4000) -> np.ndarray:
    """Assert that the mean over many draws is `values`; the variance of each decoded value, float64 (count,).

    The mean of `times` draws lies within 6 of its own standard deviations (and a millionth for rounding): with a
    thousand values at hand, an unbiased code would fail this once in about a million choices of the seed.
    """
    total, squares = np.zeros(len(values)), np.zeros(len(values))
    for found in repeated(code, values, times):
        error = found.astype(np.float64) - values
        total += error
        squares += error**2
    mean = total / times
    variance = squares / times - mean**2
    assert (np.abs(mean) <= 6 * np.sqrt(variance / times) + 1e-6 * np.abs(values).max()).all()
    return variance
