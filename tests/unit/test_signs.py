"""Sign methods: their bytes, their contraction, and the majority vote among workers."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import bits_of, gradient, kinds, seeds
from hypothesis import given
from hypothesis import strategies as st
from simulated_cluster import Cluster
from steps import engines_of, parameters_of, step
from value_codes import coded, through

from hvd_gradcomp.compressors import Compressor, OneBit, ScaledSign, Sign, TopK, compression_from_spec
from hvd_gradcomp.feedback import Momentum
from hvd_gradcomp.ops import Ops, backend


def blocks(values: np.ndarray, block: int | None) -> list[np.ndarray]:
    return np.split(values, range(block, len(values), block)) if block else [values]


@given(kind=kinds, seed=seeds, count=st.integers(1, 300), block=st.sampled_from([None, 1, 32]))
def test_scaled_sign_is_the_mean_magnitude_with_the_sign(kind: str, seed: int, count: int, block: int | None) -> None:
    values = gradient(kind, (count,), seed)
    found = through(ScaledSign(block=block), values)
    for part, decoded in zip(blocks(values.astype(np.float64), block), blocks(found, block), strict=True):
        mean = np.abs(part).mean()
        if np.abs(part).max() < 2.0**-100:
            assert (np.abs(decoded) <= mean).all()
            continue
        assert np.allclose(np.abs(decoded), mean, rtol=1e-6, atol=0)
        assert (np.sign(decoded) == np.where(part > -(2.0**-126), 1, -1)).all()
        # Lemma 8 of the paper, with delta = ||v||_1^2 / (d ||v||_2^2).
        error, norm = ((part - decoded) ** 2).sum(), (part**2).sum()
        assert error <= (norm - len(part) * mean**2) * 1.0001 + norm * 1e-6


@given(kind=kinds, seed=seeds, count=st.integers(1, 300), block=st.sampled_from([None, 1, 32]))
def test_one_bit_decodes_to_the_means_of_both_signs(kind: str, seed: int, count: int, block: int | None) -> None:
    values = gradient(kind, (count,), seed)
    found = through(OneBit(block=block), values)
    for part, decoded in zip(blocks(values.astype(np.float64), block), blocks(found, block), strict=True):
        largest = np.abs(part).max()
        if largest < 2.0**-100:
            assert not decoded.any()
            continue
        positive = part > -(2.0**-126)
        for mask in (positive, ~positive):
            if mask.any():
                # Values below 2**-60 of the block's largest count as zero, and so does a subnormal mean.
                assert np.allclose(decoded[mask], part[mask].mean(), rtol=1e-6, atol=largest * 2.0**-59)
        error, norm = ((part - decoded) ** 2).sum(), (part**2).sum()
        assert error <= (norm - len(part) * np.abs(part).mean() ** 2) * 1.0001 + norm * 1e-6


def test_scaled_sign_leaves_a_third_of_a_normal_distribution() -> None:
    values = gradient("normal", (100_000,), 1)
    error = ((values - through(ScaledSign(), values)) ** 2).sum() / (values**2).sum()
    assert error == pytest.approx(1 - 2 / np.pi, abs=0.01)


def test_bytes(ops: Ops) -> None:
    values = np.float32([1, -3, 0, -0.0, 2, -1e-40, 5, 5, -1])
    # code 7, one block; -1 and 1; a bit for each value, the first lowest, zeros and subnormals as 1.
    assert bits_of(coded(Sign(), ops, values)[0]).hex(" ") == "07 1f 00 00 00 00 80 bf 00 00 80 3f fd 00 00 00"
    # blocks of 8: means -3 and 13 / 7; -1 and nothing, which is 0.
    expected = np.float32([-3, -1, 13 / 7, 0]).tobytes().hex(" ")
    assert bits_of(coded(OneBit(block=8), ops, values)[0]).hex(" ") == f"07 03 00 00 {expected} fd 00 00 00"


@pytest.mark.parametrize("code", [Sign(), ScaledSign(), OneBit(block=None)], ids=str)
def test_one_bit_a_value_is_what_travels(code: Compressor) -> None:
    values = gradient("normal", (8000,), 2)
    frame, _ = code.encode(backend("numpy"), values.copy(), None)
    # frame header 16, positions 8, code 4, two numbers
    assert len(frame) == 16 + 8 + 4 + 8 + 1000


def vote(ops: Ops, compressor: Compressor, gradients: list[np.ndarray], average: bool = True) -> list[np.ndarray]:
    """Each worker's result of one step."""
    cluster = Cluster(len(gradients))
    engines = engines_of(cluster, compressor, parameters_of([gradients[0].shape]), average=average)
    return [results["p0"] for results in step(cluster, engines, ops, [{"p0": each} for each in gradients])]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_majority_decides(ops: Ops, workers: int) -> None:
    gradients = [gradient("normal", (500,), (7, rank)) for rank in range(workers)]
    expected = np.sign(np.sign(gradients).sum(axis=0))
    assert ((expected == 0).any()) == (workers % 2 == 0)
    for average, factor in ((True, 1), (False, workers)):
        results = vote(ops, Sign(), gradients, average)
        assert all(bits_of(each) == bits_of(results[0]) for each in results)
        assert np.array_equal(results[0], expected * factor)


def test_a_minority_cannot_turn_a_sign_on_which_the_others_agree(ops: Ops) -> None:
    honest = gradient("normal", (500,), 3)
    results = vote(ops, Sign(), [honest, honest, honest, honest * -1e30, honest * -1e30])
    assert np.array_equal(results[0], np.sign(honest))


def test_signum_votes_on_the_signs_of_averages(ops: Ops) -> None:
    compressor = compression_from_spec("sign(memory=momentum(beta=0.5))")
    assert compressor == Sign(memory=Momentum(0.5))
    cluster = Cluster(3)
    engines = engines_of(cluster, compressor, parameters_of([(500,), (3,)]))
    averages = [np.zeros(500), np.zeros(500), np.zeros(500)]
    for number in range(3):
        gradients = [gradient("normal", (500,), (number, rank)) for rank in range(3)]
        results = step(cluster, engines, ops, [{"p0": each, "p1": each[:3]} for each in gradients])
        averages = [0.5 * old + 0.5 * new for old, new in zip(averages, gradients, strict=True)]
        expected = np.sign(np.sign(averages).sum(axis=0))
        assert np.array_equal(results[0]["p0"], expected)
        # However small, a tensor is voted on: the learning rate of signs would be none for its gradient.
        assert np.array_equal(results[2]["p1"], expected[:3])


def test_no_worker_count_makes_gradients_travel_in_the_place_of_votes() -> None:
    ops = backend("numpy")
    gradients = [gradient("normal", (64,), (7, rank)) for rank in range(70)]
    assert set(vote(ops, Sign(), gradients)[0].tolist()) <= {-1, 0, 1}
    assert set(vote(ops, TopK(0.5, dense_below=0) >> Sign(), gradients)[0].tolist()) <= {-1, 0, 1}


def test_votes_for_selected_values_alone(ops: Ops) -> None:
    gradients = [np.zeros(2000, np.float32) for _ in range(3)]
    for mine, value in zip(gradients, (1.0, 2.0, -3.0), strict=True):
        mine[10] = value
    gradients[2][20] = -1
    result = vote(ops, TopK(0.001, dense_below=0) >> Sign(), gradients)[0]
    assert result[10] == 1
    assert result[20] == -1
    assert np.count_nonzero(result) == 2
