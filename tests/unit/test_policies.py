"""Policies as rules: known observations in, decisions at exact steps out. No compressor and no worker takes part."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy import (
    Accordion,
    ByEpoch,
    ByFunction,
    Exponential,
    GraVAC,
    Observed,
    Piecewise,
    Policy,
    State,
)


def observed(
    gain: float, candidate: float | None = None, seconds: float = 1.0, sent_bytes: float = 1.0, norm: float = 1.0
) -> Observed:
    return Observed(gain, candidate, norm, seconds, sent_bytes)


def run(policy: Policy, observations: Iterable[Observed], state: State | None = None) -> tuple[list[float], State]:
    """The factor in use after each observation (1 is dense), and the last state."""
    state = policy.init() if state is None else state
    factors = []
    for each in observations:
        state = policy.update(state, each)
        assert len(state) == len(policy.init())
        ratio = policy.ratio(state, 0)
        factors.append(1.0 if ratio is None else round(1 / ratio, 6))
    return factors, state


# -- GraVAC -----------------------------------------------------------------------------------------------------------

# One observation a step, and four steps in a window.
OPTIONS = {"theta_min": 10, "theta_max": 80, "epsilon": 0.5, "omega": 0.01, "window": 4}


def test_geometric_and_exponential_steps() -> None:
    assert GraVAC(theta_min=10, theta_max=100).factors == (10, 20, 40, 80, 100)
    assert GraVAC(theta_min=10, theta_max=2000, growth=10).factors == (10, 100, 1000, 2000)
    assert GraVAC(theta_min=10, theta_max=3000, scaling="exponential").factors == (10, 20, 40, 160, 2560, 3000)
    assert GraVAC(theta_min=10, theta_max=10).factors == (10,)


def test_the_factor_rises_every_window_while_the_gain_is_above_epsilon() -> None:
    """Throughput doubles with each factor, so the search goes to the end."""
    policy = GraVAC(**OPTIONS)
    assert policy.ratio(policy.init(), 0) == 0.1
    steps = [observed(0.9, 0.8, 1 / factor) for factor in (10, 20, 40, 80, 80) for _ in range(4)]
    factors, state = run(policy, steps)
    assert factors == [10] * 3 + [20] * 4 + [40] * 4 + [80] * 9
    assert policy.report(state, 0) == pytest.approx({"ratio": 1 / 80, "factor": 80, "gain": 0.9}, abs=0.01)


def test_a_candidate_below_epsilon_is_not_taken_until_its_gain_recovers() -> None:
    policy = GraVAC(**OPTIONS)
    steps = [observed(0.9, 0.2)] * 8 + [observed(0.9, 0.95, 0.5)] * 4 + [observed(0.9, 0.95, 0.25)] * 4
    factors, _ = run(policy, steps)
    # With weight 2 / (4 + 1) the candidate's mean passes 0.5 at the first observation of 0.95: it counts at the
    # end of the window.
    assert factors == [10] * 11 + [20] * 4 + [40]


def test_it_asks_for_the_next_factor_and_none_beyond_the_last() -> None:
    policy = GraVAC(**OPTIONS)
    state = policy.init()
    assert policy.candidate(state, 0) == 1 / 20
    _, state = run(policy, [observed(0.9, 0.9, 1 / factor) for factor in (10, 20, 40) for _ in range(4)])
    assert policy.ratio(state, 0) == 1 / 80
    assert policy.candidate(state, 0) is None


def test_the_search_ends_when_the_best_throughputs_differ_by_less_than_omega() -> None:
    """At factor 20 a step is no faster: seconds per step x 0.9 at both."""
    policy = GraVAC(**OPTIONS)
    factors, state = run(policy, [observed(0.9, 0.9)] * 20)
    assert factors == [10] * 3 + [20] * 4 + [10] * 13
    different, _ = run(policy, [observed(0.9, 0.9)] * 4 + [observed(0.9, 0.9, 0.98)] * 4)
    assert different[-1] == 40, "2 % are more than omega"
    assert policy.ratio(state, 0) == 0.1


def test_the_search_ends_when_a_higher_factor_lowers_the_throughput() -> None:
    """Compression throughput is gain / seconds: 0.9/1, 0.9/0.5, 0.6/0.4 for 10, 20, 40."""
    policy = GraVAC(**OPTIONS)
    windows = [observed(0.9, 0.9, 1.0), observed(0.9, 0.6, 0.5), observed(0.6, 0.55, 0.4)]
    factors, state = run(policy, [each for each in windows for _ in range(4)])
    assert factors == [10] * 3 + [20] * 4 + [40] * 4 + [20]
    assert run(policy, [observed(0.9, 0.9, 0.5)] * 20, state)[0] == [20] * 20


def test_a_pause_is_not_taken_for_the_time_of_a_step() -> None:
    """One observation of each window holds a validation; at factor 20 a much longer one."""
    policy = GraVAC(**OPTIONS)
    windows = [(1.0, 3.0, 1.0, 1.0), (9.0, 0.5, 0.5, 0.5), (0.25, 0.25, 0.25, 9.0)]
    factors, _ = run(policy, [observed(0.9, 0.9, seconds) for window in windows for seconds in window])
    assert factors == [10] * 3 + [20] * 4 + [40] * 4 + [80]


def test_bytes_may_take_the_place_of_seconds() -> None:
    policy = GraVAC(**OPTIONS, throughput="bytes")
    steps = [observed(0.9, 0.9, 1.0, 1000 / factor) for factor in (10, 20, 40, 80, 80) for _ in range(4)]
    assert run(policy, steps)[0][-1] == 80
    # The gain falls faster than the bytes.
    steps = [observed(*each) for each in [(0.9, 0.6, 1.0, 100), (0.6, 0.5, 1.0, 90)] for _ in range(4)]
    factors, _ = run(GraVAC(**{**OPTIONS, "theta_max": 20}, throughput="bytes"), steps)
    assert factors == [10] * 3 + [20] * 4 + [10]


def test_a_hard_phase_falls_back_to_theta_min_and_then_to_dense() -> None:
    policy = GraVAC(**OPTIONS)
    _, state = run(policy, [observed(0.9, 0.8, 1 / factor) for factor in (10, 20, 40, 80) for _ in range(4)])
    assert policy.report(state, 0)["factor"] == pytest.approx(80)
    # Smoothed with weight 0.4: 0.9, 0.54, 0.324 at 80: below 0.5 at the second. At theta_min the mean starts anew.
    factors, state = run(policy, [observed(0.0), observed(0.0), observed(0.2), observed(0.2, 0.1)], state)
    assert factors == [80, 10, 1, 1]
    assert policy.ratio(state, 0) is None
    assert policy.candidate(state, 0) == 0.1, "while dense, the gain of theta_min is measured"
    # 0.1, then 0.44, then 0.66.
    factors, state = run(policy, [observed(1.0, 0.95), observed(1.0, 0.99), observed(0.9, 0.9)], state)
    assert factors == [1, 10, 10]
    factors, _ = run(policy, [observed(0.9, 0.9)] * 3, state)
    assert factors == [10, 10, 20], "the search begins again"


def test_gravac_looks_ten_times_in_a_window() -> None:
    policy = GraVAC(window=500)
    assert [step for step in range(200) if policy.observes(step)] == [49, 99, 149, 199]
    assert [step for step in range(4) if GraVAC(window=3).observes(step)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta_min": 1}, "theta_min must be a number > 1, got 1"),
        ({"theta_min": 50, "theta_max": 20}, "theta_max must be a number >= 50"),
        ({"epsilon": 1.5}, "epsilon must be a number >= 0 and <= 1, got 1.5"),
        ({"omega": "little"}, "omega"),
        ({"window": 0}, "window must be a whole number >= 1, got 0"),
        ({"growth": 1}, "growth"),
        ({"scaling": "linear"}, "scaling must be one of"),
        ({"throughput": "joules"}, "throughput must be one of"),
    ],
)
def test_gravac_refuses_what_has_no_meaning(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GraVAC(**options)


# -- Accordion --------------------------------------------------------------------------------------------------------


def test_accordion_is_critical_at_first_and_whenever_the_norm_changes() -> None:
    policy = Accordion(low=0.1, high=0.01, eta=0.5, window=2)
    norms = [8, 8, 8, 4, 3, 3, 2.9, 3.1, 1, 2, 2, 1.2, 0, 0, 0, 0]
    state, ratios = policy.init(), []
    for each in norms:
        ratios.append(policy.ratio(state, 0))
        state = policy.update(state, observed(1.0, norm=each))
    # Means of windows: 8, 6, 3, 3, 1.5, 1.6, 0, 0. Changes: .25, .5, 0, .5, .07, 1, and none of nothing.
    regimes = [1, 1, 0, 1, 0, 1, 0, 1]
    assert ratios == [0.1 if critical else 0.01 for critical in regimes for _ in range(2)]


def test_accordion_may_send_dense_in_critical_regimes() -> None:
    policy = Accordion(low=None, high=0.01)
    assert policy.ratio(policy.init(), 0) is None
    assert policy.report(policy.init(), 0)["ratio"] == 1


@pytest.mark.parametrize(
    "options", [{"low": 0.01, "high": 0.1}, {"low": 2}, {"high": None}, {"eta": -1}, {"window": 1.5}]
)
def test_accordion_refuses_what_has_no_meaning(options: dict) -> None:
    with pytest.raises(ConfigurationError):
        Accordion(**options)


# -- schedules --------------------------------------------------------------------------------------------------------


def test_the_exponential_warm_up_of_dgc() -> None:
    schedule = Exponential(start=0.25, end=0.25**5, steps=8)
    assert [schedule.at(step) for step in range(10)] == pytest.approx(
        [0.25**power for power in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)]
    )


def test_piecewise_by_step_and_by_epoch() -> None:
    schedule = Piecewise((2, 3), (None, 0.1, 0.01))
    assert [schedule.at(step) for step in range(5)] == [None, None, 0.1, 0.01, 0.01]
    by_epoch = ByEpoch(schedule, steps_per_epoch=10)
    assert [by_epoch.at(step) for step in (0, 19, 20, 29, 30)] == [None, None, 0.1, 0.1, 0.01]


def halving(step: int) -> float:
    return 0.5**step


def test_a_function_of_the_user() -> None:
    schedule = ByFunction(halving)
    assert [schedule.at(step) for step in range(3)] == [1, 0.5, 0.25]
    assert str(schedule).endswith("test_policies.halving')") or "halving" in str(schedule)
    assert ByFunction(halving) != ByFunction(abs)
    with pytest.raises(ConfigurationError, match="for step 2"):
        ByFunction(abs).at(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exponential(start=0),
        lambda: Exponential(end=None),
        lambda: Exponential(steps=0),
        lambda: Piecewise((5,), (0.1,)),
        lambda: Piecewise((5, 5), (0.1, 0.1, 0.1)),
        lambda: Piecewise((5,), (0.1, 2)),
        lambda: ByEpoch(Exponential(), 0),
        lambda: ByEpoch(0.1, 10),
        lambda: ByFunction(0.1),
    ],
)
def test_schedules_refuse_what_has_no_meaning(make) -> None:
    with pytest.raises(ConfigurationError):
        make()
