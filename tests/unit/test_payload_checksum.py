"""The checksum of a payload: what a network or memory is likely to change must not go unseen."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from arrays import array_of, as_numpy

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Ops
from hvd_gradcomp.wire.payload import HEADER, split_payloads, write_payload

BODY = HEADER.size + 4


def payload_of(ops: Ops, words: int) -> np.ndarray:
    body = array_of(ops, np.random.default_rng(words).integers(0, 256, 4 * words, np.uint8))
    return as_numpy(write_payload(ops, [body], 1, body))


def is_refused(ops: Ops, payload: np.ndarray) -> bool:
    try:
        split_payloads(ops, array_of(ops, payload), [0], 1)
    except PayloadError:
        return True
    return False


@pytest.mark.parametrize("words", [0, 1, 2, 50])
def test_it_reads_back(ops: Ops, words: int) -> None:
    payload = payload_of(ops, words)
    (received,) = split_payloads(ops, array_of(ops, payload), [0], 1)
    assert received.frames.left == 4 * words


def test_every_single_bit_is_seen(ops: Ops) -> None:
    payload = payload_of(ops, 3)
    for bit in range(8 * len(payload)):
        changed = payload.copy()
        changed[bit // 8] ^= 1 << bit % 8
        assert is_refused(ops, changed)


def test_the_same_bits_of_two_words_are_seen(ops: Ops) -> None:
    payload = payload_of(ops, 24)
    for first, second in combinations(range(24), 2):
        for mask in (0x80, 0x40, 0xC0, 0xFF, 0x01):
            for byte in (1, 3):
                changed = payload.copy()
                changed[BODY + 4 * first + byte] ^= mask
                changed[BODY + 4 * second + byte] ^= mask
                assert is_refused(ops, changed), (first, second, mask, byte)


def test_words_that_change_places_are_seen(ops: Ops) -> None:
    payload = payload_of(ops, 24)
    for first, second in combinations(range(24), 2):
        changed = payload.copy()
        words = changed[BODY:].view(np.uint32)
        words[[first, second]] = words[[second, first]]
        assert is_refused(ops, changed)


def test_the_same_change_to_the_checksum_and_a_word_is_seen(ops: Ops) -> None:
    payload = payload_of(ops, 8)
    for word in range(8):
        for bit in range(32):
            changed = payload.copy()
            for place in (HEADER.size, BODY + 4 * word):
                view = changed[place : place + 4].view(np.uint32)
                view += np.uint32(1 << bit)
            assert is_refused(ops, changed)
