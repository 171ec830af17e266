"""Corrupt bytes: the kernels refuse exactly what the reference refuses, with its words, and write nothing."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, bits_of, gradient
from fuzzing import mutate
from native import REFERENCE, VARIANTS, guarded, unharmed, variant

from hvd_gradcomp.compressors import BF16, FP16, Compressor, Context, Int8, TopK, TopKInt8
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.ops.numpy_ops import NativeNumpyOps
from hvd_gradcomp.wire.parts import Reader

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels here")

METHODS: tuple[Compressor, ...] = (
    TopKInt8(0.1),
    TopK(0.5) >> Int8(block=16),
    TopK(0.1),
    TopK(0.1) >> FP16(),
    TopK(0.1) >> BF16(),
    Int8(block=16),
)


def _outcome(ops: Ops, method: Compressor, data: bytes, out: Array) -> tuple[object, bytes]:
    """What decoding comes to: where it ended or what was wrong, and the array."""
    reader = Reader(ops, array_of(ops, np.frombuffer(data, np.uint8)))
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            out = method.decode_add(ops, reader, out)
    except PayloadError as error:
        return str(error), bits_of(out)
    return reader.position, bits_of(out)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_mutated_frames_end_as_in_the_reference(method: Compressor) -> None:
    rng = np.random.default_rng(0)
    for run in range(300):
        size = int(rng.choice([1, 9, 70, 300]))
        x = gradient(str(rng.choice(["normal", "sparse", "ties"])), (size,), run)
        frame = bytes(method.encode(REFERENCE, x, Context())[0])
        data = mutate(rng, frame)
        expected = _outcome(REFERENCE, method, data, np.ones(size, np.float32))
        for instruction_set, cls in VARIANTS:
            with variant(instruction_set, cls) as ops:
                inside, around = guarded(np.ones(size, np.float32))
                out = inside if cls is NativeNumpyOps else array_of(ops, np.ones(size, np.float32))
                assert _outcome(ops, method, data, out) == expected, (size, data)
                assert unharmed(around)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_mean_of_mutated_frames_is_right_or_declined(method: Compressor) -> None:
    rng = np.random.default_rng(1)
    for run in range(300):
        size = int(rng.choice([1, 9, 70, 300]))
        frames = [
            bytes(method.encode(REFERENCE, gradient("normal", (size,), (run, i)), Context())[0]) for i in range(3)
        ]
        place = int(rng.integers(3))
        frames[place] = mutate(rng, frames[place])
        expected: np.ndarray | None = np.zeros(size, np.float32)
        for data in frames:
            reader = Reader(REFERENCE, np.frombuffer(data, np.uint8))
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    expected = method.decode_add(REFERENCE, reader, expected)
            except PayloadError:
                expected = None
                break
        with variant(*VARIANTS[0]) as ops:
            inside, around = guarded(np.ones(size, np.float32))
            readers = [Reader(ops, np.frombuffer(data, np.uint8)) for data in frames]
            mean = method.decode_mean(ops, readers, inside, 1)
            assert unharmed(around)
            if expected is None:
                assert mean is None
                assert all(reader.position == 0 for reader in readers)
            elif mean is not None:
                assert np.array_equal(mean, expected, equal_nan=True)
