"""How payloads meet, with TensorFlow: conservation by what is saved, same bits, and a restart from variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from known_gradients import SHAPES, all_gradients, gradients
from tensorflow_workers import assert_same_everywhere, reduced, variables

from hvd_gradcomp.tensorflow import (
    compression_from_spec,
    counters,
    load_residual_state_dict,
    residual_state_dict,
    residuals,
)

COLLECTIVES = ("scatter_reduce", "hierarchical")


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = hvd.size() // 2
    monkeypatch.setenv("HVD_GRADCOMP_NODES", f"{first},{hvd.size() - first}")


def owed(own: Mapping[str, tf.Variable]) -> dict[str, np.ndarray]:
    """The workers' mean of what has not been sent, by variable."""
    mean: Any = residual_state_dict(list(own.values()))["mean"]
    return {name.split(":")[0]: np.asarray(parts["residual"], np.float64) for name, parts in mean.items()}


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("spec", ["topk(ratio=0.05{}) >> int8", "int8(block=64{})"])
def test_what_is_not_sent_is_kept_by_somebody(spec: str, collective: str) -> None:
    """In the mean over the workers: gradient + owed before = arrived + owed after."""
    own = variables()
    compression = compression_from_spec(spec.format(f", collective={collective}"))
    before: dict[str, np.ndarray] = {}
    for number in range(3):
        found = reduced(own, gradients(number, hvd.rank()), compression)
        after = owed(own)
        for name, kept in after.items():
            mean = np.mean([each[name].reshape(-1) for each in all_gradients(number).values()], axis=0)
            due = mean + before.get(name, 0)
            arrived = np.asarray(found[name]).reshape(-1)
            np.testing.assert_allclose(arrived + kept, due, rtol=0, atol=1e-4 * np.abs(due).max() + 1e-6)
        before = after
        assert_same_everywhere(list(found.values()))
    total = counters(list(own.values())).total
    nodewise = collective == "hierarchical" and hvd.size() > 2
    assert (total.scattered > 0, total.nodewise > 0) == (collective == "scatter_reduce", nodewise)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_goes_on_from_saved_variables(collective: str, tmp_path: Any) -> None:
    """A worker's own checkpoint brings back what it keeps as an owner, so the next step is the same."""
    compression = compression_from_spec(f"topk(ratio=0.05, collective={collective})")
    own = variables()
    for number in range(2):
        reduced(own, gradients(number, hvd.rank()), compression)
    path = tf.train.Checkpoint(residuals=residuals(list(own.values()))).write(str(tmp_path / f"of-{hvd.rank()}"))
    expected = reduced(own, gradients(2, hvd.rank()), compression)
    new = variables()
    tf.train.Checkpoint(residuals=residuals(list(new.values()))).read(path)
    found = reduced(new, gradients(2, hvd.rank()), compression)
    for name, x in SHAPES.items():
        if np.prod(x) >= 1024:
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]))


def test_restart_from_a_checkpoint_of_all() -> None:
    own = variables()
    for number in range(2):
        reduced(own, gradients(number, hvd.rank()), compression_from_spec("topk(ratio=0.02, collective=hierarchical)"))
    saved = residual_state_dict(list(own.values()))
    before = owed(own)
    new = variables()
    load_residual_state_dict(list(new.values()), saved)
    found = reduced(new, gradients(2, hvd.rank()), compression_from_spec("topk(ratio=0.02, collective=scatter_reduce)"))
    for name, kept in owed(new).items():
        due = before[name] + np.mean([each[name].reshape(-1) for each in all_gradients(2).values()], axis=0)
        np.testing.assert_allclose(np.asarray(found[name]).reshape(-1) + kept, due, rtol=0, atol=1e-5)
