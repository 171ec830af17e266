"""Invariant 6, one format: every backend gives the same payload bytes for the same input, today and tomorrow."""

from __future__ import annotations

import numpy as np
import pytest
import reference_format as reference
from arrays import BACKENDS, COMPRESSORS, array_of, as_numpy, gradient, kinds, seeds
from golden_vectors import CASES, FINGERPRINT, INPUTS, golden, payload_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.compressors import Context, Int8, TopK, TopKInt8, compression_from_spec
from hvd_gradcomp.ops import backend
from hvd_gradcomp.wire.payload import VERSION, split_payloads

VARIED = [*COMPRESSORS, TopKInt8(ratio=0.01), TopK(ratio=1.0), TopK(ratio=0.4) >> Int8(block=4), Int8(block=1)]


def test_one_format_has_golden_vectors_of_this_version():
    """A new version needs new golden vectors, and old ones must not be left behind."""
    assert golden().keys() == set(CASES)
    assert {payload[2] for payload in golden().values()} == {VERSION}


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_one_format_as_in_the_golden_vectors(ops, name, spec):
    assert payload_of(name, spec, ops.name).hex() == golden()[name, spec].hex()


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_golden_vectors_decode_to_what_plain_python_reads(ops, name, spec):
    data = golden()[name, spec]
    compressor = compression_from_spec(spec)
    (received,) = split_payloads(ops, array_of(ops, np.frombuffer(data, np.uint8)), [0], FINGERPRINT)
    fingerprint, non_finite, frames = reference.read_payload(data, len(INPUTS[name]))
    assert (fingerprint, non_finite) == (FINGERPRINT, False)
    for x, frame in zip(INPUTS[name], frames, strict=True):
        expected = np.zeros(len(x), np.float32)
        expected[frame.positions] = frame.values
        blank = array_of(ops, np.zeros(len(x), np.float32))
        np.testing.assert_array_equal(as_numpy(compressor.decode_add(ops, received.frames, blank)), expected)
    received.frames.end()


@pytest.mark.parametrize("compressor", VARIED, ids=str)
@settings(max_examples=25)
@given(kind=kinds, size=st.one_of(st.integers(1, 600), st.sampled_from([16384, 20000])), seed=seeds)
def test_one_format_on_every_backend(compressor, kind, size, seed):
    """Frames and residuals, bit by bit."""
    x = gradient(kind, (size,), seed)
    found = set()
    for name in BACKENDS:
        ops = backend(name)
        frame, residual = compressor.encode(ops, array_of(ops, x), Context())
        found.add((ops.to_host(frame), as_numpy(residual).tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("compressor", [each for each in VARIED if each.meets == "sum"], ids=str)
@settings(max_examples=50)
@given(kind=kinds, size=st.integers(1, 300), seed=seeds, workers=st.integers(1, 9))
def test_one_format_of_what_is_added(compressor, kind, size, seed, workers):
    x = gradient(kind, (size,), seed)
    found = set()
    for name in BACKENDS:
        ops = backend(name)
        vector, residual = compressor.summands(ops, array_of(ops, x), Context(workers=workers))
        packed = ops.to_host(ops.pack_float(vector, compressor.sum_kind))
        found.add((packed, as_numpy(residual).tobytes()))
    assert len(found) == 1


def test_one_format_does_not_change_its_input(ops):
    """Decoding leaves the bytes alone, so that they can be decoded again."""
    data = array_of(ops, np.frombuffer(golden()["two-tensors", "topk(ratio=0.02) >> int8"], np.uint8))
    before = ops.to_host(data)
    (received,) = split_payloads(ops, data, [0], FINGERPRINT)
    for x in INPUTS["two-tensors"]:
        TopKInt8().decode_add(ops, received.frames, array_of(ops, x))
    assert ops.to_host(data) == before
