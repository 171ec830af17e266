"""Random-k, fixed threshold, DGC: positions, bytes, bounds of the papers, schedule, what travels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from arrays import array_of, as_numpy, bits_of, gradient, kinds, seeds
from fuzzing import fuzz, fuzz_payload
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import Run

from hvd_gradcomp.collectives import Allgather, Allreduce
from hvd_gradcomp.compressors import (
    DGC,
    FP16,
    Compressor,
    Context,
    Int8,
    RandomK,
    Threshold,
    TopK,
    compression_from_spec,
)
from hvd_gradcomp.compressors.marks import MARKS
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import ErrorFeedback, MomentumCorrection, NoMemory
from hvd_gradcomp.ops import backend
from hvd_gradcomp.ops.hashing import coefficients, draw_positions, polynomial
from hvd_gradcomp.wire.parts import Reader

NUMPY, TORCH = backend("numpy"), backend("torch")
CONTEXT = Context(rank=1, workers=2, name="layer.weight", step=3)
PLAIN = RandomK(ratio=0.1, memory=NoMemory())
UNBIASED = RandomK(ratio=0.1, unbiased=True, memory=NoMemory())
SPARSIFIERS: tuple[Compressor, ...] = (
    PLAIN,
    PLAIN >> Int8(),
    PLAIN >> FP16(),
    UNBIASED,
    UNBIASED >> Int8(),
    RandomK(ratio=1.0),
    Threshold(value=0.5),
    Threshold(value=1e-30) >> Int8(),
    Threshold(value=1e30),
    DGC(ratio=0.01, warmup_steps=8),
    DGC(ratio=0.01) >> FP16(),
)


def coded(
    compressor: Compressor, x: np.ndarray, context: Context = CONTEXT, ops=NUMPY
) -> tuple[bytes, np.ndarray, np.ndarray]:
    """The frame, what it decodes to, and the residual."""
    frame, residual = compressor.encode(ops, array_of(ops, x), context)
    reader = Reader(ops, frame)
    out = compressor.decode_add(ops, reader, ops.zeros(len(x), "float32", frame))
    reader.end()
    return bits_of(frame), as_numpy(out), as_numpy(residual)


@pytest.mark.parametrize("compressor", SPARSIFIERS, ids=str)
@settings(max_examples=25)
@given(kind=kinds, size=st.integers(1, 700), seed=seeds)
def test_bytes_are_the_same_on_every_backend_and_nothing_is_lost(compressor, kind, size, seed):
    x = gradient(kind, (size,), seed)
    frame, sent, residual = coded(compressor, x)
    other, other_sent, other_residual = coded(compressor, x, ops=TORCH)
    assert frame == other
    assert sent.tobytes() == other_sent.tobytes()
    assert residual.tobytes() == other_residual.tobytes()
    sizes = np.abs(x) + np.abs(sent.astype(np.float64))
    assert (np.abs(x - sent.astype(np.float64) - residual) <= 2.0**-23 * sizes + 2.0**-149).all()


# -- draws ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    data=st.data(),
    size=st.one_of(st.integers(1, 40), st.integers(1, 20_000), st.just(2**31 - 1)),
    key=st.integers(0, 2**64 - 1),
)
def test_drawn_positions_are_distinct_within_the_tensor_and_alike_everywhere(data, size, key):
    count = data.draw(st.integers(0, min(size, 3000)))
    drawn = draw_positions(NUMPY, count, size, key, np.zeros(1))
    assert len(drawn) == len(set(drawn.tolist())) == count
    assert not count or (drawn.min() >= 0 and drawn.max() < size)
    assert as_numpy(draw_positions(TORCH, count, size, key, array_of(TORCH, np.zeros(1)))).tolist() == drawn.tolist()
    assert (
        draw_positions(NUMPY, count // 2, size, key, np.zeros(1)).tolist() == drawn.tolist()[: count // 2]
        or count == size
    )


def test_drawn_positions_stay_what_they_are():
    """Another version must draw alike, or its workers could not train with this one's."""
    assert draw_positions(NUMPY, 6, 1000, 2**63 + 12345, np.zeros(1)).tolist() == GOLDEN_DRAW
    x = np.arange(1, 41, dtype=np.float32)
    assert coded(RandomK(ratio=0.1, seed=7), x)[0].hex() == GOLDEN_FRAME


GOLDEN_DRAW = [5, 615, 711, 226, 525, 467]
GOLDEN_FRAME = (
    "0100000028000000040000002400000004000000000000003c3f1e6f50169daa0000000000000842000040410000f8410000b841"
)


@pytest.mark.parametrize(("size", "count"), [(5, 2), (37, 5), (256, 16), (300, 30)])
def test_every_set_of_positions_is_equally_likely_as_far_as_one_can_see(size, count):
    """Chi-square of how often each position, and each pair of neighbours, was drawn: 6 standard deviations allowed.

    A sound generator fails one of these four in fewer than one of a million choices of the keys.
    """
    draws = 1500
    single, pairs = np.zeros(size), np.zeros(size)
    for key in range(draws):
        marked = np.zeros(size, bool)
        marked[draw_positions(NUMPY, count, size, key * 0x9E3779B97F4A7C15 % 2**64, np.zeros(1))] = True
        single += marked
        pairs += marked & np.roll(marked, 1)
    rate = count / size
    statistic = ((single - draws * rate) ** 2 / (draws * rate * (1 - rate))).sum() * (size - 1) / size
    assert abs(statistic - (size - 1)) <= 6 * math.sqrt(2 * (size - 1)) + 6
    both = rate * (count - 1) / (size - 1)
    assert abs(pairs.sum() - draws * size * both) <= 6 * math.sqrt(draws * size * both)


def test_the_first_drawn_position_is_uniform():
    """Order matters to nobody, but the first of a draw shows the generator without its filter."""
    first = np.bincount([draw_positions(NUMPY, 1, 64, 977 * key, np.zeros(1))[0] for key in range(3200)], minlength=64)
    assert ((first - 50.0) ** 2 / 50).sum() <= 63 + 6 * math.sqrt(126)


@given(x=st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=5), key=st.integers(0, 2**64 - 1))
def test_polynomials_are_right_modulo_the_prime(x, key):
    prime = 2**31 - 1
    factors = coefficients(key, 4)
    expected = [sum(factor * value**power for power, factor in enumerate(factors)) % prime for value in x]
    for ops in (NUMPY, TORCH):
        found = as_numpy(polynomial(ops, array_of(ops, np.array(x, np.int64)), factors))
        assert [int(value) % prime for value in found] == expected
        assert (found >= 0).all()
        assert (found <= prime).all()


@pytest.mark.parametrize("compressor", [PLAIN, RandomK(ratio=0.9) >> Int8(), Threshold(value=0.5)], ids=str)
def test_mutated_frames_are_refused_or_fit(compressor):
    """A few of the many that `python tests/unit/fuzzing.py 100000` tries."""
    report = fuzz(compressor, runs=300, seed=2)
    assert report.refused > 200
    assert fuzz_payload(compressor, runs=100, seed=3) == 100


# -- random-k ---------------------------------------------------------------------------------------------------------


def test_random_k_sends_k_values_and_no_positions(ops):
    for compressor, kind in ((RandomK(ratio=0.1), "float32"), (RandomK(ratio=0.1) >> FP16(), "float16")):
        run = Run(ops, compressor, 3, [(4000,)])
        result = run.step()["p0"]
        assert np.count_nonzero(result) == 400
        (request,) = (sent.request for sent in run.cluster.sent[0] if sent.name == "p0")
        assert isinstance(request, Allreduce)
        assert request.kind == kind
        assert len(request.values) == 400 + MARKS
        chosen = result != 0
        mean = np.mean([gradients["p0"] for gradients in run.used], 0)
        np.testing.assert_allclose(result[chosen], mean[chosen], rtol=1e-5, atol=0 if kind == "float32" else 1e-2)
        assert np.count_nonzero(run.step()["p0"] * (result != 0)) < 100  # other positions in the next step


def test_random_k_behind_a_code_that_does_not_add_up_is_gathered_without_positions(ops):
    run = Run(ops, RandomK(ratio=0.1) >> Int8(block=512), 2, [(4000,)])
    assert np.count_nonzero(run.step()["p0"]) >= 390
    (request,) = (sent.request for sent in run.cluster.sent[0] if sent.name == "p0")
    assert isinstance(request, Allgather)
    assert len(request.payload) < 400 + 80


def test_unbiased_random_k_is_unbiased_with_the_variance_of_the_paper():
    """Mean over many steps within 6 of its standard deviations (a false alarm in fewer than one of a million seeds)."""
    x = np.random.default_rng(3).standard_normal(60).astype(np.float32)
    times, n, k = 3000, 60, 6
    total, squares = np.zeros(n), 0.0
    for step in range(times):
        sent = coded(UNBIASED, x, Context(name="layer", step=step))[1].astype(np.float64)
        total += sent
        squares += ((sent - x) ** 2).sum()
    deviation = np.sqrt((n / k - 1) * x.astype(np.float64) ** 2 / times)
    assert (np.abs(total / times - x) <= 6 * deviation).all()
    variance = (n / k - 1) * (x.astype(np.float64) ** 2).sum()
    assert abs(squares / times - variance) <= 0.1 * variance


def test_biased_random_k_and_top_k_are_contractions():
    rng = np.random.default_rng(4)
    n, k = 200, 20
    ratios = []
    for step in range(400):
        x = rng.standard_normal(n).astype(np.float32)
        _, _, left = coded(PLAIN, x, Context(name="layer", step=step))
        ratios.append((left**2).sum() / (x**2).sum())
        _, _, left = coded(TopK(ratio=0.1), x)
        assert (left**2).sum() <= (1 - k / n) * (x**2).sum() * (1 + 1e-6)
    # Of random-k the expectation is 1 - k/n; each ratio is within [0, 1] and deviates by about 0.03.
    assert abs(np.mean(ratios) - (1 - k / n)) <= 6 * np.std(ratios) / math.sqrt(len(ratios))


def test_unbiased_random_k_through_the_engine(ops):
    run = Run(ops, RandomK(ratio=0.25, unbiased=True, memory=NoMemory()), 2, [(2000,)])
    result = run.step()["p0"]
    mean = np.mean([gradients["p0"] for gradients in run.used], 0)
    np.testing.assert_allclose(result[result != 0], 4 * mean[result != 0], rtol=1e-5)
    assert run.after[0] == {}


@pytest.mark.parametrize("memory", [ErrorFeedback(), MomentumCorrection()], ids=str)
def test_unbiased_random_k_refuses_to_feed_back(memory):
    with pytest.raises(ConfigurationError, match="memory=none"):
        RandomK(unbiased=True, memory=memory)


# -- threshold --------------------------------------------------------------------------------------------------------


def test_threshold_sends_exactly_what_exceeds_it(ops):
    x = np.array([0.5, -0.75, 0.75, 0.0, -0.5, 1.0, 0.50000006], np.float32)
    _, sent, residual = coded(Threshold(value=0.5), x, ops=ops)
    np.testing.assert_array_equal(sent, np.where(np.abs(x) > 0.5, x, 0))
    assert np.count_nonzero(sent) == 4
    np.testing.assert_array_equal(residual, x - sent)


def test_threshold_with_nothing_to_send(ops):
    """An empty payload from one worker, or from all, is a step like any other."""
    run = Run(ops, Threshold(value=2.0, dense_below=0), 3, [(50,), (20,)])
    small = [{"p0": np.full(50, 0.5, np.float32), "p1": np.zeros(20, np.float32)} for _ in range(3)]
    assert not any(x.any() for x in run.step(small).values())
    small = [{name: x.copy() for name, x in gradients.items()} for gradients in small]
    small[2]["p0"][7] = 6.0
    assert np.flatnonzero(run.step(small)["p0"]).tolist() == [7]
    assert run.after[0]["p0"]["residual"].max() == 1.0
    assert run.after[2]["p0"]["residual"][7] == 0.0


# -- DGC --------------------------------------------------------------------------------------------------------------


def test_warm_up_falls_by_quarters_to_the_ratio():
    method = DGC(ratio=0.001, warmup_steps=8)
    ratios = [method.at(step).ratio for step in range(10)]
    assert ratios == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001]
    assert [DGC(ratio=0.01, warmup_steps=4).at(step).ratio for step in range(5)] == [0.25, 0.0625, 0.015625, 0.01, 0.01]
    assert DGC(ratio=0.001).at(0).ratio == 0.001
    chained = (DGC(ratio=0.001, warmup_steps=8) >> FP16()).at(2)
    assert str(chained) == "topk(ratio=0.0625, memory=dgc) >> fp16"


def test_warm_up_in_training_counts_steps(ops):
    run = Run(ops, DGC(ratio=0.01, warmup_steps=4, dense_below=0), 2, [(1000,)])
    counts = []
    for _ in range(6):
        run.step()
        counts.append(run.engines[0].counters.total.kept)
        run.engines[0].counters.reset()
    # Two workers: at first a quarter of the values, positions included, is no more than a dense exchange.
    assert counts == [250, 63, 16, 10, 10, 10]


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "compressor"),
    [
        ("randomk(0.01)", RandomK(ratio=0.01)),
        ("randomk(ratio=0.1, seed=4) >> fp16", RandomK(ratio=0.1, seed=4) >> FP16()),
        ("randomk(unbiased=True, memory=none)", RandomK(unbiased=True, memory=NoMemory())),
        ("threshold(0.1, granularity=bucket)", Threshold(value=0.1, granularity="bucket")),
        (
            "dgc(ratio=0.001, warmup_steps=100, memory=dgc(clip=1.0)) >> int8",
            DGC(0.001, 100, memory=MomentumCorrection(clip=1.0)) >> Int8(),
        ),
    ],
)  # fmt: skip
def test_specs(spec, compressor):
    assert compression_from_spec(spec) == compressor
    assert compression_from_spec(str(compressor)) == compressor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomK(ratio=0), "ratio must be a number with 0 < ratio <= 1, got 0"),
        (lambda: RandomK(seed=1.5), "seed must be an integer, got 1.5"),
        (lambda: Threshold(value=0.0), "value must be a number with value > 0, got 0.0"),
        (lambda: Threshold(value=float("inf")), "value must be a number with value > 0, got inf"),
        (lambda: DGC(warmup_steps=-1), "warmup_steps must be a number of steps >= 0, got -1"),
        (lambda: TopK(granularity="tensor"), "granularity must be one of"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
