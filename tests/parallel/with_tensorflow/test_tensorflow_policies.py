"""Policies and rules through the door for TensorFlow: equal decisions in a graph, states in variables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from known_gradients import gradients
from tensorflow_workers import assert_same_everywhere, reduced, variables

from hvd_gradcomp.tensorflow import (
    ConfigurationError,
    GraVAC,
    Rule,
    Rules,
    TopK,
    compression_from_spec,
    load_residual_state_dict,
    policy_report,
    residual_state_dict,
    residuals,
)
from hvd_gradcomp.tensorflow.reducer import find_exchange

SPEC = "gravac(topk >> int8, theta_min=4, theta_max=64, epsilon=0.3, window=3, throughput=bytes)"


def stepper(own: dict[str, tf.Variable], compression: Any) -> Any:
    @tf.function(autograph=False)
    def step(given: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return reduced(own, given, compression)

    return lambda number: step({name: tf.constant(g) for name, g in gradients(number, hvd.rank()).items()})


def test_gravac_decides_in_a_graph_and_outlives_a_restart(tmp_path: Path) -> None:
    own, compression = variables(), compression_from_spec(SPEC)
    step = stepper(own, compression)
    seen = []
    for number in range(8):
        assert_same_everywhere(list(step(number).values()))
        seen.append(round(policy_report(list(own.values()))["factor"], 3))
    # In the first step nothing is measured; a window is three steps.
    assert seen == [4, 4, 4, 8, 8, 8, 16, 16]
    saved = residual_state_dict(list(own.values()))
    path = tf.train.Checkpoint(residuals=residuals(list(own.values()))).write(str(tmp_path / f"rank{hvd.rank()}"))

    for way in ("one file for all", "a file for each worker"):
        fresh = variables()
        if way == "one file for all":
            load_residual_state_dict(list(fresh.values()), saved)
        else:
            tf.train.Checkpoint(residuals=residuals(list(fresh.values()))).read(path).expect_partial()
        again = stepper(fresh, compression)
        again(8)
        assert round(policy_report(list(fresh.values()))["factor"], 3) == 16, way


def test_auto_measures_between_two_steps_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes depends on how long things take here; that it is the same for all does not."""
    monkeypatch.setattr("hvd_gradcomp.engine.choosing._BYTES", dict.fromkeys(("allreduce", "allgather", "alltoall"), 1))
    own = variables()
    step = stepper(own, compression_from_spec("auto(topk >> int8, window=4, every=4)"))
    reports = []
    for number in range(5):
        assert_same_everywhere(list(step(number).values()))
        reports.append(policy_report(list(own.values())))
    assert [math.isnan(each["dense"]) for each in reports] == [True, True, False, False, False]
    assert len({repr(each) for each in hvd.allgather_object(reports)}) == 1


def test_rules_choose_for_each_variable() -> None:
    own = variables()
    step = stepper(own, Rules([Rule("a.*", None), Rule(min_size=4000, compression=0.01)], otherwise=TopK(0.1)))
    assert_same_everywhere(list(step(0).values()))
    engine = find_exchange(list(own.values())).engine
    assert {each.name for each in engine.parameters} == {"b.weight", "c"}
    assert engine.counters.bucket("c").kept == 50
    assert engine.counters.bucket("b.weight").kept == 200


def test_different_policies_are_an_error_at_the_first_step() -> None:
    step = stepper(variables(), GraVAC(window=20 if hvd.rank() % 2 == 0 else 50))
    with pytest.raises((ConfigurationError, tf.errors.OpError), match="different settings"):
        step(0)
