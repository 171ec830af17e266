"""Corrupt bytes: the kernels refuse exactly what the reference refuses, with its words, and write nothing."""

from __future__ import annotations

import native_fuzz
import pytest
from native import VARIANTS

from hvd_gradcomp.compressors import Compressor

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels here")


@pytest.mark.parametrize("method", native_fuzz.METHODS, ids=str)
def test_mutated_frames_end_as_in_the_reference(method: Compressor) -> None:
    assert native_fuzz.compare_frames(method, 200, seed=0) > 50


@pytest.mark.parametrize("method", native_fuzz.METHODS, ids=str)
def test_a_mean_of_mutated_frames_is_right_or_declined(method: Compressor) -> None:
    assert native_fuzz.compare_means(method, 200, seed=1) > 50
