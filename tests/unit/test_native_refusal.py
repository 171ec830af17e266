"""Corrupt bytes: the kernels refuse exactly what the reference refuses, with its words, and write nothing."""

from __future__ import annotations

import native_fuzz
import numpy as np
import pytest
from arrays import array_of
from native import VARIANTS, variant

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Ops
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.positions import decode_positions

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels here")


@pytest.mark.parametrize("method", native_fuzz.METHODS, ids=str)
def test_mutated_frames_end_as_in_the_reference(method: Compressor) -> None:
    assert native_fuzz.compare_frames(method, 200, seed=0) > 50


@pytest.mark.parametrize(("instruction_set", "cls"), VARIANTS)
def test_more_low_bits_than_a_writer_considers_are_refused(instruction_set: str, cls: type[Ops]) -> None:
    """Also where the position they come to is right: 1 of 9 in 8 bits."""
    low_and_unary = b"\1\0\0\0" + b"\1\0\0\0"
    data = np.frombuffer(b"\1\x08\0\0\1\0\0\0" + low_and_unary, np.uint8)
    with variant(instruction_set, cls) as ops, pytest.raises(PayloadError, match="8 low bits for 1 of 9"):
        decode_positions(Reader(ops, array_of(ops, data)), 9, 1)


@pytest.mark.parametrize("method", native_fuzz.METHODS, ids=str)
def test_a_mean_of_mutated_frames_is_right_or_declined(method: Compressor) -> None:
    assert native_fuzz.compare_means(method, 200, seed=1) > 50
