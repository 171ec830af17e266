"""Kernels on several threads give the bytes of one; the environment says how many may be used; a fork is no trouble."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from arrays import KINDS, bits_of, gradient
from native import REFERENCE

from hvd_gradcomp.compressors import Compressor, Context, Int8, TopK, TopKInt8
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import native
from hvd_gradcomp.ops.native.library import THREADS, threads_allowed
from hvd_gradcomp.ops.numpy_ops import NativeNumpyOps
from hvd_gradcomp.wire.parts import Reader

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")

#: Enough for three threads, each 2**18 elements, and a rest that fits no group; and just too few for two.
SIZES = (3 * 2**18 + 4097 * 5 + 3, 2**19 - 1)
WORKERS = 3
METHODS: tuple[Compressor, ...] = (
    TopKInt8(0.2),
    TopKInt8(0.003),
    TopK(0.1) >> Int8(block=None),
    TopK(0.1),
    Int8(),
    Int8(block=8192),
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let the kernels use `count` threads."""
    kernels = native.load()
    usual = kernels.threads()
    kernels.use_threads(count)
    try:
        yield
    finally:
        kernels.use_threads(usual)


def everything(method: Compressor, size: int) -> list[bytes]:
    """What each call comes to on gradients of `size`."""
    ops = NativeNumpyOps()
    found, frames = [], []
    for rank in range(WORKERS):
        residual = gradient("normal", (size,), (rank, 1))
        corrected = ops.correct(gradient("normal", (size,), (rank, 0)), residual, method.wanted(size))
        found.append(bits_of(corrected.x))
        frame, left = method.encode(ops, corrected.x, Context(candidates=corrected.candidates))
        found += [bits_of(frame), bits_of(left)]
        frames.append(frame)
    found.append(bits_of(method.decode_add(ops, Reader(ops, frames[0]), gradient("normal", (size,), 9))))
    mean = method.decode_mean(ops, [Reader(ops, frame) for frame in frames], np.full(size, np.nan, np.float32), WORKERS)
    assert mean is not None
    return [*found, bits_of(mean)]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_number_of_threads_changes_no_byte(method: Compressor) -> None:
    for size in SIZES:
        with threads(1):
            alone = everything(method, size)
        for count in (2, 3):
            with threads(count):
                assert everything(method, size) == alone, (size, count)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_selection_by_threads_is_that_of_the_reference(kind: str) -> None:
    size = SIZES[0]
    x = gradient(kind, (size,), 0)
    k = size // 100
    with threads(3):
        ops = NativeNumpyOps()
        corrected = ops.correct(x.copy(), None, k)
        positions = ops.top_positions(corrected.x, k, corrected.candidates)
    assert np.array_equal(positions, REFERENCE.top_positions(x, k))


def test_large_values_in_one_threads_part_are_all_found() -> None:
    size, k = SIZES[0], 5000
    x = gradient("normal", (size,), 0) * np.float32(1e-3)
    x[-k:] += 1
    with threads(3):
        corrected = NativeNumpyOps().correct(x, None, k)
        assert corrected.candidates is not None
        assert np.array_equal(NativeNumpyOps().top_positions(x, k, corrected.candidates), np.arange(size - k, size))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_every_thread_looks_for_values_that_are_not_finite(part: int) -> None:
    x = gradient("normal", (SIZES[0],), 0)
    x[part * (len(x) // 3) + 1000] = np.nan
    with threads(3):
        for wanted in (0, len(x) // 100):
            assert not NativeNumpyOps().correct(x.copy(), None, wanted).finite


def test_a_frame_that_is_wrong_at_its_end_is_declined_by_all_threads() -> None:
    size = SIZES[0]
    method = TopKInt8(0.1)
    frame, _ = method.encode(REFERENCE, gradient("normal", (size,), 0), Context())
    longer = gradient("normal", (size + 5000,), 0)
    longer[-1] = 1e6
    wrong, _ = method.encode(REFERENCE, longer, Context())
    wrong[4:8] = frame[4:8]  # the size of the other tensor, in which the last positions do not lie
    with threads(3):
        ops = NativeNumpyOps()
        assert ops.decode_mean([(frame, 0), (wrong, 0)], np.zeros(size, np.float32), 2) is None
        out = np.ones(size, np.float32)
        assert ops.decode_add(wrong, 0, out) is None
        assert (out == 1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_uses_threads_of_its_own() -> None:
    x = gradient("normal", (SIZES[0],), 0)
    with threads(2):
        ops = NativeNumpyOps()
        expected = bits_of(ops.correct(x.copy(), x, 100).x)
        child = os.fork()
        if child == 0:
            # A child that hangs is ended by this alarm, which shows as its status.
            signal.alarm(20)
            os._exit(0 if bits_of(ops.correct(x.copy(), x, 100).x) == expected else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("environment", "processors", "expected"),
    [
        ({}, 8, 1),
        ({"OMP_NUM_THREADS": "4"}, 8, 4),
        ({"OMP_NUM_THREADS": "4"}, 2, 2),
        ({"OMP_NUM_THREADS": "4,2"}, 8, 4),
        ({"OMP_NUM_THREADS": "many"}, 8, 1),
        ({"OMP_NUM_THREADS": "4", THREADS: "2"}, 8, 2),
        ({"OMP_NUM_THREADS": "1", THREADS: "3"}, 8, 3),
        ({THREADS: "16"}, 8, 8),
    ],
)
def test_how_many_threads_are_allowed(environment: dict[str, str], processors: int, expected: int) -> None:
    assert threads_allowed(environment, processors) == expected


@pytest.mark.parametrize("wrong", ["0", "-1", "two", ""])
def test_a_number_of_threads_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{THREADS}='{wrong}'"):
        threads_allowed({THREADS: wrong}, 8)
    with pytest.raises(ValueError, match="at least 1"):
        native.load().use_threads(0)
