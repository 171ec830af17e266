"""PowerSGD: the algorithm of the paper, exactness at low rank, warm start, and workers that begin differently."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy, gradient
from methods import Run

from hvd_gradcomp.collectives import Allreduce
from hvd_gradcomp.compressors import PowerSGD, compression_from_spec
from hvd_gradcomp.compressors.marks import MARKS
from hvd_gradcomp.compressors.powersgd import next_start, orthonormal_rows
from hvd_gradcomp.errors import ConfigurationError, UnsupportedError
from hvd_gradcomp.feedback import NoMemory
from hvd_gradcomp.ops import backend


def low_rank(rank: int, rows: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))).astype(np.float32)


def relative(error: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(error.astype(np.float64)) / np.linalg.norm(x.astype(np.float64)))


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_matrices_of_the_rank_are_sent_exactly_in_one_step(ops, rank, scale):
    """Whatever the first Q, the range of M Q is that of M, and the projection onto it leaves M as it is."""
    run = Run(ops, PowerSGD(rank=rank, dense_below=0), 1, [(30, 20)])
    x = low_rank(rank, 30, 20, seed=rank) * np.float32(scale)
    assert relative(run.step([{"p0": x}])["p0"] - x.reshape(-1), x) < 1e-4
    # Of a matrix of lower rank as well: further columns are noise, and count for nothing.
    x = low_rank(1, 30, 20, seed=9) * np.float32(scale)
    run = Run(ops, PowerSGD(rank=rank, dense_below=0), 1, [(30, 20)])
    assert relative(run.step([{"p0": x}])["p0"] - x.reshape(-1), x) < 1e-4
    assert not run.step([{"p0": np.zeros_like(x)}])["p0"].any() or relative(run.after[0]["p0"]["residual"], x) < 1e-4


def test_one_step_is_that_of_the_paper(ops):
    """Algorithm 1 (with the workers' sums, as allreduced) in numpy, from the same Q; two steps with error feedback."""
    run = Run(ops, PowerSGD(rank=3, dense_below=0), 2, [(16, 4, 5)])
    errors = [np.zeros((16, 20)) for _ in range(2)]
    run.step()
    errors = [after["p0"]["residual"].reshape(16, 20).astype(np.float64) for after in run.after]
    for _ in range(2):
        q = run.after[0]["p0"]["factor"].reshape(3, 20).T.astype(np.float64)
        result = run.step()["p0"].reshape(16, 20)
        matrices = [g["p0"].reshape(16, 20) + e for g, e in zip(run.used, errors, strict=True)]
        p, _ = np.linalg.qr(sum(m @ q for m in matrices))
        q_sum = sum(m.T @ p for m in matrices)
        np.testing.assert_allclose(result, p @ q_sum.T / 2, atol=1e-4)
        errors = [m - p @ (m.T @ p).T for m in matrices]
        for after, error in zip(run.after, errors, strict=True):
            np.testing.assert_allclose(after["p0"]["residual"].reshape(16, 20), error, atol=1e-4)


def test_warm_start_finds_the_leading_directions(ops):
    """The same gradient again and again without feedback: the result comes close to the best of its rank."""
    rng = np.random.default_rng(5)
    left, _ = np.linalg.qr(rng.standard_normal((40, 40)))
    right, _ = np.linalg.qr(rng.standard_normal((40, 40)))
    values = 0.8 ** np.arange(40)
    x = (left * values @ right.T).astype(np.float32)
    best = np.linalg.norm(values[4:])
    errors = {}
    for warm in (True, False):
        run = Run(ops, PowerSGD(rank=4, warm_start=warm, memory=NoMemory(), dense_below=0), 1, [(40, 40)])
        errors[warm] = [float(np.linalg.norm(run.step([{"p0": x}])["p0"] - x.reshape(-1))) for _ in range(25)]
    assert errors[True][-1] <= best * 1.02
    assert min(errors[False]) >= best * 1.05
    # A projection never makes more of a matrix than it is.
    assert all(error <= np.linalg.norm(x) * (1 + 1e-5) for each in errors.values() for error in each)


def test_error_feedback_delivers_everything_in_time(ops):
    """A constant gradient: the mean of what arrives approaches it, as the residual stays bounded."""
    x = gradient("normal", (20, 30), 3)
    run = Run(ops, PowerSGD(rank=2, dense_below=0), 2, [(20, 30)])
    arrived = sum(run.step([{"p0": x}, {"p0": x}])["p0"].astype(np.float64) for _ in range(60)) / 60
    assert relative(arrived - x.reshape(-1), x) < 0.2


def test_what_travels(ops):
    """Both factors of all matrices in two allreduces; vectors and what would not shrink beside the first."""
    shapes = [(40, 30), (7,), (), (64, 2, 16), (3, 3)]
    run = Run(ops, PowerSGD(rank=2, dense_below=0), 3, shapes)
    results = run.step()
    first, second = (sent.request for sent in run.cluster.sent[0] if "settings" not in sent.name)
    assert isinstance(first, Allreduce)
    whole = 7 + 1 + 9
    assert len(first.values) == MARKS + whole + 2 * (40 + 64)
    assert len(second.values) == 2 * (30 + 32)
    assert run.engines[0].counters.total.sent_bytes == 4 * (len(first.values) + len(second.values))
    for name in ("p1", "p2", "p4"):
        mean = np.mean([gradients[name].reshape(-1) for gradients in run.used], 0)
        np.testing.assert_allclose(results[name], mean, rtol=1e-5, atol=1e-6)
        assert name not in run.after[0]
    assert run.compressor.expected_bytes(10_000) == 4 * 2 * 200


def test_small_matrices_travel_whole():
    run = Run(backend("numpy"), PowerSGD(rank=1), 1, [(20, 30)])
    run.step()
    assert [len(sent.request.values) for sent in run.cluster.sent[0] if "settings" not in sent.name] == [MARKS + 600]


@pytest.mark.parametrize("lost", [[1], [0, 2]])
def test_workers_that_begin_with_other_factors_begin_again_together(ops, lost):
    """One allreduce more, in which nothing is lost: a worker that restored no factor must not spoil the sum."""
    run = Run(ops, PowerSGD(rank=2, dense_below=0), 3, [(20, 30), (30, 30)])
    for _ in range(2):
        run.step()
    for rank in lost:
        for parts in run.engines[rank].state.values():
            parts.pop("factor")
    results = run.step()
    run.assert_conserved(results)
    names = [sent.name for sent in run.cluster.sent[0]]
    assert names == ["p1", "p1.1", "p1.2"]
    run.assert_conserved(run.step())
    assert [sent.name for sent in run.cluster.sent[0]] == ["p1", "p1.1"]


def test_another_rank_begins_anew(ops):
    run = Run(ops, PowerSGD(rank=2, dense_below=0), 2, [(20, 30)])
    run.step()
    run.compressor = PowerSGD(rank=3, dense_below=0)
    for engine in run.engines:
        engine.compressor = run.compressor
    run.assert_conserved(run.step())
    assert run.after[0]["p0"]["factor"].shape == (90,)


@pytest.mark.parametrize("kind", ["normal", "all zeros", "ties", "wild", "1e30", "sparse", "subnormals"])
def test_backends_agree_to_rounding(kind):
    shapes = [(20, 30), (50,)]
    found = {}
    for name in ("numpy", "torch"):
        run = Run(backend(name), PowerSGD(rank=2, dense_below=0), 2, shapes)
        found[name] = run.step(run.gradients(kind))
    for name, x in found["numpy"].items():
        np.testing.assert_allclose(found["torch"][name], x, rtol=1e-3, atol=1e-4 * np.abs(x).max())


@pytest.mark.parametrize("kind", ["normal", "all zeros", "wild", "1e30", "dependent"])
def test_orthonormal_rows(ops, kind):
    rows = gradient("normal" if kind == "dependent" else kind, (4, 50), 2)
    if kind == "dependent":
        rows[1] = rows[0] * np.float32(3)
        rows[3] = rows[0] - rows[2]
    basis = as_numpy(orthonormal_rows(ops, array_of(ops, rows.reshape(-1)), 50)).reshape(4, 50).astype(np.float64)
    products = basis @ basis.T
    np.testing.assert_allclose(products, np.diag(np.round(np.diag(products))), atol=1e-5)
    if kind in ("normal", "1e30"):
        np.testing.assert_allclose(np.diag(products), 1, atol=1e-5)
        np.testing.assert_allclose(rows @ basis.T @ basis, rows, rtol=1e-3, atol=1e-4 * np.abs(rows).max())
    if kind == "all zeros":
        assert not basis.any()


def test_next_start_keeps_a_direction_for_every_row(ops):
    total = np.array([2e-30, -4e-30, 0, 0], np.float32)
    last = np.array([1, 1, 0.5, -1], np.float32)
    found = as_numpy(next_start(ops, array_of(ops, total), array_of(ops, last), 2))
    np.testing.assert_allclose(found, [0.5, -1, 0.5, -1])


def test_unknown_shapes_become_as_square_as_possible(ops):
    run = Run(ops, PowerSGD(rank=1, dense_below=0, granularity="bucket"), 2, [(100,), (11, 2)])
    run.assert_conserved(run.step())
    first, second = (sent.request for sent in run.cluster.sent[0] if "settings" not in sent.name)
    # 122 elements: 12 rows of 11.
    assert len(first.values) == MARKS + 12
    assert len(second.values) == 11


def test_it_has_no_meaning_outside_a_job():
    with pytest.raises(UnsupportedError, match="horovodrun"):
        PowerSGD().compress(np.ones((4, 4), np.float32))


def test_settings():
    assert compression_from_spec("powersgd(rank=2, warm_start=False)") == PowerSGD(rank=2, warm_start=False)
    for options, message in (({"rank": 0}, "rank must be an integer >= 1, got 0"), ({"seed": "a"}, "integer, got 'a'")):
        with pytest.raises(ConfigurationError, match=message):
            PowerSGD(**options)


def test_different_seeds_cannot_meet(ops):
    """Nothing compares seeds in a sum but the marks beside it; the settings catch it first in a whole job."""
    run = Run(ops, PowerSGD(warm_start=False, dense_below=0, rank=1), 2, [(30, 30)])
    run.step()
    run.engines[1].compressor = PowerSGD(warm_start=False, dense_below=0, rank=1, seed=5)
    outcomes = run.cluster.outcomes(
        lambda transport: (
            run.engines[transport.rank].submit("p0", array_of(ops, run.gradients()[transport.rank]["p0"]))
            or run.engines[transport.rank].finish()
        )
    )
    assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes)
