"""Inputs and comparisons shared by the tests: arrays of every backend, gradients of every unpleasant kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from hvd_gradcomp.compressors import BF16, FP16, Compressor, Int8, TopK, TopKInt8
from hvd_gradcomp.ops import Array, Ops

#: Every lossy compressor, with settings at which small tensors show something.
COMPRESSORS: tuple[Compressor, ...] = (
    TopK(ratio=0.1),
    TopKInt8(ratio=0.1),
    Int8(block=64),
    FP16(),
    BF16(),
    TopK(ratio=0.1) >> FP16(),
    TopK(ratio=0.1) >> BF16(),
)

BACKENDS = ("numpy", "torch")


def array_of(ops: Ops, x: Any) -> Array:
    """A copy of numpy `x` as an array of the backend `ops`."""
    copied = np.array(x)
    return torch.from_numpy(copied) if ops.name == "torch" else copied


def as_numpy(x: Array) -> np.ndarray:
    """A copy of any backend's array in numpy."""
    return x.detach().cpu().numpy().copy() if isinstance(x, torch.Tensor) else np.array(x)


def bits_of(x: Array) -> bytes:
    """The exact bytes of an array, by which results are compared: NaN equals NaN, and -0.0 is not 0.0."""
    return as_numpy(x).tobytes()


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def _zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape)


def _ties(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-0.5, 0.5, -0.0, 2.0], shape)


def _subnormals(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-300, 300, shape) * 2.0**-149


def _huge(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape) * 1e30


def _wild(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape) * 10.0 ** rng.integers(-44, 31, shape)


def _sparse(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape) * (rng.random(shape) < 0.05)


#: Kinds of gradients by name; each is a function of a generator and a shape.
KINDS = {
    "normal": _normal,
    "all zeros": _zeros,
    "ties": _ties,
    "subnormals": _subnormals,
    "1e30": _huge,
    "wild": _wild,
    "sparse": _sparse,
}


def gradient(kind: str, shape: tuple[int, ...], seed: int | tuple[int, ...]) -> np.ndarray:
    """A float32 gradient of a kind of `KINDS`, the same for the same seed."""
    return np.asarray(KINDS[kind](np.random.default_rng(seed), shape)).astype(np.float32)


#: Shapes of 0, 1 and 2 dimensions, down to one element.
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
kinds = st.sampled_from(sorted(KINDS))
seeds = st.integers(0, 2**32 - 1)
