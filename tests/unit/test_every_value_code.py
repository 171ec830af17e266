"""What every value code must do: the same bytes on every backend, decode to what was promised, survive any input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_format
import torch
from arrays import BACKENDS, array_of, bits_of, gradient, kinds, seeds
from fuzzing import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st
from value_codes import CODES, CONTEXT, coded, decoded

from hvd_gradcomp.compressors import Context, Linear, Natural, TopK, ValueCode, compression_from_spec
from hvd_gradcomp.errors import ConfigurationError, NonFiniteError, PayloadError
from hvd_gradcomp.ops import Ops, backend
from hvd_gradcomp.wire.codes import HEADER
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.values import decode_values

# One test a code, so that a failure names the code.
all_codes = pytest.mark.parametrize("code", CODES, ids=str)


@all_codes
@settings(max_examples=25)
@given(kind=kinds, seed=seeds, count=st.integers(0, 700))
def test_same_bytes_on_every_backend_and_they_decode_to_what_was_promised(
    code: ValueCode, kind: str, seed: int, count: int
) -> None:
    values = gradient(kind, (count,), seed)
    results = []
    for name in BACKENDS:
        ops = backend(name)
        data, promised = coded(code, ops, values)
        found = decoded(code, ops, data, count)
        assert found.dtype == promised.dtype == np.float32
        assert len(found) == len(promised) == count
        assert np.array_equal(found, promised)
        results.append((bits_of(data), promised.tobytes()))
    assert all(result == results[0] for result in results)


@all_codes
@settings(max_examples=5)
@given(kind=kinds, seed=seeds, count=st.integers(0, 150))
def test_bytes_are_what_the_documentation_says(code: ValueCode, kind: str, seed: int, count: int) -> None:
    data, promised = coded(code, backend("numpy"), gradient(kind, (count,), seed))
    body = reference_format.Bytes(data.tobytes())
    _, values = reference_format.read_values(body, count)
    assert not body.data
    assert np.array_equal(values, promised)


@all_codes
def test_huge_values_stay_finite(code: ValueCode, ops: Ops) -> None:
    values = np.float32([3.4028235e38, -3.4028235e38, 0, 1, 3.3e38] * 30)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        data, promised = coded(code, ops, values)
        found = decoded(code, ops, data, len(values))
    assert np.isfinite(found).all()
    assert np.array_equal(found, promised)


@all_codes
@pytest.mark.parametrize("kind", ["subnormals", "wild", "normal", "ties"])
def test_no_byte_depends_on_subnormal_numbers(code: ValueCode, ops: Ops, kind: str) -> None:
    """TensorFlow takes them for zero, in what goes into an operation and in what comes out."""
    values = gradient(kind, (1000,), 8)
    # Scales down to where results are subnormal although values are not.
    values = np.concatenate([values * np.float32(scale) for scale in (1, 1e-10, 1e-25, 1e-30, 1e-36)])
    expected = bits_of(coded(code, ops, values)[0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        assert np.float32(1e-30) * np.float32(1e-10) == 0
        data, _ = coded(code, ops, values)
    finally:
        torch.set_flush_denormal(False)
    assert bits_of(data) == expected


@all_codes
def test_the_residual_is_what_the_receiver_lacks(code: ValueCode, ops: Ops) -> None:
    x = gradient("normal", (500,), 3)
    for method in (code, TopK(0.1) >> code):
        frame, residual = method.encode(ops, array_of(ops, x), CONTEXT)
        reader = Reader(ops, frame)
        sent = method.decode_add(ops, reader, array_of(ops, np.zeros_like(x)))
        reader.end()
        assert np.allclose(np.asarray(sent) + np.asarray(residual), x, rtol=0, atol=1e-6)


@all_codes
def test_behind_a_sparsifier_that_selects_nothing(code: ValueCode, ops: Ops) -> None:
    method = TopK(0.1) >> code
    frame, residual = method.encode(ops, array_of(ops, np.zeros(100, np.float32)), CONTEXT)
    reader = Reader(ops, frame)
    found = method.decode_add(ops, reader, array_of(ops, np.zeros(100, np.float32)))
    reader.end()
    assert not np.asarray(found).any()
    assert not np.asarray(residual).any()


@all_codes
def test_size_is_as_announced(code: ValueCode) -> None:
    values = gradient("normal", (1 << 16,), 0)
    bits = 8 * len(coded(code, backend("numpy"), values)[0]) / len(values)
    # The range of exponents, which decides the size of this one, is larger in most gradients than in normal values.
    assert bits == pytest.approx(code.value_bits(), rel=0.02, abs=1.01 if isinstance(code, Natural) else 0.02)


@all_codes
def test_spec_parses_back(code: ValueCode) -> None:
    assert compression_from_spec(str(code)) == code
    assert compression_from_spec(f"topk(ratio=0.5) >> {code}") == TopK(0.5) >> code


@all_codes
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_horovods_interface_takes_every_shape_and_dtype(code: ValueCode, shape: tuple[int, ...], dtype: Any) -> None:
    x = torch.from_numpy(gradient("normal", shape, 1)).to(dtype)
    payload, context = code.compress(x)
    restored = code.decompress(payload, context)
    reference, context = code.compress(x.float().numpy())
    assert bits_of(payload) == bits_of(reference)
    assert np.array_equal(np.asarray(restored), code.decompress(reference, context))
    assert tuple(restored.shape) == shape


@all_codes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(code: ValueCode, ops: Ops, bad: float) -> None:
    values = gradient("normal", (100,), 0)
    values[50] = bad
    with pytest.raises(NonFiniteError, match="100 elements holds NaN or infinity"):
        code.compress(array_of(ops, values))


@all_codes
def test_draws_depend_on_name_step_rank_and_seed_alone(code: ValueCode) -> None:
    values = gradient("normal", (300,), 2)
    ops = backend("numpy")

    def data(context: Context) -> bytes:
        return bits_of(coded(code, ops, values, context)[0])

    same = [data(CONTEXT), data(Context(1, 8, "layer.weight", 3))]
    others = [
        data(Context(0, 2, "layer.weight", 3)),
        data(Context(1, 2, "layer.bias", 3)),
        data(Context(1, 2, "layer.weight", 4)),
    ]
    assert same[0] == same[1]
    if is_stochastic(code):
        assert len({same[0], *others}) == 4
    else:
        assert set(others) == {same[0]}


def is_stochastic(code: ValueCode) -> bool:
    return hasattr(code, "seed") and getattr(code, "rounding", "stochastic") == "stochastic"


@all_codes
def test_mutated_frames_are_refused_or_decode_to_something_of_the_right_size(code: ValueCode, ops: Ops) -> None:
    report = fuzz(code, runs=150, seed=1, ops=ops)
    assert report.refused + report.decoded == 150


ONE = np.float32([1]).tobytes()


@pytest.mark.parametrize(
    ("header", "rest", "count", "message"),
    [
        ((4, 0, 0), b"", 0, "0 levels on each side of zero"),
        ((4, 0, 128), b"", 0, "128 levels on each side of zero"),
        ((4, 32, 1), b"", 1, "blocks of 2\\*\\*32"),
        ((4, 31, 1), ONE + b"\3", 1, "lies outside -1 ... 1"),
        ((4, 31, 1), np.float32([np.nan]).tobytes() + b"\0", 1, "scale is not finite"),
        ((5, 31, 1), ONE + (2).to_bytes(4, "little") + bytes(2), 1, "2 bytes of unary lengths for 1 levels"),
        ((5, 31, 1), ONE + (1).to_bytes(4, "little") + b"\3", 1, "holds 2 levels, 1 are expected"),
        ((5, 31, 1), ONE + (1).to_bytes(4, "little") + b"\4", 1, "lies outside -1 ... 1"),
        ((5, 31, 5), ONE + (1).to_bytes(4, "little") + b"\4\0\0\0" + b"\3", 1, "lies outside -5 ... 5"),
        ((6, 31, 0), ONE + b"\xf3", 1, "does not hold five trits"),
        ((7, 31, 0), ONE + np.float32([-np.inf]).tobytes() + b"\0", 1, "scale is not finite"),
        ((8, 0, 1), b"\0", 1, "from exponent 0"),
        ((8, 255, 1), b"\0", 1, "from exponent 255"),
        ((8, 1, 10), b"\0\0", 1, "in 10 bits"),
        ((8, 254, 3), b"\4", 1, "lies outside float32"),
        ((8, 1, 2), b"\1", 1, "zero has a sign"),
        ((9, 31, 0), ONE, 1, "truncated"),
    ],
)
def test_bytes_that_no_code_writes(
    ops: Ops, header: tuple[int, int, int], rest: bytes, count: int, message: str
) -> None:
    data = np.frombuffer(HEADER.pack(*header) + rest, np.uint8)
    with pytest.raises(PayloadError, match=message):
        decode_values(Reader(ops, array_of(ops, data)), count)


def test_a_code_on_the_left_of_another_is_an_error() -> None:
    with pytest.raises(Exception, match="does not select values"):
        Linear() >> Linear()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("linear(bits=1)", "bits must be 2 to 8, got 1"),
        ("linear(bits=9)", "bits must be 2 to 8, got 9"),
        ("linear(bits=True)", "bits must be 2 to 8"),
        ("linear(block=3)", "block must be a power of two"),
        ("linear(block=0)", "block must be a power of two"),
        ("linear(block=2**40)", "no plain value"),
        ("linear(block=1099511627776)", "up to 2\\*\\*31"),
        ("linear(rounding='up')", "'nearest' or 'stochastic', got 'up'"),
        ("linear(seed=0.5)", "seed must be an integer"),
        ("int8(block=7)", "block must be a power of two"),
    ],
)
def test_settings_that_cannot_work_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compression_from_spec(spec)
