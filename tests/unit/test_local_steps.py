"""Schedules of local steps: numbers, functions, and what is neither."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.local_steps import Clock, PostLocal, check_outer, describe, steps_until_meeting


def test_post_local_switches_once() -> None:
    schedule = PostLocal(8, after=100)
    assert [steps_until_meeting(schedule, done) for done in (0, 99, 100, 108)] == [1, 1, 8, 8]


def test_schedules_are_told_apart() -> None:
    assert describe(4) == describe(4) != describe(8)
    assert describe(PostLocal(8, after=1)) == describe(PostLocal(8, after=1)) != describe(PostLocal(8, after=2))
    assert "test_schedules" in describe(lambda done: 4)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "4", lambda done: 0, lambda done: None])
def test_what_is_no_number_of_steps_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"whole number of steps >= 1"):
        steps_until_meeting(wrong, 7)


@pytest.mark.parametrize("options", [{"local_steps": 0, "after": 1}, {"local_steps": 2, "after": -1}])
def test_post_local_checks_itself(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be a whole number"):
        PostLocal(**options)


def test_clock_says_when_to_meet_and_goes_on_after_loading() -> None:
    clock = Clock(PostLocal(3, after=2))
    due = []
    for step in range(9):
        if step == 4:
            saved = clock.state_dict()
            clock = Clock(PostLocal(3, after=2))
            clock.load_state_dict(saved)
        due.append(clock.count())
        if due[-1]:
            clock.meet()
    assert due == [True, True, False, False, True, False, False, True, False]
    assert clock.settings()["local steps"] == 9


def test_clock_meets_late_where_steps_come_in_packs() -> None:
    clock = Clock(3)
    assert [clock.count(2), clock.count(2)] == [False, True]
    clock.meet()
    assert (clock.steps, clock.since_meeting) == (4, 0)


@pytest.mark.parametrize("values", [(0, 0.9), (0.7, 1), (0.7, -0.1), (float("nan"), 0.5)])
def test_values_of_diloco_out_of_their_range_are_refused(values: tuple[float, float]) -> None:
    check_outer(0.7, 0.9)
    with pytest.raises(ConfigurationError, match="0 <= outer_momentum < 1"):
        check_outer(*values)
