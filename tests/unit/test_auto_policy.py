"""Policy `auto`: decisions from known numbers, and in engines whose collectives take as long as on a slow network."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated_cluster import Cluster, MemoryTransport
from steps import parameters_of, step
from test_adaptive import Run

from hvd_gradcomp.collectives import Allreduce
from hvd_gradcomp.compressors import Auto as Compression
from hvd_gradcomp.compressors import GraVAC, PowerSGD, TopKInt8, compression_from_spec
from hvd_gradcomp.engine import Engine
from hvd_gradcomp.engine.adaptation import Adaptation
from hvd_gradcomp.engine.rehearsal import Rehearsed, rehearse
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import whole_parts
from hvd_gradcomp.ops import Ops, backend
from hvd_gradcomp.policy import Auto, Observed, State

# Two windows from one prediction to the next.
POLICY = Auto(window=10, every=20)
STEP = Observed(0.0, None, 0.0, 1.0, 0.0)


def seen(waited_s: float, alone_s: float = 1.0, predicted: tuple[float, ...] | None = None) -> Observed:
    return replace(STEP, seconds=alone_s + waited_s, waited_s=waited_s, predicted=predicted)


def after(*observations: Observed, state: State | None = None) -> State:
    state = POLICY.init() if state is None else state
    for each in observations:
        assert (each.predicted is not None) == bool(POLICY.to_predict(state))
        state = POLICY.update(state, each)
        assert len(state) == len(POLICY.init())
        assert all(math.isfinite(number) for number in state)
    return state


def ratio_after(*observations: Observed) -> float | None:
    return POLICY.ratio(after(*observations), 0)


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_candidates_go_down_to_the_lowest_ratio_that_is_accepted() -> None:
    assert POLICY.candidates == (None, 0.1, 0.01)
    assert [each for each in Auto(lowest=0.002).candidates if each] == pytest.approx([0.1, 0.01, 0.002])
    assert Auto(lowest=0.08).candidates == (None, 0.08)
    assert Auto(lowest=0.5).candidates == (None, 0.5)


def test_training_begins_dense_and_looks_soon_then_once_a_window() -> None:
    assert POLICY.ratio(POLICY.init(), 0) is None
    assert [step for step in range(40) if POLICY.observes(step)] == [2, 9, 19, 29, 39]
    assert POLICY.to_predict(POLICY.init()) == POLICY.candidates
    state = after(seen(3.0, predicted=(3.0, 1.0, 0.1)))
    assert POLICY.to_predict(state) == ()
    assert POLICY.to_predict(after(seen(0.1), state=state)) == POLICY.candidates


@pytest.mark.parametrize(
    ("predicted", "ratio"),
    [
        # The exchange hides behind the backward pass, or nearly so.
        ((0.0, 0.0, 0.0), None),
        ((0.09, 0.05, 0.0), None),
        ((0.2, 0.05, 0.0), 0.1),
        ((3.0, 0.5, 0.1), 0.01),
        # Compressing takes longer than it saves.
        ((0.5, 0.8, 0.6), None),
    ],
)
def test_the_least_compression_that_is_about_as_fast_as_any(predicted: tuple[float, ...], ratio: float | None) -> None:
    assert ratio_after(seen(predicted[0], predicted=predicted)) == ratio


def test_compression_that_does_not_pay_ends() -> None:
    plan = seen(3.0, predicted=(3.0, 1.0, 0.1))
    assert ratio_after(plan, seen(0.15)) == 0.01
    # Not as good as predicted, but better than anything else.
    assert ratio_after(plan, seen(0.9)) == 0.01
    # Worse than a tenth is predicted to be.
    state = after(plan, seen(1.5))
    assert POLICY.ratio(state, 0) == 0.1
    # And that one, it turns out, is worse than either; the predictions being the same, what was measured counts.
    state = after(seen(3.5, predicted=(3.0, 1.0, 0.1)), state=state)
    assert POLICY.ratio(state, 0) == 0.01


def test_dense_comes_back_where_every_ratio_takes_longer() -> None:
    policy = Auto(lowest=0.1, window=10, every=1000)
    state = policy.update(policy.init(), seen(3.0, predicted=(3.0, 1.0)))
    assert policy.ratio(state, 0) == 0.1
    state = policy.update(state, seen(3.2))
    assert policy.ratio(state, 0) is None
    # Both are known now, and no prediction brings the loser back.
    for _ in range(5):
        state = policy.update(state, seen(3.0))
        assert policy.ratio(state, 0) is None


def test_pauses_and_stragglers_are_not_taken_for_the_network() -> None:
    """A validation between steps makes a mean step long, but nobody waits for the exchange meanwhile."""
    plan = seen(3.0, predicted=(3.0, 1.0, 0.1))
    state = after(plan, seen(0.15, alone_s=60.0))
    assert POLICY.ratio(state, 0) == 0.01
    assert POLICY.report(state, 0)["alone"] == 1.0


def test_another_network_is_noticed() -> None:
    slow = (3.0, 1.0, 0.1)
    state = after(seen(3.0, predicted=slow), seen(0.1))
    # About the same: what was measured of dense stays, though it is predicted to be cheap.
    same = after(seen(0.1, predicted=(2.9, 1.0, 0.1)), state=state)
    assert POLICY.ratio(same, 0) == 0.01
    fast = after(seen(0.05, predicted=(0.06, 0.05, 0.05)), state=state)
    assert POLICY.ratio(fast, 0) is None


def test_the_first_steps_are_not_held_against_dense() -> None:
    """They hold what is done once only."""
    assert ratio_after(seen(5.0, predicted=(0.05, 0.04, 0.04))) is None


def test_the_report() -> None:
    empty = POLICY.report(POLICY.init(), 0)
    assert empty.pop("ratio") == 1.0
    assert all(math.isnan(each) for each in empty.values())
    state = after(seen(3.0, predicted=(3.0, 1.0, 0.1)), seen(0.2))
    assert POLICY.report(state, 0) == pytest.approx({"ratio": 0.01, "alone": 1.0, "exchange": 0.2, "dense": 3.0})


@pytest.mark.parametrize(
    "options", [{"lowest": 0}, {"lowest": None}, {"window": 0}, {"every": 7, "window": 5}, {"every": 0.5}]
)
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        Auto(**options)


# -- in the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def numpy_ops() -> Ops:
    return backend("numpy")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A network of so many bytes a second, on which waiting takes that long, and which the model is told of."""
    rate = {"bytes_per_s": 2e5}
    wait = MemoryTransport.wait

    def wait_long(self: MemoryTransport, handle: Any) -> Any:
        found = wait(self, handle)
        request = handle[1]
        size = 4 * len(request.values) if isinstance(request, Allreduce) else len(request.payload)
        time.sleep(size / rate["bytes_per_s"])
        return found

    def configured() -> tuple[tuple[float, float], ...]:
        return ((1e-6, rate["bytes_per_s"]),)

    monkeypatch.setattr(MemoryTransport, "wait", wait_long)
    monkeypatch.setattr("hvd_gradcomp.engine.choosing.configured_network", configured)
    return rate


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressing takes a minute for each element, by the rehearsal's word."""

    def rehearsed(method: Any, parameters: Any, sizes: Any, way: str, like: Any) -> Rehearsed:
        found = rehearse(method, parameters, sizes, way, like)
        return found if way == "dense" else replace(found, before_s=60.0 * sum(each.size for each in parameters))

    monkeypatch.setattr("hvd_gradcomp.engine.planning.rehearse", rehearsed)


def assert_nothing_lost(run: Run) -> None:
    """What was given has arrived or is kept, by workers or by owners of shares."""
    for each in run.parameters:
        left = np.zeros(each.size)
        for engine in run.engines:
            left += whole_parts(run.ops, each.name, each.size, engine.state.get(each.name, {})).get("residual", 0.0)
        scale = np.abs(run.given[each.name]).max()
        np.testing.assert_allclose(run.got[each.name] + left, run.given[each.name], atol=1e-5 * scale)


SPEC = "auto(topk >> int8, window=3, every=6)"


@pytest.mark.parametrize(
    ("method", "nodes"),
    [
        ("topk >> int8", (3,)),
        ("topk(collective=scatter_reduce) >> int8", (3,)),
        ("topk(collective=hierarchical) >> int8", (2, 1)),
        ("topk(collective=auto) >> int8", (3,)),
        ("topk(granularity=model)", (2,)),
        ("randomk", (2,)),
        ("sketch", (2,)),
        ("rules(rule(p1, topk >> int8), otherwise=randomk)", (2,)),
    ],
)
def test_on_a_slow_network_all_compress_alike_and_nothing_is_lost(
    method: str, nodes: tuple[int, ...], numpy_ops: Ops, slow: dict[str, float]
) -> None:
    run = Run(compression_from_spec(f"auto({method}, window=3, every=6)"), numpy_ops, workers=sum(nodes))
    run.cluster.nodes = nodes
    run.go(5)
    assert run.factors[:3] == [1, 1, 1], "the first steps are dense"
    assert run.factors[3] > 1
    assert_nothing_lost(run)


def test_counters_that_their_user_resets_change_nothing(
    numpy_ops: Ops, slow: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(compression_from_spec(SPEC), numpy_ops)
    waited: list[float] = []
    conclude = Adaptation.conclude

    def noted(self: Adaptation, observed: Observed) -> None:
        waited.append(observed.waited_s)
        conclude(self, observed)

    monkeypatch.setattr(Adaptation, "conclude", noted)
    for number in range(5):
        run.go(1, seed=number)
        before = run.engines[0].counters.waited_s
        for engine in run.engines:
            engine.counters.reset()
        assert run.engines[0].counters.waited_s == before
    # Dense exchanges of 20 kB sleep for a tenth of a second here, of which a reset must not hide any.
    assert waited[0] >= 0.1


def test_where_compressing_takes_too_long_training_stays_dense(
    numpy_ops: Ops, slow: dict[str, float], costly: None
) -> None:
    run = Run(compression_from_spec(SPEC), numpy_ops).go(10)
    assert set(run.factors) == {1}
    run.assert_nothing_lost()


def test_a_network_that_becomes_fast_ends_compression(numpy_ops: Ops, slow: dict[str, float], request: Any) -> None:
    run = Run(compression_from_spec(SPEC), numpy_ops).go(5)
    assert run.factors[-1] > 1
    report = run.engines[0].adaptation.report(5)
    assert report["dense"] > report["exchange"] > 0
    slow["bytes_per_s"] = 1e12
    # Now computing is all that counts.
    request.getfixturevalue("costly")
    run.go(10, seed=1)
    assert run.factors[-1] == 1
    run.assert_nothing_lost()


def test_the_choice_outlives_a_restart(numpy_ops: Ops, slow: dict[str, float]) -> None:
    run = Run(compression_from_spec(SPEC), numpy_ops).go(4)
    assert run.factor > 1
    again = Run(compression_from_spec(SPEC), numpy_ops)
    for engine, other in zip(run.engines, again.engines, strict=True):
        other.load_state(engine.state, engine.step, engine.policy_state)
    assert again.factor == run.factor
    again.go(2)
    # In the first step workers do not know yet that they agree, and send what a new one would.
    assert again.factors == [run.factor] * 2
    assert again.engines[0].adaptation.state[3:6] == run.engines[0].adaptation.state[3:6], "predictions"


def test_different_policies_are_an_error_at_the_first_step(numpy_ops: Ops) -> None:
    cluster = Cluster(2)
    parameters = parameters_of([(3000,)])
    engines = [
        Engine(each, parameters, MemoryTransport(cluster, rank))
        for rank, each in enumerate((Compression(), Compression(lowest=0.001)))
    ]
    with pytest.raises(ConfigurationError, match=r"different settings.*auto\(topk.*lowest=0.001"):
        step(cluster, engines, numpy_ops, [{"p0": np.zeros(3000, np.float32)}] * 2)


def test_specs() -> None:
    for spec in ("auto", "auto(topk >> int8, lowest=0.001, window=20, every=200)", "auto(int8)"):
        assert compression_from_spec(str(compression_from_spec(spec))) == compression_from_spec(spec)
    assert compression_from_spec("auto") == Compression(TopKInt8())
    with pytest.raises(ConfigurationError, match="has no ratio"):
        Compression(PowerSGD)
    with pytest.raises(ConfigurationError, match="one policy alone decides"):
        Compression(GraVAC())
