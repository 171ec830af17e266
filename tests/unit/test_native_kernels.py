"""Native kernels give the bytes of the numpy reference, for every instruction set, input kind and size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from arrays import KINDS, array_of, as_numpy, bits_of, gradient
from native import REFERENCE, SIZES, VARIANTS, guarded, unharmed, variant

from hvd_gradcomp.compressors import BF16, FP16, Compressor, Context, Int8, TopK, TopKInt8
from hvd_gradcomp.ops import Ops
from hvd_gradcomp.ops.numpy_ops import NativeNumpyOps
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.positions import decode_positions, encode_positions

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels here")

METHODS: tuple[Compressor, ...] = (
    TopKInt8(0.01),
    TopKInt8(0.2),
    TopKInt8(1.0),
    TopK(0.05) >> Int8(block=4096),
    TopK(0.05) >> Int8(block=None),
    TopK(0.02),
    TopK(0.02) >> FP16(),
    TopK(0.02) >> BF16(),
    Int8(),
    Int8(block=8192),
)


@pytest.fixture(params=VARIANTS, ids=lambda each: f"{each[0]}-{each[1].name}")
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """Every instruction set with every backend."""
    with variant(*request.param) as primitives:
        yield primitives


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_frames_residuals_and_results_are_those_of_the_reference(ops: Ops, kind: str) -> None:
    for size in SIZES:
        x = gradient(kind, (size,), size)
        for method in METHODS:
            frame, residual = method.encode(REFERENCE, x.copy(), Context())
            native_frame, native_residual = method.encode(ops, array_of(ops, x), Context())
            assert bits_of(native_frame) == bits_of(frame), (size, method)
            assert bits_of(native_residual) == bits_of(residual), (size, method)
            start = np.linspace(-1, 1, size, dtype=np.float32)
            out = method.decode_add(REFERENCE, Reader(REFERENCE, frame), start.copy())
            reader = Reader(ops, array_of(ops, frame))
            native_out = method.decode_add(ops, reader, array_of(ops, start))
            assert bits_of(native_out) == bits_of(out), (size, method)
            reader.end()


def test_one_call_does_a_whole_frame(ops: Ops) -> None:
    # The comparison above would hold as well if every kernel declined.
    x = array_of(ops, gradient("normal", (5000,), 0))
    positions = ops.top_positions(x, 50)
    frame = ops.encode_sparse8(x, positions, 512)
    assert frame is not None
    assert ops.decode_add(frame, 0, ops.zeros(5000, "float32", x)) == len(frame)
    assert ops.decode_mean([(frame, 0)], ops.zeros(5000, "float32", x), 1) == [len(frame)]
    assert ops.encode_linear8(x, 512) is not None
    assert ops.encode_positions(positions, 5000) is not None


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_mean_of_frames_is_that_of_adding_them_in_order(ops: Ops, workers: int) -> None:
    for size in SIZES:
        for method in METHODS:
            frames = [
                method.encode(REFERENCE, gradient("wild", (size,), (size, rank)), Context())[0]
                for rank in range(workers)
            ]
            total = np.zeros(size, np.float32)
            for frame in frames:
                total = method.decode_add(REFERENCE, Reader(REFERENCE, frame), total)
            # Frames need not begin where the memory does.
            readers = [Reader(ops, array_of(ops, np.concatenate([np.zeros(12, np.uint8), frame]))) for frame in frames]
            for reader in readers:
                reader.position = 12
            out = array_of(ops, np.full(size, np.nan, np.float32))
            mean = method.decode_mean(ops, readers, out, workers)
            assert mean is not None
            assert bits_of(mean) == bits_of(REFERENCE.divide(total, workers)), (size, method)
            for reader in readers:
                reader.end()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_candidates_change_nothing(ops: Ops, kind: str) -> None:
    for size in SIZES:
        x, residual = gradient(kind, (size,), 1), gradient("normal", (size,), 2)
        for k in {1, -(-size // 100), -(-size // 3), size}:
            corrected = ops.correct(array_of(ops, x), array_of(ops, residual), k)
            expected = REFERENCE.correct(x.copy(), residual, k)
            assert corrected.finite
            assert bits_of(corrected.x) == bits_of(expected.x)
            positions = REFERENCE.top_positions(expected.x, k)
            assert np.array_equal(as_numpy(ops.top_positions(corrected.x, k, corrected.candidates)), positions)
            assert np.array_equal(as_numpy(ops.top_positions(corrected.x, k)), positions)


def test_candidates_for_another_k_are_not_used(ops: Ops) -> None:
    x = gradient("normal", (100_000,), 0)
    corrected = ops.correct(array_of(ops, x), None, 1000)
    assert corrected.candidates is not None
    for k in (10, 20_000):
        positions = as_numpy(ops.top_positions(corrected.x, k, corrected.candidates))
        assert np.array_equal(positions, REFERENCE.top_positions(x, k))


def test_selection_where_a_sample_misleads(ops: Ops) -> None:
    # All large values lie together, or wherever a strided sample looks, or nearly all values are equal.
    size = 200_000
    together = np.full(size, 0.001, np.float32)
    together[1000:4000] = np.arange(3000, dtype=np.float32)
    strided = np.full(size, 0.001, np.float32)
    strided[::64] = 7.0
    equal = np.ones(size, np.float32)
    equal[5] = -3.0
    for x in (together, strided, equal):
        for k in (1, 100, 2000, 3500):
            assert np.array_equal(as_numpy(ops.top_positions(array_of(ops, x), k)), REFERENCE.top_positions(x, k))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_seen_wherever_they_are(ops: Ops, bad: float) -> None:
    for size in SIZES:
        for place in {0, size // 2, size - 1}:
            x = gradient("normal", (size,), 0)
            assert ops.all_finite(array_of(ops, x))
            x[place] = bad
            assert not ops.all_finite(array_of(ops, x))
            corrected = ops.correct(array_of(ops, x), array_of(ops, np.zeros(size, np.float32)), max(size // 100, 1))
            assert not corrected.finite
            assert corrected.candidates is None


def test_a_sum_that_overflows_is_not_finite(ops: Ops) -> None:
    x = np.full(100_000, 3e38, np.float32)
    assert not ops.correct(array_of(ops, x), array_of(ops, x), 1000).finite


def test_kth_largest_of_any_floats(ops: Ops) -> None:
    for kind in KINDS:
        x = gradient(kind, (3000,), 0)
        for k in (1, 2, 1499, 3000):
            assert ops.kth_largest(array_of(ops, x), k) == REFERENCE.kth_largest(x, k)


def test_positions_of_every_density(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 5, 64, 3000, 2**31 - 1):
        for count in {0, 1, min(size, 7), min(size, 40), min(size, 1500), min(size, 2999)}:
            some = rng.choice(size, count, replace=False) if size < 2**20 else np.unique(rng.integers(0, size, count))
            positions = np.sort(some).astype(np.int64)
            coded = encode_positions(REFERENCE, positions, size, positions)
            native = encode_positions(ops, array_of(ops, positions), size, array_of(ops, positions))
            assert bits_of(native) == bits_of(coded)
            reader = Reader(ops, native)
            decoded = decode_positions(reader, size, len(positions))
            assert np.array_equal(np.arange(size) if decoded is None else as_numpy(decoded), positions)
            reader.end()


def test_positions_out_of_order_or_range_are_declined(ops: Ops) -> None:
    for wrong in ([3, 3], [4, 2], [-1, 2], [0, 10], [2**62, 3]):
        positions = array_of(ops, np.array(wrong, np.int64))
        x = array_of(ops, np.ones(10, np.float32))
        assert ops.encode_positions(positions, 10) is None
        assert ops.encode_sparse8(x, positions, 512) is None
        assert bits_of(x) == bits_of(np.ones(10, np.float32))


def test_bits_and_small_integers(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    for count in (0, 1, 7, 8, 9, 31, 33, 1000):
        bits = rng.integers(0, 2, count).astype(np.uint8)
        packed = REFERENCE.pack_bits(bits)
        assert bits_of(ops.pack_bits(array_of(ops, bits))) == bits_of(packed)
        assert bits_of(ops.unpack_bits(array_of(ops, packed), count)) == bits_of(bits)
        for width in range(33):
            values = rng.integers(0, 2**width, count)
            packed = REFERENCE.pack_uint(values, width)
            assert bits_of(ops.pack_uint(array_of(ops, values), width)) == bits_of(packed)
            assert bits_of(ops.unpack_uint(array_of(ops, packed), width, count)) == bits_of(values)
        words = rng.integers(0, 256, 4 * count).astype(np.uint8)
        assert ops.checksum(array_of(ops, words)) == REFERENCE.checksum(words)


def test_nothing_beside_the_arrays_is_written() -> None:
    for instruction_set, cls in VARIANTS:
        if cls is not NativeNumpyOps:
            continue
        with variant(instruction_set, cls) as ops:
            for size in SIZES:
                x, around = guarded(gradient("normal", (size,), 0))
                frame, _ = TopKInt8(0.03).encode(ops, x, Context())
                Int8().encode(ops, x, Context())
                ops.correct(x, gradient("normal", (size,), 1), max(size // 50, 1))
                TopKInt8(0.03).decode_add(ops, Reader(ops, frame), x)
                TopKInt8(0.03).decode_mean(ops, [Reader(ops, frame)] * 2, x, 3)
                assert unharmed(around)


def test_memory_of_another_kind_goes_step_by_step() -> None:
    ops = NativeNumpyOps()
    x = gradient("normal", (2 * 5000,), 0)
    every_second = x[::2]
    assert ops.encode_sparse8(every_second, None, 512) is None
    assert ops.encode_sparse8(x.astype(np.float64), None, 512) is None
    x.flags.writeable = False
    assert ops.encode_sparse8(x, None, 512) is None
    assert np.array_equal(ops.top_positions(every_second, 50), REFERENCE.top_positions(every_second.copy(), 50))
    assert np.array_equal(ops.top_positions(x, 50), REFERENCE.top_positions(x, 50))


def test_subnormal_numbers_count_on_threads_that_flush_them() -> None:
    x = gradient("subnormals", (2000,), 0)
    expected = REFERENCE.correct(x.copy(), x, 0)
    frame, residual = Int8().encode(REFERENCE, x.copy(), Context())
    assert torch.set_flush_denormal(True), "no way to test this here"
    try:
        ops = NativeNumpyOps()
        found = ops.correct(x.copy(), x, 0)
        native_frame, native_residual = Int8().encode(ops, x.copy(), Context())
    finally:
        torch.set_flush_denormal(False)
    assert bits_of(found.x) == bits_of(expected.x)
    assert bits_of(native_frame) == bits_of(frame)
    assert bits_of(native_residual) == bits_of(residual)
