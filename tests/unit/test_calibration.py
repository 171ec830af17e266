"""Scales of quantization: of each step, moving, or every so many steps; clipped by a percentile; nothing lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import array_of, as_numpy
from simulated_cluster import Cluster
from steps import engines_of, parameters_of, residuals_of, step

from hvd_gradcomp.compressors import Calibrated, Context, Linear, TopK
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import backend
from hvd_gradcomp.wire.parts import Reader


def scales_of(code: Calibrated, maxima: list[float], ops: Any) -> list[float]:
    """The largest decoded magnitude of vectors whose largest magnitudes are `maxima`, then of a huge vector's."""
    found, state = [], {}
    for largest in maxima:
        context = Context(state=state)
        _, decoded = code.encode_values(ops, array_of(ops, np.array([largest, -0.1], np.float32)), context)
        state = context.kept or state
        found.append(round(float(np.abs(as_numpy(decoded)).max()), 4))
    return found


def test_each_step_is_linear_with_one_block(ops: Any) -> None:
    values = array_of(ops, np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    for bits in (3, 8):
        one, _ = Calibrated(bits=bits).encode_values(ops, ops.copy(values), Context())
        other, _ = Linear(bits=bits, block=None).encode_values(ops, ops.copy(values), Context())
        assert np.array_equal(as_numpy(one), as_numpy(other))


def test_a_moving_scale(ops: Any) -> None:
    """0.5 * old + 0.5 * new: 4, 6, 3.5, 2.25; values above it are clipped."""
    assert scales_of(Calibrated(decay=0.5), [4, 8, 1, 100], ops) == [4, 6, pytest.approx(1, abs=0.02), 51.75]


def test_a_scale_made_every_three_steps(ops: Any) -> None:
    """4 until the mean of 4, 9 and 5 takes its place, and that until the mean of 6, 20 and 7 does."""
    found = scales_of(Calibrated(every=3), [4, 9, 5, 6, 20, 7, 50], ops)
    assert found == [4, 4, 4, 6, 6, 6, 11]


def test_a_percentile_keeps_outliers_from_making_the_step_coarse(ops: Any) -> None:
    values = np.linspace(-1, 1, 1001).astype(np.float32)
    values[500] = 1000
    for percentile, scale in ((100, 1000), (99.9, 1), (50, 0.5)):
        x = array_of(ops, values.copy())
        frame, residual = Calibrated(percentile=percentile).encode(ops, x, Context())
        decoded = as_numpy(Calibrated().decode_add(ops, Reader(ops, frame), array_of(ops, np.zeros(1001, np.float32))))
        assert np.abs(decoded).max() == pytest.approx(scale, rel=0.01)
        np.testing.assert_allclose(decoded + as_numpy(residual), values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("code", [Calibrated(decay=0.9), Calibrated(bits=4, every=3, percentile=99)], ids=str)
@pytest.mark.parametrize("sparse", [False, True], ids=["alone", "behind topk"])
def test_in_the_engine_scales_last_and_nothing_is_lost(code: Calibrated, sparse: bool) -> None:
    numpy_ops = backend("numpy")
    compressor = TopK(0.1, dense_below=0) >> code if sparse else code
    cluster, parameters = Cluster(2), parameters_of([(3000,), (40, 50)])
    engines = engines_of(cluster, compressor, parameters)
    given, got = ({each.name: np.zeros(each.size) for each in parameters} for _ in range(2))
    for number in range(6):
        random = np.random.default_rng(number)
        gradients = [{each.name: random.standard_normal(each.size).astype(np.float32) for each in parameters}] * 2
        before = [np.array(engine.state.get("p0", {}).get("calibration", [0, 0, 0])) for engine in engines]
        results = step(cluster, engines, numpy_ops, gradients)
        assert all(not np.array_equal(engine.state["p0"]["calibration"], before[i]) for i, engine in enumerate(engines))
        for name in given:
            given[name] += 2.0 * gradients[0][name]
            got[name] += 2.0 * results[0][name]
    for name in given:
        left = sum(residuals_of(engine)[name] for engine in engines)
        np.testing.assert_allclose(got[name] + left, given[name], atol=1e-4)


def test_an_empty_selection_leaves_the_scale_as_it_is(ops: Any) -> None:
    context = Context()
    Calibrated(decay=0.5).encode_values(ops, array_of(ops, np.array([4], np.float32)), context)
    empty = Context(state=context.kept)
    _, decoded = Calibrated(decay=0.5).encode_values(ops, array_of(ops, np.zeros(0, np.float32)), empty)
    assert len(decoded) == 0
    assert as_numpy(empty.kept["calibration"])[0] == 4


def test_a_scale_that_lasts_needs_whole_tensors() -> None:
    for code in (
        Calibrated(decay=0.5, collective="scatter_reduce"),
        TopK(collective="hierarchical") >> Calibrated(every=9),
    ):
        with pytest.raises(ConfigurationError, match="belongs to a whole tensor"):
            engines_of(Cluster(2), code, parameters_of([(3000,)]))


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 1},
        {"bits": 9},
        {"percentile": 0},
        {"percentile": 101},
        {"decay": 1},
        {"every": 0},
        {"decay": 0.5, "every": 2},
    ],
)
def test_what_has_no_meaning_is_refused(options: dict) -> None:
    with pytest.raises(ConfigurationError):
        Calibrated(**options)
