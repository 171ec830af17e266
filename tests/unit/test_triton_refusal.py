"""Corrupt bytes: the Triton kernels refuse what the reference refuses, with its words, and write nothing."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import as_numpy, gradient
from fuzzing import mutate
from native import REFERENCE
from native_fuzz import METHODS
from on_gpu import OnGpu, needs_triton, on_device

from hvd_gradcomp.compressors import Compressor, Context
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.parts import Reader

pytestmark = needs_triton

_RUNS = 60


def outcome(ops: Ops, method: Compressor, data: Array, out: Array) -> tuple[object, np.ndarray]:
    """What decoding comes to: where it ended or what was wrong, and the array."""
    reader = Reader(ops, data)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            out = method.decode_add(ops, reader, out)
    except PayloadError as error:
        return str(error), as_numpy(out)
    return reader.position, as_numpy(out)


def mutated(method: Compressor, rng: np.random.Generator, size: int) -> np.ndarray:
    """The bytes of a frame for `size` values, with some changes."""
    x = gradient(str(rng.choice(["normal", "sparse", "ties"])), (size,), int(rng.integers(2**32)))
    return np.frombuffer(mutate(rng, bytes(method.encode(REFERENCE, x, Context())[0])), np.uint8)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_mutated_frames_end_as_in_the_reference(method: Compressor) -> None:
    rng = np.random.default_rng(0)
    ops, refused = OnGpu(), 0
    for _ in range(_RUNS):
        size = int(rng.choice([1, 9, 70, 300]))
        data = mutated(method, rng, size)
        end, expected = outcome(REFERENCE, method, data, np.ones(size, np.float32))
        refused += isinstance(end, str)
        around = on_device(np.ones(size + 128, np.float32))
        found_end, found = outcome(ops, method, on_device(data), around[64 : 64 + size])
        assert found_end == end, bytes(data)
        assert np.array_equal(found, expected, equal_nan=True), bytes(data)
        assert bool((around[:64] == 1).all())
        assert bool((around[-64:] == 1).all())
    assert refused > _RUNS // 4


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_mean_of_mutated_frames_is_right_or_declined(method: Compressor) -> None:
    rng = np.random.default_rng(1)
    ops, declined = OnGpu(), 0
    for _ in range(_RUNS // 2):
        size = int(rng.choice([1, 9, 70, 300]))
        frames = [
            np.asarray(method.encode(REFERENCE, gradient("normal", (size,), rank), Context())[0]) for rank in (1, 2)
        ]
        frames.insert(int(rng.integers(3)), mutated(method, rng, size))
        expected: np.ndarray | None = np.zeros(size, np.float32)
        for data in frames:
            end, expected = outcome(REFERENCE, method, data, expected)
            if isinstance(end, str):
                expected = None
                break
        readers = [Reader(ops, on_device(data)) for data in frames]
        mean = method.decode_mean(ops, readers, on_device(np.ones(size, np.float32)), 1)
        if mean is None:
            declined += 1
            assert all(reader.position == 0 for reader in readers)
        else:
            assert expected is not None, [bytes(data) for data in frames]
            assert np.array_equal(as_numpy(mean), expected, equal_nan=True), [bytes(data) for data in frames]
    assert declined > _RUNS // 8
