"""Payloads: the header, the checksum, many workers' payloads in one buffer; read by plain Python as documented."""

from __future__ import annotations

import numpy as np
import pytest
import reference_format as reference
from arrays import array_of, as_numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.compressors import Context, TopKInt8
from hvd_gradcomp.errors import ConfigurationError, PayloadError, UnsupportedError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.frame import frame_kept, read_frame, write_frame
from hvd_gradcomp.wire.parts import Reader, write
from hvd_gradcomp.wire.payload import split_payloads, write_payload


def some_payload(ops: Ops, seed: int, fingerprint: int = 7, **options: bool) -> Array:
    x = np.random.default_rng(seed).standard_normal(50).astype(np.float32)
    frame, _ = TopKInt8(ratio=0.1).encode(ops, array_of(ops, x), Context())
    return write_payload(ops, [frame, frame], fingerprint, frame, **options)


def test_a_payload_is_what_the_documentation_says(ops):
    fingerprint, non_finite, frames = reference.read_payload(bytes(as_numpy(some_payload(ops, 1, 0xDEADBEEF))), 2)
    assert (fingerprint, non_finite) == (0xDEADBEEF, False)
    assert [(frame.size, len(frame.positions)) for frame in frames] == [(50, 5), (50, 5)]


def test_a_payload_without_frames_can_say_that_the_gradient_was_not_finite(ops):
    payload = write_payload(ops, [], 7, array_of(ops, np.zeros(3)), non_finite=True)
    assert reference.read_payload(bytes(as_numpy(payload)), 0) == (7, True, [])
    (received,) = split_payloads(ops, payload, [4], 7)
    assert received.non_finite
    assert received.rank == 4
    assert received.frames.left == 0


def test_payloads_of_many_workers(ops):
    payloads = [some_payload(ops, seed) for seed in range(4)]
    found = split_payloads(ops, ops.concat(payloads), [3, 5, 8, 9], 7)
    assert [each.rank for each in found] == [3, 5, 8, 9]
    for payload, each in zip(payloads, found, strict=True):
        np.testing.assert_array_equal(as_numpy(each.frames.data), as_numpy(payload)[16:])


def test_all_ranks_of_another_configuration_are_named(ops):
    payloads = [some_payload(ops, seed, fingerprint) for seed, fingerprint in enumerate([7, 8, 7, 9])]
    with pytest.raises(ConfigurationError, match=r"ranks \[5, 9\] "):
        split_payloads(ops, ops.concat(payloads), [3, 5, 8, 9], 7)


def test_a_corrupt_payload_counts_more_than_another_configuration(ops):
    payload = as_numpy(some_payload(ops, 1, 8))
    payload[-1] ^= 1
    with pytest.raises(PayloadError, match="rank 5"):
        split_payloads(ops, ops.concat([some_payload(ops, 0), array_of(ops, payload)]), [3, 5], 7)


@settings(max_examples=200)
@given(data=st.data())
def test_no_changed_payload_passes(ops, data):
    """Several bytes at once, moved blocks, other lengths: the checksum sees what single bytes do not show."""
    payload = bytearray(as_numpy(some_payload(ops, 1)))
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        how = data.draw(st.sampled_from(["set", "swap words", "insert", "delete"]))
        if how == "set":
            changed[place] = data.draw(st.integers(0, 255))
        elif how == "swap words":
            place &= ~3
            other = data.draw(st.integers(0, len(changed) - 4)) & ~3
            changed[place : place + 4], changed[other : other + 4] = (
                changed[other : other + 4],
                changed[place : place + 4],
            )
        elif how == "insert":
            changed[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            del changed[place : place + 4]
    if changed != payload:
        with pytest.raises(PayloadError, match="rank 3"):
            split_payloads(ops, array_of(ops, np.frombuffer(bytes(changed), np.uint8)), [3], 7)


@pytest.mark.parametrize(
    "garbage", [b"", b"HG", bytes(12) + b"HG\x01\x00", b"\xff" * 100, b"HG\x01\x00" + b"\xff" * 12]
)
def test_garbage_is_no_payload(ops, garbage):
    with pytest.raises(PayloadError, match="rank 3"):
        split_payloads(ops, array_of(ops, np.frombuffer(garbage, np.uint8)), [3], 7)


def test_zeros_are_a_worker_that_has_joined(ops):
    with pytest.raises(UnsupportedError, match=r"rank 3.*hvd\.join"):
        split_payloads(ops, array_of(ops, np.zeros(16, np.uint8)), [3], 7)


def test_frames_are_checked_against_what_is_expected(ops):
    body = array_of(ops, np.arange(8, dtype=np.uint8))
    frame = write_frame(ops, 3, 100, 9, body)
    assert frame_kept(ops, frame) == 9
    reader, kept = read_frame(Reader(ops, frame), 3, 100)
    assert (kept, bytes(as_numpy(reader.data))) == (9, bytes(range(8)))
    with pytest.raises(PayloadError, match="algorithm 3 where 4"):
        read_frame(Reader(ops, frame), 4, 100)
    with pytest.raises(PayloadError, match="100 elements where one of 99"):
        read_frame(Reader(ops, frame), 3, 99)
    with pytest.raises(PayloadError, match="keeps 9 elements of a tensor of 8"):
        read_frame(Reader(ops, write_frame(ops, 3, 8, 9, body)), 3, 8)
    with pytest.raises(PayloadError, match="truncated: 8 bytes expected, 4 left"):
        read_frame(Reader(ops, frame[:-4]), 3, 100)


def test_parts_are_padded_and_never_read_past_their_end(ops):
    data = write(ops, array_of(ops, np.zeros(1)), b"abc", array_of(ops, np.array([1, 2, 3, 4, 5], np.uint8)))
    assert bytes(as_numpy(data)) == b"abc\0\1\2\3\4\5\0\0\0"
    reader = Reader(ops, data)
    assert bytes(as_numpy(reader.bytes(3))) == b"abc"
    assert reader.left == 8
    with pytest.raises(PayloadError, match="truncated"):
        reader.bytes(9)
    with pytest.raises(PayloadError, match="truncated"):
        reader.bytes(-1)
    with pytest.raises(PayloadError, match="8 bytes more"):
        reader.end()
    assert bytes(as_numpy(reader.bytes(5))) == b"\1\2\3\4\5"
    reader.end()
