"""TernGrad with shared scales: digits that an allreduce adds exactly, and the sum that comes of them."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy, bits_of, gradient
from hypothesis import given
from hypothesis import strategies as st
from simulated_cluster import Cluster
from steps import engines_of, parameters_of, step
from value_codes import bernstein

from hvd_gradcomp.compressors import TernGradSum, compression_from_spec
from hvd_gradcomp.compressors.terngrad_sum import digits_in_word, pack_digits, unpack_digits
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import ErrorFeedback
from hvd_gradcomp.ops import Ops, backend

SHAPES = [(500,), (7, 30)]


@given(workers=st.integers(1, 40), count=st.integers(0, 60), seed=st.integers(0, 1000))
def test_digits_add_up_exactly(workers: int, count: int, seed: int) -> None:
    ops = backend("numpy")
    digits = np.random.default_rng(seed).integers(0, 3, (workers, count)).astype(np.float32)
    words = sum((pack_digits(ops, each, workers) for each in digits), np.float32(0))
    assert unpack_digits(ops, np.atleast_1d(words), workers, count).tolist() == digits.sum(axis=0).tolist()


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16, 64, 1000, 32767])
def test_the_largest_and_smallest_sums_are_exact(ops: Ops, workers: int) -> None:
    width = digits_in_word(workers)
    twos = pack_digits(ops, array_of(ops, np.full(width, 2, np.float32)), workers)
    total = as_numpy(twos).astype(np.float64) * workers
    # A whole float32, and one more digit would not have been.
    assert total[0] == np.float32(total[0]) < 2**24 < (2 * workers + 1.0) ** (width + 1)
    found = unpack_digits(ops, array_of(ops, total.astype(np.float32)), workers, width)
    assert as_numpy(found).tolist() == [2 * workers] * width
    one = np.zeros(width, np.float32)
    one[-1] = 1
    assert as_numpy(unpack_digits(ops, pack_digits(ops, array_of(ops, one), workers), workers, width)).tolist() == [
        *[0] * (width - 1),
        1,
    ]


def test_bits_of_the_docstring() -> None:
    assert [digits_in_word(workers) for workers in (4, 8, 16, 64)] == [7, 5, 4, 3]


def gradients_of(workers: int, number: int = 0) -> list[dict[str, np.ndarray]]:
    return [
        {f"p{index}": gradient("normal", shape, (number, rank, index)) for index, shape in enumerate(SHAPES)}
        for rank in range(workers)
    ]


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_sent_and_left_over_make_up_the_gradients(ops: Ops, workers: int) -> None:
    compressor = TernGradSum(memory=ErrorFeedback(), dense_below=0)
    cluster = Cluster(workers)
    engines = engines_of(cluster, compressor, parameters_of(SHAPES), average=False)
    gradients = gradients_of(workers)
    results = step(cluster, engines, ops, gradients)
    for name in ("p0", "p1"):
        assert all(bits_of(each[name]) == bits_of(results[0][name]) for each in results)
        left = sum(as_numpy(engine.state[name]["residual"]).astype(np.float64) for engine in engines)
        whole = sum(each[name].reshape(-1).astype(np.float64) for each in gradients)
        assert np.allclose(results[0][name] + left, whole, rtol=0, atol=1e-5)
        # Whole multiples of one scale, which no worker's gradient exceeds.
        scale = max(min(np.abs(each[name]).max(), 2.5 * np.sqrt((each[name] ** 2).mean())) for each in gradients)
        multiples = results[0][name] / scale
        assert np.allclose(multiples, np.round(multiples), atol=1e-5)
        assert np.abs(np.round(multiples)).max() <= workers
    assert all(each.request.kind == "float32" for each in cluster.sent[0] if hasattr(each.request, "kind"))
    words = max(len(each.request.values) for each in cluster.sent[0] if hasattr(each.request, "values"))
    assert words == -(-710 // digits_in_word(workers))


def test_unbiased_without_clipping() -> None:
    """To a confidence of 1 - 1e-9 a value (Bernstein), over 400 steps of three workers."""
    ops, workers, times = backend("numpy"), 3, 400
    cluster = Cluster(workers)
    engines = engines_of(cluster, TernGradSum(clip=None, dense_below=0), parameters_of([(60,)]))
    gradients = [{"p0": gradient("normal", (60,), rank)} for rank in range(workers)]
    mean = np.mean([step(cluster, engines, ops, gradients)[0]["p0"] for _ in range(times)], axis=0)
    exact = np.mean([each["p0"].astype(np.float64) for each in gradients], axis=0)
    scale = max(np.abs(each["p0"]).max() for each in gradients)
    variance = sum(scale * np.abs(each["p0"]) - each["p0"] ** 2 for each in gradients) / workers**2
    assert (np.abs(mean - exact) <= bernstein(times, variance, scale) + 1e-6).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_worker_that_is_not_finite_makes_all_skip(ops: Ops, bad: float) -> None:
    cluster = Cluster(3)
    engines = engines_of(cluster, TernGradSum(dense_below=0), parameters_of(SHAPES))
    gradients = gradients_of(3)
    gradients[1]["p1"][0, 0] = bad
    for results in step(cluster, engines, ops, gradients):
        assert all(np.isnan(result).all() for result in results.values())
    results = step(cluster, engines, ops, gradients_of(3, 1))
    assert all(np.isfinite(each["p0"]).all() for each in results)


def test_both_backends_exchange_the_same_numbers() -> None:
    results = []
    for name in ("numpy", "torch"):
        cluster = Cluster(4)
        engines = engines_of(cluster, TernGradSum(dense_below=0), parameters_of(SHAPES))
        results.append(step(cluster, engines, backend(name), gradients_of(4))[0])
    assert all(bits_of(results[0][name]) == bits_of(results[1][name]) for name in ("p0", "p1"))


def test_spec() -> None:
    assert compression_from_spec("terngrad_sum(clip=3.0, seed=1)") == TernGradSum(clip=3.0, seed=1)
    with pytest.raises(ConfigurationError, match="clip must be"):
        TernGradSum(clip=0.5)
