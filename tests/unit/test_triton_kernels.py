"""Triton kernels give the bytes of the numpy reference: in Triton's interpreter, or on a GPU where there is one.

The cases are those of the native kernels, at sizes for the interpreter, which takes a millisecond for 1000 values.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from arrays import KINDS, as_numpy, bits_of, gradient
from native import REFERENCE
from on_gpu import OnGpu, needs_triton, on_device

from hvd_gradcomp.compressors import BF16, FP16, QSGD, Compressor, Context, Int8, Linear, ScaledSign, TopK, TopKInt8
from hvd_gradcomp.ops import Ops
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.positions import decode_positions, encode_positions

pytestmark = needs_triton

#: Around the kernels' blocks (256, 512, 1024 and 4096), and several of them.
SIZES = (1, 2, 17, 513, 1025, 4097, 9000)

METHODS: tuple[Compressor, ...] = (
    TopKInt8(0.01),
    TopKInt8(0.3),
    TopKInt8(1.0),
    TopK(0.1) >> Int8(block=8),
    TopK(0.5) >> Int8(block=2048),
    TopK(0.05) >> Int8(block=None),
    TopK(0.02),
    TopK(0.02) >> FP16(),
    TopK(0.02) >> BF16(),
    Int8(),
    Int8(block=1),
    Int8(block=4096),
)


@pytest.fixture(scope="module")
def ops() -> Ops:
    """The kernels for all tensors."""
    return OnGpu()


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("size", SIZES)
def test_frames_residuals_and_results_are_those_of_the_reference(ops: Ops, kind: str, size: int) -> None:
    x = gradient(kind, (size,), size)
    for method in METHODS:
        frame, residual = method.encode(REFERENCE, x.copy(), Context())
        gpu_frame, gpu_residual = method.encode(ops, on_device(x), Context())
        assert bits_of(gpu_frame) == bits_of(frame), method
        assert bits_of(gpu_residual) == bits_of(residual), method
        start = np.linspace(-1, 1, size, dtype=np.float32)
        out = method.decode_add(REFERENCE, Reader(REFERENCE, frame), start.copy())
        reader = Reader(ops, on_device(frame))
        assert bits_of(method.decode_add(ops, reader, on_device(start))) == bits_of(out), method
        reader.end()


@pytest.mark.parametrize("code", [Linear(bits=2), Linear(bits=4), QSGD(), ScaledSign(block=64)], ids=str)
def test_codes_of_few_bits_give_the_bytes_of_the_reference(ops: Ops, code: Compressor) -> None:
    x = gradient("normal", (3000,), 5)
    frame, _ = code.encode(REFERENCE, x.copy(), Context())
    gpu_frame, _ = code.encode(ops, on_device(x), Context())
    assert bits_of(gpu_frame) == bits_of(frame)
    zeros = np.zeros(3000, np.float32)
    out = code.decode_add(REFERENCE, Reader(REFERENCE, frame), zeros.copy())
    assert bits_of(code.decode_add(ops, Reader(ops, gpu_frame), on_device(zeros))) == bits_of(out)


def test_one_call_does_a_whole_frame(ops: Ops) -> None:
    # The comparisons above would hold as well if every kernel declined.
    x = on_device(gradient("normal", (5000,), 0))
    positions = ops.top_positions(x, 50)
    frame = ops.encode_sparse8(ops.copy(x), positions, 512)
    assert frame is not None
    assert ops.decode_add(frame, 0, ops.zeros(5000, "float32", x)) == len(frame)
    assert ops.decode_mean([(frame, 0)], ops.zeros(5000, "float32", x), 1) == [len(frame)]
    assert ops.encode_linear8(x, 512) is not None
    coded = ops.encode_positions(positions, 5000)
    assert coded is not None
    found = ops.decode_positions(coded, 0, 5000, 50)
    assert found is not None
    assert torch.equal(found[0], positions)
    assert found[1] == len(coded)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_mean_of_frames_is_that_of_adding_them_in_order(ops: Ops, workers: int) -> None:
    for size in (1, 700, 5000):
        for method in METHODS:
            frames = [
                method.encode(REFERENCE, gradient("wild", (size,), (size, rank)), Context())[0]
                for rank in range(workers)
            ]
            total = np.zeros(size, np.float32)
            for frame in frames:
                total = method.decode_add(REFERENCE, Reader(REFERENCE, frame), total)
            # Frames need not begin where the memory does, nor at a multiple of 4.
            readers = [Reader(ops, on_device(np.concatenate([np.zeros(13, np.uint8), frame]))) for frame in frames]
            for reader in readers:
                reader.position = 13
            mean = method.decode_mean(ops, readers, on_device(np.full(size, np.nan, np.float32)), workers)
            assert mean is not None
            assert bits_of(mean) == bits_of(REFERENCE.divide(total, workers)), (size, method)
            for reader in readers:
                reader.end()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_candidates_change_nothing(ops: Ops, kind: str) -> None:
    for size in (1, 600, 9000):
        x, residual = gradient(kind, (size,), 1), gradient("normal", (size,), 2)
        expected = REFERENCE.correct(x.copy(), residual, 1)
        corrected = ops.correct(on_device(x), on_device(residual), 1)
        assert corrected.finite
        assert bits_of(corrected.x) == bits_of(expected.x)
        for k in {1, -(-size // 100), -(-size // 3), size}:
            positions = REFERENCE.top_positions(expected.x, k)
            assert np.array_equal(as_numpy(ops.top_positions(corrected.x, k, corrected.candidates)), positions)
            assert np.array_equal(as_numpy(ops.top_positions(corrected.x, k)), positions)


def test_ties_across_blocks_go_to_the_lower_positions(ops: Ops) -> None:
    for x in (np.ones(20_000, np.float32), np.tile(np.float32([2, 1, -1, 0]), 5000)):
        x[15_000] = -3
        for k in (1, 2, 4000, 5001, 12_000, 20_000):
            assert np.array_equal(as_numpy(ops.top_positions(on_device(x), k)), REFERENCE.top_positions(x, k))


def test_one_tensor_is_selected_from_without_waiting_for_the_device(ops: Ops) -> None:
    x = on_device(gradient("normal", (9000,), 3))
    corrected = ops.correct(x, None, 90)
    assert corrected.finite
    # Everything that brings values to the host goes through one of these.
    forbidden = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")
    with pytest.MonkeyPatch.context() as patch:
        for name in forbidden:
            patch.setattr(torch.Tensor, name, _no_waiting)
        positions = ops.top_positions(corrected.x, 90, corrected.candidates)
    assert len(positions) == 90


def _no_waiting(*_: object) -> None:
    raise AssertionError("this waits for the device")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_seen_wherever_they_are(ops: Ops, bad: float) -> None:
    for size in SIZES:
        for place in {0, size // 2, size - 1}:
            x = gradient("normal", (size,), 0)
            assert ops.all_finite(on_device(x))
            x[place] = bad
            assert not ops.all_finite(on_device(x))
            assert not ops.correct(on_device(x), on_device(np.zeros(size, np.float32)), max(size // 100, 1)).finite


def test_a_sum_that_overflows_is_not_finite(ops: Ops) -> None:
    x = np.full(5000, 3e38, np.float32)
    assert not ops.correct(on_device(x), on_device(x), 50).finite


def test_positions_of_every_density(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 5, 64, 3000, 2**31 - 1):
        for count in {0, 1, min(size, 7), min(size, 40), min(size, 1500), min(size, 2999)}:
            some = rng.choice(size, count, replace=False) if size < 2**20 else np.unique(rng.integers(0, size, count))
            positions = np.sort(some).astype(np.int64)
            coded = encode_positions(REFERENCE, positions, size, positions)
            found = encode_positions(ops, on_device(positions), size, on_device(positions))
            assert bits_of(found) == bits_of(coded)
            reader = Reader(ops, found)
            decoded = decode_positions(reader, size, len(positions))
            assert np.array_equal(np.arange(size) if decoded is None else as_numpy(decoded), positions)
            reader.end()


def test_clustered_positions(ops: Ops) -> None:
    # Few gaps that are far larger than the rest: another parameter, and a long unary stream.
    positions = np.concatenate([np.arange(700), 40_000 + np.arange(0, 1400, 2), [99_999]])
    coded = encode_positions(REFERENCE, positions, 100_000, positions)
    assert bits_of(encode_positions(ops, on_device(positions), 100_000, on_device(positions))) == bits_of(coded)
    assert np.array_equal(as_numpy(decode_positions(Reader(ops, on_device(coded)), 100_000, len(positions))), positions)


def test_positions_out_of_order_or_range_are_declined(ops: Ops) -> None:
    for wrong in ([3, 3], [4, 2], [-1, 2], [0, 10], [2**62, 3]):
        positions = on_device(np.array(wrong, np.int64))
        x = on_device(np.ones(10, np.float32))
        assert ops.encode_positions(positions, 10) is None
        assert ops.encode_sparse8(x, positions, 512) is None
        assert bits_of(x) == bits_of(np.ones(10, np.float32))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 33, 3000])
def test_bits_and_small_integers(ops: Ops, count: int) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2, count).astype(np.uint8)
    packed = REFERENCE.pack_bits(bits)
    assert bits_of(ops.pack_bits(on_device(bits))) == bits_of(packed)
    assert bits_of(ops.unpack_bits(on_device(packed), count)) == bits_of(bits)
    for width in (0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 25, 31, 32):
        values = rng.integers(0, 2**width, count)
        packed = REFERENCE.pack_uint(values, width)
        assert bits_of(ops.pack_uint(on_device(values), width)) == bits_of(packed)
        assert bits_of(ops.unpack_uint(on_device(packed), width, count)) == bits_of(values)
    words = rng.integers(0, 256, 4 * count).astype(np.uint8)
    assert ops.checksum(on_device(words)) == REFERENCE.checksum(words)
    if count > 1:
        assert ops.checksum(on_device(words)[2:-2]) == REFERENCE.checksum(words[2:-2].copy())


def test_the_checksum_of_many_words_wraps_around(ops: Ops) -> None:
    data = np.full(4 * 20_003, 255, np.uint8)
    assert ops.checksum(on_device(data)) == REFERENCE.checksum(data)


def test_nothing_beside_the_arrays_is_written(ops: Ops) -> None:
    for size in SIZES:
        around = on_device(np.full(size + 128, 77, np.float32))
        x = around[64 : 64 + size]
        x.copy_(on_device(gradient("normal", (size,), 0)))
        frame, _ = TopKInt8(0.03).encode(ops, x, Context())
        Int8().encode(ops, x, Context())
        ops.correct(x, on_device(gradient("normal", (size,), 1)), max(size // 50, 1))
        TopKInt8(0.03).decode_add(ops, Reader(ops, frame), x)
        TopKInt8(0.03).decode_mean(ops, [Reader(ops, frame)] * 2, x, 3)
        assert bool((around[:64] == 77).all())
        assert bool((around[-64:] == 77).all())


def test_tensors_of_another_kind_go_step_by_step(ops: Ops) -> None:
    x = on_device(gradient("normal", (10_000,), 0))
    assert ops.encode_sparse8(x[::2], None, 512) is None
    assert ops.encode_sparse8(x.double(), None, 512) is None
    expected = REFERENCE.top_positions(as_numpy(x)[::2].copy(), 50)
    assert np.array_equal(as_numpy(ops.top_positions(x[::2], 50)), expected)
