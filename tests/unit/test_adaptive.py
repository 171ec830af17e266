"""Policies in the engine: measured gains, equal decisions, nothing lost, states that outlive a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from arrays import array_of, as_numpy
from simulated_cluster import Cluster
from steps import engines_of, parameters_of, residuals_of, step

from hvd_gradcomp.compressors import (
    Accordion,
    Adaptive,
    Compressor,
    GraVAC,
    Int8,
    NoCompression,
    PowerSGD,
    Rule,
    Rules,
    Scheduled,
    Sign,
    Threshold,
    TopK,
    TopKInt8,
    compression_from_spec,
)
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import NoMemory, mean_residuals, policy_from, residuals_from
from hvd_gradcomp.ops import Ops, backend
from hvd_gradcomp.policy import Exponential, Observed, Piecewise

SHAPES = [(40, 50), (3000,)]
Draw = Callable[[np.random.Generator, int], np.ndarray]
GRAVAC = "throughput=bytes, theta_min=4, theta_max=64, window=4"


@pytest.fixture
def numpy_ops() -> Ops:
    return backend("numpy")


class Run:
    """A simulated job that remembers what was given and what came out, and the factor of every step."""

    def __init__(self, compressor: Compressor, ops: Any, workers: int = 2, shapes: Sequence[tuple[int, ...]] = SHAPES):
        self.ops = ops
        self.cluster = Cluster(workers)
        self.parameters = parameters_of(shapes)
        self.engines = engines_of(self.cluster, compressor, self.parameters)
        self.given = {each.name: np.zeros(each.size) for each in self.parameters}
        self.got = {each.name: np.zeros(each.size) for each in self.parameters}
        self.factors: list[float] = []
        self.results: dict[str, np.ndarray] = {}

    def go(self, steps: int, draw: Draw | None = None, seed: int = 0) -> Run:
        for number in range(steps):
            random = np.random.default_rng([seed, number])
            gradients = [
                {each.name: (draw or heavy)(random, each.size).astype(np.float32) for each in self.parameters}
                for _ in self.engines
            ]
            self.factors.append(self.factor)
            results = step(self.cluster, self.engines, self.ops, gradients)
            for each in self.parameters:
                self.given[each.name] += sum(mine[each.name].astype(np.float64) for mine in gradients)
                self.got[each.name] += results[0][each.name].astype(np.float64) * len(self.engines)
                assert all(np.array_equal(result[each.name], results[0][each.name]) for result in results)
            assert len({engine.adaptation.state for engine in self.engines}) == 1, "workers decided differently"
            self.results = results[0]
        return self

    @property
    def factor(self) -> float:
        adaptation = self.engines[0].adaptation
        policy = adaptation.compressor.adapts
        assert policy is not None
        ratio = policy.ratio(adaptation.state, self.engines[0].step)
        return 1.0 if ratio is None else round(1 / ratio, 6)

    def assert_nothing_lost(self) -> None:
        for each in self.parameters:
            left = sum(residuals_of(engine)[each.name].astype(np.float64) for engine in self.engines)
            scale = np.abs(self.given[each.name]).max()
            np.testing.assert_allclose(self.got[each.name] + left, self.given[each.name], atol=1e-5 * scale)


def heavy(random: np.random.Generator, size: int) -> np.ndarray:
    """Few large values: compression costs little."""
    return random.standard_normal(size) ** 5


def very_heavy(random: np.random.Generator, size: int) -> np.ndarray:
    return random.standard_normal(size) ** 15


def changes(factors: Sequence[float]) -> list[float]:
    """The factors without repetitions."""
    return [each for place, each in enumerate(factors) if place == 0 or factors[place - 1] != each]


def even(random: np.random.Generator, size: int) -> np.ndarray:
    """All values alike: compression by a factor leaves that fraction."""
    return 1e6 + random.standard_normal(size)


@pytest.mark.parametrize(
    "spec",
    [
        f"gravac(topk >> int8, epsilon=0.3, {GRAVAC})",
        f"gravac(topk(granularity=model), epsilon=0.3, {GRAVAC})",
        f"gravac(dgc >> fp16, epsilon=0.3, {GRAVAC})",
        f"gravac(randomk, epsilon=0.05, {GRAVAC})",
        f"gravac(sketch, epsilon=0.05, {GRAVAC})",
        f"gravac(int8, epsilon=0.5, {GRAVAC})",
        f"gravac(linear, epsilon=0.5, {GRAVAC})",
        "accordion(topk, window=3)",
        "scheduled(topk >> int8, exponential(start=0.5, end=0.01, steps=8))",
        "scheduled(topk >> int8, piecewise((3, 6, 9), (0.1, None, 0.01, None)))",
    ],
)
def test_workers_decide_alike_and_nothing_is_lost(spec: str, numpy_ops: Any) -> None:
    run = Run(compression_from_spec(spec), numpy_ops, workers=3).go(12)
    assert len(set(run.factors)) > 1, "the ratio never changed"
    if "dgc" not in spec:  # velocities are cleared where values were sent
        run.assert_nothing_lost()


@pytest.mark.parametrize(
    ("collective", "nodes"), [("scatter_reduce", (3,)), ("hierarchical", (2, 1)), ("hierarchical", (2, 2))]
)
def test_policies_through_every_collective(collective: str, nodes: tuple[int, ...], numpy_ops: Any) -> None:
    spec = f"gravac(topk(collective={collective}) >> int8, epsilon=0.3, {GRAVAC})"
    run = Run(compression_from_spec(spec), numpy_ops, workers=sum(nodes))
    run.cluster.nodes = nodes
    run.go(10)
    assert changes(run.factors)[:2] == [4, 8]


def test_gravac_on_every_backend(ops: Any) -> None:
    run = Run(compression_from_spec(f"gravac(topk >> int8, epsilon=0.3, {GRAVAC})"), ops).go(10)
    # In the first step workers do not know yet that they agree, and measure nothing.
    assert run.factors == [4] * 5 + [8] * 4 + [16]
    run.assert_nothing_lost()


def test_a_hard_phase_falls_back_and_training_recovers(numpy_ops: Any) -> None:
    """While all values are alike, a quarter of them carries at most half of the square, whatever residuals do."""
    run = Run(compression_from_spec(f"gravac(topk, epsilon=0.6, {GRAVAC})"), numpy_ops).go(10, very_heavy)
    assert run.factors[-1] == 16
    run.go(9, even, seed=1)
    assert changes(run.factors[10:]) == [16, 4, 1], "first theta_min, then dense"
    run.go(1, even, seed=2)
    assert run.engines[0].state == {} or all(not residuals_of(run.engines[0])[f"p{i}"].any() for i in (0, 1))
    run.go(8, very_heavy, seed=2)
    assert changes(run.factors[20:])[:2] == [1, 4]
    run.assert_nothing_lost()


def test_the_gain_is_what_was_sent_of_the_gradient_and_its_residual(numpy_ops: Any) -> None:
    """Values 4, 3, 2, 1, ...: of 8 values, a quarter is two, and an eighth one."""
    seen: list[Observed] = []

    class Spy(type(GraVAC().adapts)):  # type: ignore[misc]
        def update(self, state: Any, observed: Observed) -> Any:
            seen.append(observed)
            return super().update(state, observed)

    policy = Spy(theta_min=4, theta_max=8, epsilon=0.0, window=1)
    run = Run(Adaptive(TopK(dense_below=0), policy), numpy_ops, workers=2, shapes=[(8,)])
    x = np.array([4, -3, 2, 1, 1, 1, 0, 0], np.float32)
    run.go(1, lambda random, size: x)
    assert not seen, "in the first step workers do not know yet that they agree"
    run.go(1, lambda random, size: x)
    # After the first step 2, 1, 1, 1 are left; with the next gradient x = 4, -3, 4, 2, 2, 2, of which 4 and 4 go.
    assert seen[0].gain == pytest.approx(32 / 53)
    assert seen[0].candidate == pytest.approx(16 / 53)
    assert seen[0].norm == pytest.approx(32**0.5)
    assert seen[0].sent_bytes > 0


def test_a_schedule_changes_the_ratio_at_exact_steps(numpy_ops: Any) -> None:
    run = Run(Scheduled(TopK(dense_below=0), Piecewise((2, 4), (0.5, None, 0.125))), numpy_ops, shapes=[(1000,)])
    kept = []
    for number in range(6):
        before = run.engines[0].counters.total.kept
        run.go(1, seed=number)
        kept.append(run.engines[0].counters.total.kept - before)
    assert kept == [500, 500, 1000, 1000, 125, 125]
    run.assert_nothing_lost()


def test_a_schedule_by_a_function(numpy_ops: Any) -> None:
    run = Run(Scheduled(TopKInt8(dense_below=0), lambda step: 1 / (2 + step)), numpy_ops).go(3)
    assert run.factors == [2, 3, 4]


def saved(run: Run) -> dict[str, Any]:
    """A checkpoint of all workers."""
    totals = {
        each.name: {"residual": array_of(run.ops, sum(residuals_of(engine)[each.name] for engine in run.engines))}
        for each in run.parameters
    }
    first = run.engines[0]
    return mean_residuals(run.ops, totals, len(run.engines), step=first.step, policy=first.policy_state)


def load(run: Run, checkpoint: dict[str, Any]) -> None:
    for engine in run.engines:
        state, number = residuals_from(checkpoint, {each.name: each.size for each in run.parameters})
        copied = {name: {part: run.ops.copy(x) for part, x in parts.items()} for name, parts in state.items()}
        engine.load_state(copied, number, policy_from(checkpoint))


def test_decisions_outlive_a_restart(numpy_ops: Any) -> None:
    compressor = compression_from_spec(f"gravac(topk, epsilon=0.3, {GRAVAC})")
    run = Run(compressor, numpy_ops).go(10)
    resumed = Run(compressor, numpy_ops)
    load(resumed, saved(run))
    assert resumed.engines[0].adaptation.state == run.engines[0].adaptation.state
    assert resumed.factor == run.factor == 16
    # In the first step after a restart workers compare their settings, and measure nothing.
    resumed.go(6, seed=1)
    run.go(5, seed=1)
    assert resumed.factors == [16] * 4 + [32] * 2
    assert run.factors[10:] == [16] * 3 + [32] * 2


def test_the_state_of_another_policy_is_a_warning_and_begins_anew(numpy_ops: Any) -> None:
    run = Run(compression_from_spec(f"gravac(topk, epsilon=0.3, {GRAVAC})"), numpy_ops).go(10)
    other = Run(GraVAC(TopK, theta_min=5), numpy_ops)
    with pytest.warns(UserWarning, match="another policy"):
        load(other, saved(run))
    assert other.factor == 5
    without = Run(TopK(), numpy_ops)
    load(without, saved(run))
    assert without.engines[0].policy_state == ()


def test_a_worker_that_joins_takes_over_the_decisions(numpy_ops: Any) -> None:
    """The number of workers changes: those that go on and a new one meet in new collectives."""
    compressor = compression_from_spec(f"gravac(topk, epsilon=0.3, {GRAVAC})")
    run = Run(compressor, numpy_ops).go(10)
    larger = Run(compressor, numpy_ops, workers=3)
    for old, new in zip(run.engines, larger.engines, strict=False):
        old.transport = new.transport
    larger.engines[:2] = run.engines
    larger.go(1)
    assert len({engine.adaptation.state for engine in larger.engines}) == 1
    assert larger.factor == 16
    larger.go(5, seed=1)


def test_different_policies_are_an_error_at_the_first_step(numpy_ops: Any) -> None:
    for one, other in [
        (GraVAC(TopK), GraVAC(TopK, window=200)),
        (GraVAC(TopK), TopK()),
        (Accordion(TopK), GraVAC(TopK)),
        (Scheduled(TopK, Exponential(steps=10)), Scheduled(TopK, Exponential(steps=20))),
    ]:
        run = Run(one, numpy_ops)
        run.engines[1] = engines_of(run.cluster, other, run.parameters)[1]
        with pytest.raises(ConfigurationError, match="rank 13 has compression = "):
            run.go(1)


def test_a_state_that_only_some_workers_loaded_is_taken_over_by_all(numpy_ops: Any) -> None:
    """The first step is that of a new policy, for which nobody needs a state."""
    compressor = compression_from_spec(f"gravac(topk, epsilon=0.3, {GRAVAC})")
    run = Run(compressor, numpy_ops).go(10)
    resumed = Run(compressor, numpy_ops)
    resumed.engines[1].load_state({}, 10, run.engines[0].policy_state)
    resumed.go(1)
    sent = resumed.engines[0].counters.total
    assert sent.kept == sent.elements / 4
    assert {engine.adaptation.state for engine in resumed.engines} == {run.engines[0].adaptation.state}
    resumed.go(1)
    assert resumed.engines[0].counters.total.kept - sent.kept == 125 + 188, "a sixteenth of 2000 and of 3000"


@pytest.mark.parametrize("spec", [f"gravac(topk, {GRAVAC})", "scheduled(topk, piecewise((1,), (0.5, 0.1)))", "randomk"])
def test_a_worker_may_hear_of_the_agreement_before_its_first_gradient(spec: str, numpy_ops: Any) -> None:
    """As the door for PyTorch does where a worker's gradients come late; the others have begun their exchange then."""
    cluster, parameters = Cluster(2), parameters_of(SHAPES)
    engines = engines_of(cluster, compression_from_spec(spec), parameters, bucket_bytes=1)

    def work(transport: Any) -> dict[str, Any]:
        engine = engines[transport.rank]
        engine.begin_agreement(array_of(numpy_ops, np.zeros(1, np.float32)))
        for number, each in enumerate(parameters):
            if transport.rank == 0 or number > 0:
                engine.conclude_agreement()
            engine.submit(each.name, array_of(numpy_ops, np.ones(each.size, np.float32)))
        return engine.finish()

    first, second = cluster.run(work)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert engines[0].step == engines[1].step == 1


def test_a_step_that_is_not_finite_is_not_measured(numpy_ops: Any) -> None:
    run = Run(compression_from_spec(f"gravac(topk, epsilon=0.3, {GRAVAC})"), numpy_ops).go(3)
    before = run.engines[0].adaptation.state
    broken = [{each.name: np.full(each.size, np.nan, np.float32) for each in run.parameters} for _ in run.engines]
    step(run.cluster, run.engines, run.ops, broken)
    assert {engine.adaptation.state for engine in run.engines} == {before}
    run.go(2, seed=1)


def test_measuring_costs_one_small_collective_in_a_tenth_of_a_window(numpy_ops: Any) -> None:
    run = Run(GraVAC(TopK, window=20), numpy_ops).go(6)
    requests = [each.request.payload for each in run.cluster.sent[0] if each.name.endswith(".policy")]
    assert [len(payload) for payload in requests] == [48] * 3, "after steps 2, 4 and 6"


@pytest.mark.parametrize("method", [NoCompression(), PowerSGD(), Threshold(), Sign()])
def test_methods_without_a_ratio_are_refused(method: Compressor) -> None:
    with pytest.raises(ConfigurationError, match="has no ratio"):
        GraVAC(method)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GraVAC(GraVAC(TopK)),
        lambda: GraVAC(3),
        lambda: Adaptive(TopK(), "gravac"),
        lambda: Rule("*", GraVAC(TopK)),
        lambda: Scheduled(TopK, 0.1),
    ],
)
def test_policies_refuse_what_has_no_meaning(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_the_bare_class_has_the_defaults() -> None:
    assert compression_from_spec("gravac") == GraVAC() == GraVAC(TopKInt8)
    assert compression_from_spec("gravac(topk(memory=none), theta_max=50)").memory == NoMemory()


@pytest.mark.parametrize(
    "spec",
    [
        "gravac(topk >> fp16, theta_max=100.0, scaling=exponential)",
        "accordion(int8, low=None)",
        "scheduled(topk >> int8, piecewise(boundaries=(5, 10), ratios=(0.1, None, 0.01)))",
        "scheduled(topk >> int8, by_epoch(schedule=exponential(steps=3), steps_per_epoch=20))",
        "gravac(rules(rule('my-layer.*', None), rule('*', topk)), window=10)",
    ],
)
def test_specs_parse_back(spec: str) -> None:
    compressor = compression_from_spec(spec)
    assert str(compressor) == spec
    assert compression_from_spec(str(compressor)) == compressor


def test_quantizers_follow_the_ratio_with_their_bits() -> None:
    assert str(Int8().with_ratio(1 / 8)) == "linear"
    assert [str(compression_from_spec("linear").with_ratio(r)) for r in (1, 0.25, 0.1, 0.01)] == [
        "linear(bits=8)",
        "linear(bits=8)",
        "linear(bits=3)",
        "linear(bits=2)",
    ]
    assert str(compression_from_spec("qsgd").with_ratio(0.125)) == "qsgd(levels=7)"


def test_a_policy_around_rules_changes_those_that_have_a_ratio(numpy_ops: Any) -> None:
    rules = Rules([Rule("p0", None), Rule("p1", Int8())], otherwise=TopK(dense_below=0))
    run = Run(Scheduled(rules, Piecewise((1,), (1.0, 0.125))), numpy_ops, shapes=[(40, 50), (3000,), (8000,)])
    run.go(2)
    sent = {each.name: run.engines[0].counters.bucket(each.name) for each in run.engines[0].buckets}
    assert sent["p2"].kept == 8000 + 1000
    assert sent["p0"].kept == 2 * 2000
    run.assert_nothing_lost()


def test_a_compressed_vector_without_workers(numpy_ops: Any) -> None:
    x = array_of(numpy_ops, np.arange(2000, dtype=np.float32))
    compressor = Scheduled(TopK, Piecewise((), (0.5,)))
    frame, context = compressor.compress(as_numpy(x))
    restored = compressor.decompress(frame, context)
    assert np.count_nonzero(restored) == 1000


def test_rules_share_no_bucket_with_others() -> None:
    rules = Rules([Rule("a*", 0.1), Rule("b*", 0.01)])
    parameters = [Parameter(name, 2000, "float32", (40, 50)) for name in ("a1", "b1", "a2", "c1", "b2")]
    engine = Engine(rules, parameters, None, groups=[["a1", "b1", "b2"], ["a2"]])  # type: ignore[arg-type]
    names = [sorted(each.name for each in bucket.parameters) for bucket in engine.buckets]
    assert sorted(names) == [["a1"], ["a2"], ["b1", "b2"], ["c1"]]
    assert [bucket.index for bucket in engine.buckets] == list(range(4))
