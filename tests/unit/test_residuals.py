"""Residuals as a checkpoint and memories as rules; what training makes of them is in test_conservation.py."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from arrays import array_of, as_numpy

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import ErrorFeedback, Memory, NoMemory, mean_residuals, residuals_from


def saved(ops, workers=4):
    totals = {"w": np.array([4.0, -8.0, 2.0], np.float32), "b": np.array([1.0], np.float32)}
    return mean_residuals(ops, {name: {"residual": array_of(ops, x)} for name, x in totals.items()}, workers)


def test_the_mean_is_saved_and_found_by_name(ops):
    checkpoint = pickle.loads(pickle.dumps(saved(ops)))
    found, step = residuals_from(checkpoint, {"b": 1, "w": 3})
    assert {name: as_numpy(x["residual"]).tolist() for name, x in found.items()} == {"w": [1, -2, 0.5], "b": [0.25]}
    assert step == 0
    assert checkpoint["workers"] == 4


def test_parameters_that_came_or_went_since(ops):
    """One that is frozen or sent dense now keeps none; a new one begins without."""
    assert set(residuals_from(saved(ops), {"w": 3, "new": 7})[0]) == {"w"}
    assert residuals_from(saved(ops), {})[0] == {}


def test_a_checkpoint_of_another_model(ops):
    with pytest.raises(ConfigurationError, match="saved for 'w' has 3 elements, the parameter has 4"):
        residuals_from(saved(ops), {"w": 4, "b": 1})


@pytest.mark.parametrize(
    "checkpoint",
    [
        None,
        [],
        {},
        "residuals",
        {"format": "hvd_gradcomp residuals 1", "mean": {}},
        {"state": {}},
    ],
)
def test_what_is_no_checkpoint(checkpoint):
    with pytest.raises(ConfigurationError, match="expected residuals saved by residual_state_dict"):
        residuals_from(checkpoint, {"w": 3})


def test_error_feedback_adds_the_residual_and_leaves_it_as_it_is(ops):
    residual = array_of(ops, np.array([0.5, -1.0], np.float32))
    gradient = array_of(ops, np.array([1.0, 1.0], np.float32))
    corrected, advanced = ErrorFeedback().correct(ops, gradient, {"residual": residual}, 2)
    assert as_numpy(corrected).tolist() == [1.5, 0.0]
    assert as_numpy(residual).tolist() == [0.5, -1.0]
    assert advanced == {}
    gradient = array_of(ops, np.ones(2, np.float32))
    assert ErrorFeedback().correct(ops, gradient, {}, 2)[0] is gradient


def test_no_memory_forgets(ops):
    gradient = array_of(ops, np.ones(2, np.float32))
    assert NoMemory().correct(ops, gradient, {"residual": array_of(ops, np.ones(2, np.float32))}, 2)[0] is gradient
    assert NoMemory().update(ops, {}, gradient, None) == {}
    assert (NoMemory().keeps, ErrorFeedback().keeps) == (False, True)


def test_memories_are_values():
    assert ErrorFeedback() == ErrorFeedback() != NoMemory()
    assert len({ErrorFeedback(), ErrorFeedback(), NoMemory()}) == 2
    assert all(isinstance(each, Memory) for each in (ErrorFeedback(), NoMemory()))
