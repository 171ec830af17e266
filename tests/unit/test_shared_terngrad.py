"""TernGrad with shared scales: what travels, unbiasedness, and the same sums on every worker."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from arrays import kinds, seeds, shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import Run

from hvd_gradcomp.collectives import Allgather, Allreduce, Alltoall, Request
from hvd_gradcomp.compressors import SharedTernGrad, compression_from_spec
from hvd_gradcomp.errors import ConfigurationError, PayloadError
from hvd_gradcomp.feedback import ErrorFeedback
from hvd_gradcomp.ops import backend


@settings(max_examples=20)
@given(kind=kinds, seed=seeds, shapes=st.lists(shapes, min_size=1, max_size=3), workers=st.integers(1, 5))
def test_results_are_whole_multiples_of_the_shared_scale(ops, kind, seed, shapes, workers):
    """Sums of ternary levels times one number for each tensor, the same bits everywhere (which `Run` asserts)."""
    run = Run(ops, SharedTernGrad(dense_below=0, seed=seed % 1000), workers, shapes)
    results = run.step(run.gradients(kind))
    scales = next(each.request.values for each in run.cluster.sent[0] if isinstance(each.request, Allreduce))
    assert len(scales) == len(shapes)
    for name, result in results.items():
        own = max(np.abs(gradients[name]).max() for gradients in run.used)
        steps = np.abs(result[result != 0]).astype(np.float64) * workers
        assert (steps <= workers * own * (1 + 1e-6)).all()
        if len(steps):
            multiples = steps / steps.min()
            # Levels are whole: every magnitude is a fraction k / m of any other, with k and m up to the worker count.
            assert all(any(abs(x * m - round(x * m)) < 1e-3 for m in range(1, workers + 1)) for x in multiples)


def test_mean_over_many_steps_is_the_mean_gradient():
    """Within 6 standard deviations of the mean of 1000 draws, each of variance at most s |x|."""
    run = Run(backend("numpy"), SharedTernGrad(clip=None, dense_below=0), 3, [(40,)])
    gradients = run.gradients()
    times = 1000
    total = sum(run.step([{"p0": g["p0"].copy()} for g in gradients])["p0"].astype(np.float64) for _ in range(times))
    scale = max(np.abs(g["p0"]).max() for g in gradients)
    variance = sum(scale * np.abs(g["p0"]) - g["p0"].astype(np.float64) ** 2 for g in gradients) / 9
    mean = np.mean([g["p0"].astype(np.float64) for g in gradients], 0)
    assert (np.abs(total / times - mean) <= 6 * np.sqrt(variance / times) + 1e-6).all()


def test_what_travels(ops):
    run = Run(ops, SharedTernGrad(), 4, [(1001,), (2000,)])
    run.step()
    scales, trits, sums = (each.request for each in run.cluster.sent[1] if "settings" not in each.name)
    assert isinstance(scales, Allreduce)
    assert scales.op == "max"
    assert len(scales.values) == 2
    assert isinstance(trits, Alltoall)
    assert len(trits.payload) == sum(math.ceil(length / 5) for length in (750, 750, 750, 751))
    assert isinstance(sums, Allgather)
    assert len(sums.payload) == math.ceil(750 * 4 / 8)


def test_clipping_is_each_worker_s_own(ops):
    """An outlier at one worker: cut there at 2.5 sigma, and fed back if there is a memory for it."""
    run = Run(ops, SharedTernGrad(memory=ErrorFeedback(), dense_below=0), 2, [(400,)])
    gradients = [{"p0": np.ones(400, np.float32)} for _ in range(2)]
    gradients[0]["p0"][7] = 1000
    results = run.step(gradients)
    assert np.abs(results["p0"]).max() <= 2.5 * math.sqrt((1000**2 + 399) / 400)
    assert run.after[0]["p0"]["residual"][7] > 800
    run.assert_conserved(results)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_not_finite(ops, poison):
    run = Run(ops, SharedTernGrad(memory=ErrorFeedback(), dense_below=0), 3, [(50,)])
    run.step()
    gradients = run.gradients()
    gradients[2]["p0"][0] = poison
    assert np.isnan(run.step(gradients)["p0"]).all()
    for before, after in zip(run.before, run.after, strict=True):
        assert before["p0"]["residual"].tobytes() == after["p0"]["residual"].tobytes()


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Alltoall, "rank 13 sent corrupt levels"), (Allgather, "rank 13 sent a sum that 3 workers cannot have")],
)
def test_bytes_that_nobody_sends_name_their_rank(ops, kind, message):
    run = Run(ops, SharedTernGrad(dense_below=0), 3, [(50,)])

    def tamper(rank: int, name: str, request: Request) -> Request:
        # 255 is neither five trits nor any sum of three workers' levels.
        changed = rank == 13 and isinstance(request, kind) and "settings" not in name
        return replace(request, payload=request.payload * 0 + 255) if changed else request

    run.cluster.tamper = tamper
    with pytest.raises(PayloadError, match=message):
        run.step()


def test_settings():
    assert compression_from_spec("terngrad-shared(clip=3.0)") == SharedTernGrad(clip=3.0)
    with pytest.raises(ConfigurationError, match="clip must be"):
        SharedTernGrad(clip=0.5)
