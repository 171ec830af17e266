"""Memories: conservation with every method, the papers' formulas, skipped steps, saving, workers that come and go."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy
from methods import MEMORIES, METHODS, WAYS, Run, corrected, state_of, with_options
from simulated_cluster import Cluster, MemoryTransport
from steps import engines_of, step

from hvd_gradcomp.compressors import (
    DGC,
    Chain,
    Compressor,
    CountSketch,
    Int8,
    PowerSGD,
    RandomK,
    Sparsifier,
    TopK,
    compression_from_spec,
)
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import (
    ErrorFeedback,
    Momentum,
    MomentumCorrection,
    NoMemory,
    mean_residuals,
    residuals_from,
)
from hvd_gradcomp.ops import backend

FEEDBACKS = [memory for memory in MEMORIES if "residual" in memory.parts]
NUMPY, TORCH = backend("numpy"), backend("torch")
each_way = pytest.mark.parametrize("method", WAYS, ids=str)


@pytest.mark.parametrize(
    ("ops", "memory", "method"),
    [(NUMPY, memory, method) for memory in FEEDBACKS for method in METHODS]
    + [(TORCH, MomentumCorrection(), method) for method in METHODS],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_conservation(ops, method, memory):
    """What a memory hands to the compressor either arrives, or is kept as the residual; in every step, for the sum."""
    run = Run(ops, with_options(method, memory=memory), bucket_bytes=1000)
    for _ in range(4):
        run.assert_conserved(run.step())
    assert all("residual" in parts for state in run.after for parts in state.values()) or method.meets == "own"


@each_way
@pytest.mark.parametrize("memory", [memory for memory in MEMORIES if memory.is_momentum], ids=str)
def test_parts_move_as_the_papers_say(method, memory):
    """Velocities and averages follow their formula, and are cleared where values were sent if there is masking."""
    run = Run(NUMPY, with_options(method, memory=memory), workers=2)
    for _ in range(3):
        run.step()
        for worker in range(2):
            for each in run.parameters:
                before, after = run.before[worker].get(each.name, {}), run.after[worker].get(each.name, {})
                expected = corrected(memory, run.used[worker][each.name], before, 2)
                assert set(after) <= {*memory.parts, "factor"}
                for part in set(memory.parts) - {"residual"}:
                    moved = after[part]
                    kept = moved != 0
                    tolerance = 1e-5 * np.abs(expected[part]).max()
                    np.testing.assert_allclose(moved[kept], expected[part][kept], rtol=1e-5, atol=tolerance)
                    sent = "residual" in after and np.abs(after["residual"] - expected["x"]) > tolerance
                    # Where every element is sent, nothing is held back and nothing is masked.
                    masks = memory.masks and _selects(run.compressor) and not np.all(sent)
                    if masks:
                        # A value that was selected may still have been rounded to zero.
                        tiny = np.abs(expected["x"]) <= np.abs(expected["x"]).max() / 200
                        np.testing.assert_array_equal(~kept | tiny, sent | tiny)
                    else:
                        assert kept.all()


def _selects(method: Compressor) -> bool:
    return isinstance(method, (Chain, Sparsifier, CountSketch))


def test_momentum_correction_is_the_paper_s_algorithm():
    """Algorithm 4 of the paper (momentum correction and factor masking), written as it stands there."""
    rng = np.random.default_rng(0)
    memory, ratio, size = MomentumCorrection(momentum=0.9), 0.05, 400
    run = Run(backend("numpy"), TopK(ratio=ratio, memory=memory, dense_below=0), 2, [(size,)])
    u, v = np.zeros((2, size), np.float32), np.zeros((2, size), np.float32)
    for _ in range(10):
        gradients = rng.standard_normal((2, size)).astype(np.float32)
        total = np.zeros(size, np.float32)
        for worker in range(2):
            u[worker] = np.float32(0.9) * u[worker] + gradients[worker]
            v[worker] = v[worker] + u[worker]
            threshold = np.sort(np.abs(v[worker]))[-int(np.ceil(ratio * size))]
            mask = np.abs(v[worker]) >= threshold
            total += v[worker] * mask
            v[worker] *= ~mask
            u[worker] *= ~mask
        results = run.step([{"p0": gradients[worker]} for worker in range(2)])
        np.testing.assert_allclose(results["p0"], total / 2, rtol=1e-5, atol=1e-6)
        for worker in range(2):
            np.testing.assert_allclose(run.after[worker]["p0"]["velocity"], u[worker], rtol=1e-5, atol=1e-6)


def test_momentum_correction_without_holding_back_is_momentum_sgd(ops):
    run = Run(ops, TopK(ratio=1.0, memory=MomentumCorrection(momentum=0.9), dense_below=0), 2, [(50,)])
    velocity = np.zeros(50)
    for _ in range(5):
        result = run.step()["p0"]
        velocity = 0.9 * velocity + np.mean([gradients["p0"] for gradients in run.used], 0)
        np.testing.assert_allclose(result, velocity, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory", FEEDBACKS, ids=str)
def test_conservation_over_dense_fallback(ops, memory):
    """Everything that was owed arrives, and the velocity goes on as in plain momentum SGD."""
    run = Run(ops, TopK(ratio=0.1, memory=memory, dense_below=0), 3)
    run.assert_conserved(run.step())
    run.compressor = TopK(ratio=0.9, memory=memory, dense_below=0)
    for engine in run.engines:
        engine.compressor = run.compressor
    for _ in range(2):
        run.assert_conserved(run.step())
        assert run.engines[0].counters.total.fallbacks > 0
        for state in run.after:
            assert all(set(parts) <= {"velocity"} for parts in state.values())
            assert all((x != 0).all() for parts in state.values() for x in parts.values())


def test_a_single_exchange_has_no_memory():
    """As in hvd.allreduce: an average of gradients to come would be a tenth of this one."""
    for method in (TopK(memory=Momentum()), TopK(memory=MomentumCorrection(clip=1.0)) >> Int8(), PowerSGD()):
        assert method.without_memory().memory == NoMemory()
        assert str(with_options(method, memory=NoMemory())) == str(method.without_memory())


def test_small_tensors_get_momentum_too_and_travel_whole(ops):
    """An optimizer without momentum of its own must not leave biases without any."""
    for method in (DGC(), RandomK(memory=MomentumCorrection()), PowerSGD(memory=MomentumCorrection())):
        assert method.takes(1)
        run = Run(ops, method, 2, [(10,), (2000,)])
        velocity = np.zeros(10)
        for _ in range(3):
            result = run.step()["p0"]
            velocity = 0.9 * velocity + np.mean([gradients["p0"] for gradients in run.used], 0)
            np.testing.assert_allclose(result, velocity, rtol=1e-5, atol=1e-5)
    assert not TopK().takes(1023)
    assert TopK().takes(1024)


def test_clipping_bounds_each_worker_s_gradient(ops):
    memory = MomentumCorrection(momentum=0.0, clip=2.0)
    for scale in (1e-3, 1.0, 1e30, 0.0):
        g = np.random.default_rng(1).standard_normal(300).astype(np.float32) * np.float32(scale)
        x, _ = memory.correct(ops, array_of(ops, g), {}, 4)
        norm = np.linalg.norm(g.astype(np.float64))
        np.testing.assert_allclose(as_numpy(x), g * min(1.0, 1.0 / max(norm, 1e-30)), rtol=1e-5)


@each_way
@pytest.mark.parametrize(("memory", "poison"), [(ErrorFeedback(), np.inf), (MomentumCorrection(), np.nan)], ids=str)
def test_skipped_steps_leave_all_state_untouched(ops, method, memory, poison):
    run = Run(ops, with_options(method, memory=memory), 3)
    for _ in range(2):
        run.step()
    gradients = run.gradients()
    gradients[1]["p2"].reshape(-1)[17] = poison
    results = run.step(gradients)
    assert all(np.isnan(x).all() for x in results.values())
    for before, after in zip(run.before, run.after, strict=True):
        assert before.keys() == after.keys()
        for name, parts in before.items():
            assert {part: x.tobytes() for part, x in parts.items()} == {
                part: x.tobytes() for part, x in after[name].items()
            }
    assert all(np.isfinite(x).all() for x in run.step().values())


@each_way
@pytest.mark.parametrize("workers", [1, 5])
def test_state_saved_as_a_mean_serves_any_number_of_workers(ops, method, workers):
    memory = MomentumCorrection()
    run = Run(ops, with_options(method, memory=memory), 3)
    for _ in range(3):
        run.step()
    sizes = {each.name: each.size for each in run.parameters}
    totals = {
        name: {
            part: array_of(ops, np.sum([state[name].get(part, np.zeros(size, np.float32)) for state in run.after], 0))
            for part in memory.parts
        }
        for name, size in sizes.items()
    }
    shared = {
        name: {part: array_of(ops, x) for part, x in parts.items() if part not in memory.parts}
        for name, parts in run.after[0].items()
    }
    saved = mean_residuals(ops, totals, 3, shared=shared, step=run.engines[0].step)
    new = Run(ops, run.compressor, workers)
    for engine in new.engines:
        state, number = residuals_from(saved, sizes)
        engine.load_state({n: {p: ops.copy(x) for p, x in parts.items()} for n, parts in state.items()}, number)
        assert engine.step == 3
        for name in sizes:
            for part in memory.parts:
                mean = np.mean([state[name].get(part, np.zeros(sizes[name])) for state in run.after], 0)
                np.testing.assert_allclose(as_numpy(engine.state[name][part]), mean, rtol=1e-5, atol=1e-6)
            for part in shared.get(name, {}):
                np.testing.assert_array_equal(state_of(engine)[name][part], run.after[0][name][part])
    for _ in range(2):
        new.assert_conserved(new.step())
    assert new.engines[0].step == 5


@each_way
def test_workers_may_come_and_go_without_what_the_others_keep(ops, method):
    """Two workers go on, a third is new: it knows neither residuals, factors nor the step, and all agree again."""
    old = Run(ops, method, 2)
    for _ in range(3):
        old.step()
    cluster = Cluster(3)
    new = Run(ops, method, 3)
    new.cluster = cluster
    new.engines = old.engines + engines_of(cluster, method, new.parameters)[2:]
    for rank, engine in enumerate(new.engines):
        engine.transport = MemoryTransport(cluster, rank)
    for _ in range(3):
        new.assert_conserved(new.step())
    assert {engine.step for engine in new.engines} == {6}


@pytest.mark.parametrize(
    "method",
    [each for each in METHODS if isinstance(each, CountSketch) or (each.draws and each.meets == "sum")],
    ids=str,
)
def test_values_drawn_for_different_steps_are_never_added(ops, method):
    run = Run(ops, method, 3)
    run.step()
    run.engines[1].load_state(run.engines[1].state, 7)
    outcomes = run.cluster.outcomes(
        lambda transport: (
            [
                run.engines[transport.rank].submit(name, array_of(ops, g))
                for name, g in run.gradients()[transport.rank].items()
            ]
            and run.engines[transport.rank].finish()
        )
    )
    assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes)
    assert "same saved state" in str(outcomes[0])


def test_state_of_another_model_is_refused(ops):
    total = {"a": {part: array_of(ops, np.ones(3, np.float32)) for part in ("residual", "velocity")}}
    saved = mean_residuals(ops, total, 2, step=4)
    state, number = residuals_from(saved, {"a": 3, "b": 2})
    assert number == 4
    assert {part: as_numpy(x).tolist() for part, x in state["a"].items()} == {
        "residual": [0.5] * 3,
        "velocity": [0.5] * 3,
    }
    assert residuals_from(saved, {"b": 2})[0] == {}
    with pytest.raises(ConfigurationError, match="residual saved for 'a' has 3 elements, the parameter has 4"):
        residuals_from(saved, {"a": 4})
    with pytest.raises(ConfigurationError, match="format 'something'"):
        residuals_from({"format": "something"}, {})


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_specs_name_memories(memory):
    for method in METHODS:
        compressor = with_options(method, memory=memory)
        assert compression_from_spec(str(compressor)) == compressor
        assert compression_from_spec(str(compressor)).memory == memory


def test_specs_as_users_write_them():
    assert compression_from_spec("topk(memory=ef(decay=0.9))").memory == ErrorFeedback(decay=0.9)
    assert compression_from_spec("topk(memory=dgc(momentum=0.8))").memory == MomentumCorrection(momentum=0.8)
    assert compression_from_spec("int8(memory=none)").memory == NoMemory()
    assert compression_from_spec("int8(memory=momentum)") == Int8(memory=Momentum())
    assert str(TopK(memory=ErrorFeedback(decay=0.9))) == "topk(memory=ef(decay=0.9))"
    assert str(DGC(warmup_steps=10)) == "dgc(warmup_steps=10)"


@pytest.mark.parametrize(
    ("memory", "options", "message"),
    [
        (ErrorFeedback, {"decay": 0}, "decay must be a number with 0 < decay <= 1, got 0"),
        (ErrorFeedback, {"decay": "1"}, "decay must be a number with 0 < decay <= 1, got '1'"),
        (ErrorFeedback, {"decay": True}, "decay must be a number"),
        (MomentumCorrection, {"momentum": 1.0}, "momentum must be a number with 0 <= momentum < 1, got 1.0"),
        (MomentumCorrection, {"clip": -1}, "clip must be a number with clip > 0"),
        (MomentumCorrection, {"nesterov": 1}, "nesterov must be True or False, got 1"),
        (Momentum, {"beta": float("nan")}, "beta must be a number with 0 <= beta < 1, got nan"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(memory, options, message):
    with pytest.raises(ConfigurationError, match=message):
        memory(**options)


def test_decay_forgets_and_no_decay_never_does(ops):
    """A gradient that comes once, at full and at half feedback: what is still owed after three steps of zeros."""
    for decay, owed in ((1.0, 1.0), (0.5, 0.125)):
        run = Run(ops, TopK(ratio=0.01, memory=ErrorFeedback(decay=decay), dense_below=0), 1, [(100,)])
        first = np.full(100, 1.0, np.float32)
        run.step([{"p0": first}])
        for _ in range(3):
            run.step([{"p0": np.zeros(100, np.float32)}])
        assert run.after[0]["p0"]["residual"].max() == owed


def test_parameters_that_take_another_way_keep_their_state(ops):
    """Gradients of parameters that take another way in this step leave the state of the others alone."""
    run = Run(ops, TopK(ratio=0.1, dense_below=0), 2, [(30,), (20,)])
    run.step()
    gradients = [{"p0": x["p0"], "p1": None} for x in run.gradients()]
    results = step(run.cluster, run.engines, ops, gradients)
    assert list(results[0]) == ["p0"]
    for before, engine in zip(run.after, run.engines, strict=True):
        assert state_of(engine)["p1"]["residual"].tobytes() == before["p1"]["residual"].tobytes()
