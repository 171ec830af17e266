"""The value codes under test, and what all tests of them do: code, decode, draw again."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from arrays import array_of, as_numpy

from hvd_gradcomp.compressors import (
    BF16,
    FP16,
    QSGD,
    Context,
    Dynamic8,
    Int8,
    Linear,
    Natural,
    NoCompression,
    OneBit,
    ScaledSign,
    Sign,
    TernGrad,
    ValueCode,
)
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
    QSGD(),
    QSGD(levels=1, bucket=64),
    QSGD(levels=127, bucket=None, seed=-1),
    QSGD(levels=15, norm="max", bucket=32),
    TernGrad(),
    TernGrad(clip=None, block=64),
    Natural(),
    Dynamic8(block=64),
    Dynamic8(block=None),
    Sign(),
    ScaledSign(),
    ScaledSign(block=32),
    OneBit(block=64),
    OneBit(block=None),
)

#: One code for each format of `wire.codes`.
FORMATS: tuple[ValueCode, ...] = (
    NoCompression(),
    FP16(),
    BF16(),
    Int8(block=64),
    Linear(bits=4, block=32),
    QSGD(),
    TernGrad(),
    ScaledSign(block=32),
    Natural(),
    Dynamic8(block=64),
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


def assert_unbiased(code: ValueCode, values: np.ndarray, step: np.ndarray | float, times: int = 3000) -> np.ndarray:
    """Assert that draws of each value have its mean, and no more than the variance of rounding between two levels.

    Args:
        step: how far the two levels lie apart between which each of `values` is rounded; both are multiples of it.

    Returns:
        The variance f (1 - f) step**2 of each value, f = value / step - floor(value / step); float64 (count,).

    Both comparisons allow for chance by Bernstein's inequality at a confidence of 1 - 1e-9 a value, so a right code
    would fail for one choice of the seed in a million at most, with a thousand values. And a millionth for rounding.
    """
    exact = values.astype(np.float64)
    step = np.broadcast_to(np.asarray(step, np.float64), exact.shape)
    fraction = exact / step - np.floor(exact / step)
    variance = fraction * (1 - fraction) * step**2
    errors = [found.astype(np.float64) - exact for found in repeated(code, values, times)]
    slack = 1e-6 * np.maximum(np.abs(exact), step)
    assert (np.abs(np.mean(errors, axis=0)) <= bernstein(times, variance, step) + slack).all()
    # The squares of errors of mean zero and size at most `step` have a variance of at most step**2 times their mean.
    squares = np.mean(np.square(errors), axis=0)
    assert (squares <= variance + bernstein(times, variance * step**2, step**2) + slack * step).all()
    return variance


def bernstein(times: int, variance: np.ndarray, size: np.ndarray, chance: float = 1e-9) -> np.ndarray:
    """What the mean of `times` draws of a variance, none further than `size` from their mean, exceeds by `chance`."""
    rate = math.log(2 / chance) / times
    return rate * size / 3 + np.sqrt((rate * size / 3) ** 2 + 2 * rate * variance)
