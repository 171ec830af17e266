"""Frames that somebody made up: decoding gives an error of this package or some array of the right size, nothing else.

The checksum is passed by: no bytes, whatever they are, may end in another exception, a write outside the tensor, or
memory beyond a small multiple of the tensor.
"""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from arrays import COMPRESSORS, array_of, as_numpy
from fuzzing import POSITIONS, fuzz
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.compressors import Compressor, Context, Int8, TopK, TopKInt8
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Ops, backend
from hvd_gradcomp.wire import frame as frames
from hvd_gradcomp.wire import positions, values
from hvd_gradcomp.wire.parts import Reader

SIZE = 300


def good_frame(compressor: Compressor, size: int = SIZE) -> bytearray:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    frame, _ = compressor.encode(backend("numpy"), x, Context())
    return bytearray(as_numpy(frame))


def decode(ops: Ops, data: bytes, size: int = SIZE) -> np.ndarray | PayloadError:
    """What comes of `data`, where nothing but the two may come of it."""
    # Behind the end lies what must not be touched.
    memory = array_of(ops, np.zeros(size + 8, np.float32))
    try:
        out = TopK().decode_add(ops, Reader(ops, array_of(ops, np.frombuffer(bytes(data), np.uint8))), memory[:size])
    except PayloadError as error:
        return error
    finally:
        assert not as_numpy(memory)[size:].any()
    assert out.shape == (size,)
    assert ops.dtype_of(out) == "float32"
    return as_numpy(out)


@pytest.mark.parametrize("method", POSITIONS, ids=str)
def test_mutated_positions(ops, method):
    report = fuzz(method, runs=200, seed=2, ops=ops)
    assert report.refused + report.decoded == 200
    assert report.refused


@pytest.mark.parametrize("compressor", [*COMPRESSORS, TopK(ratio=1.0) >> Int8()], ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_mutated_frames(ops, compressor, data):
    changed = good_frame(compressor)
    # Most changes go where the headers are; the last bytes are values, of which any will do.
    place = st.one_of(st.integers(0, 31), st.integers(0, len(changed) - 1))
    for _ in range(data.draw(st.integers(1, 5))):
        at = min(data.draw(place), len(changed) - 4)
        how = data.draw(st.sampled_from(["byte", "bit", "word", "cut", "insert"]))
        if how == "byte":
            changed[at] = data.draw(st.integers(0, 255))
        elif how == "bit":
            changed[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "word":
            word = data.draw(st.sampled_from([0, 1, SIZE, SIZE + 1, 2**31 - 1, 2**31, 2**32 - 1]))
            changed[at & ~3 : (at & ~3) + 4] = struct.pack("<I", word)
        elif how == "cut" and len(changed) > 12:
            del changed[-data.draw(st.integers(1, 8)) :]
        else:
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    decode(ops, changed)


index_codes = st.one_of(
    st.builds(
        positions.HEADER.pack, st.integers(0, 4), st.integers(0, 40), st.sampled_from([0, 1, 4, 40, 2**20, 2**32 - 1])
    )
)
value_codes = st.builds(values.HEADER.pack, st.integers(0, 4), st.integers(0, 40), st.just(0))


@settings(max_examples=200)
@given(
    kept=st.integers(0, SIZE),
    index_code=index_codes,
    index_bytes=st.one_of(st.binary(max_size=48), st.just(bytes(40)), st.just(b"\xff" * 40)),
    value_code=value_codes,
    value_bytes=st.one_of(st.binary(max_size=48), st.just(b"\xff" * 1200)),
)
def test_frames_made_of_whole_cloth(ops, kept, index_code, index_bytes, value_code, value_bytes):
    """Headers that fit, so that the bytes behind them are looked at."""
    body = index_code + index_bytes + value_code + value_bytes
    decode(ops, frames.HEADER.pack(1, SIZE, kept, len(body)) + body)


def test_some_of_these_frames_do_decode(ops):
    """Hostile frames are not refused wholesale: a changed value decodes to another value."""
    frame = good_frame(TopKInt8(ratio=0.1))
    frame[-1] ^= 64
    out = decode(ops, frame)
    assert isinstance(out, np.ndarray)
    assert np.count_nonzero(out) == 30


@pytest.mark.parametrize("count", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("field", range(3))
def test_huge_counts_in_headers_cost_no_memory(ops, field, count):
    """A frame of 2**32 - 1 elements, kept values or bytes that is a few bytes long is refused at once."""
    frame = good_frame(TopKInt8(ratio=0.1))
    header = list(frames.HEADER.unpack(bytes(frame[: frames.HEADER.size])))
    header[1 + field] = count
    frame[: frames.HEADER.size] = frames.HEADER.pack(*header)
    tracemalloc.start()
    assert isinstance(decode(ops, frame), PayloadError)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("compressor", [TopK(0.01), TopK(1.0), TopKInt8(0.01), TopKInt8(0.3), Int8()], ids=str)
def test_memory_is_a_small_multiple_of_the_tensor(compressor):
    """Whatever the bytes say: frames of a large tensor, with every byte of their headers changed in turn."""
    ops, size = backend("numpy"), 50_000
    frame = good_frame(compressor, size)
    blank = np.zeros(size, np.float32)
    for place in range(frames.HEADER.size + positions.HEADER.size):
        for value in (0, 1, 3, 17, 31, 255):
            changed = bytearray(frame)
            changed[place] = value
            array = np.frombuffer(bytes(changed), np.uint8)
            tracemalloc.start()
            with suppress(PayloadError):
                compressor.decode_add(ops, Reader(ops, array), blank)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= 8 * blank.nbytes, f"byte {place} = {value}"
