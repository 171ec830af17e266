"""Schedules of local steps: numbers, functions, and what is neither."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.local_steps import PostLocal, describe, steps_until_meeting


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
