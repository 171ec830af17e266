"""Policies and rules on real workers: equal decisions, nothing lost, states in checkpoints, errors if they differ."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from known_gradients import parameters
from torch_workers import Ledger, assert_same_everywhere, optimizer_for, train

from hvd_gradcomp.torch import (
    ConfigurationError,
    GraVAC,
    Piecewise,
    Rule,
    Rules,
    Scheduled,
    TopK,
    TopKInt8,
    compression_from_spec,
    counters,
    load_residual_state_dict,
    policy_report,
    residual_state_dict,
)
from hvd_gradcomp.torch.optimizer import exchange_of

LARGE = ("a.weight", "b.weight", "c")
SPEC = "gravac(topk >> int8, theta_min=4, theta_max=64, epsilon=0.3, window=3, throughput=bytes)"


def factors(params: Any, optimizer: Any, steps: range) -> list[float]:
    """The factor after each step; every worker's is the same."""
    found = []
    for step in steps:
        train(params, optimizer, [step])
        found.append(round(policy_report(optimizer)["factor"], 3))
    gathered = hvd.allgather_object(found)
    assert all(each == found for each in gathered), gathered
    return found


def test_gravac_decides_alike_loses_nothing_and_outlives_a_restart() -> None:
    params = parameters()
    optimizer = optimizer_for(params, compression_from_spec(SPEC))
    ledger = Ledger(params, LARGE)
    seen = []
    for step in range(8):
        seen += factors(params, optimizer, range(step, step + 1))
        ledger.note(params, step)
    # In the first step nothing is measured; a window is three steps.
    assert seen == [4, 4, 4, 8, 8, 8, 16, 16]
    assert set(LARGE) <= exchange_of(optimizer).engine.residuals.keys()
    ledger.assert_nothing_lost(optimizer)
    assert_same_everywhere(params)
    state = residual_state_dict(optimizer)
    again = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    resumed = optimizer_for(again, compression_from_spec(SPEC))
    load_residual_state_dict(resumed, hvd.broadcast_object(state, root_rank=0, name="state"))
    assert policy_report(resumed) == policy_report(optimizer)
    assert factors(again, resumed, range(8, 10)) == [16, 16]
    assert_same_everywhere(again)


def test_a_schedule_with_dense_steps() -> None:
    params = parameters()
    optimizer = optimizer_for(params, Scheduled(TopK(), Piecewise((1, 2), (0.5, None, 0.1))))
    sizes = sum(params[name].numel() for name in LARGE)
    kept = []
    for step in range(3):
        before = counters(optimizer).total.kept - counters(optimizer).bucket("dense").kept
        train(params, optimizer, [step])
        kept.append(counters(optimizer).total.kept - counters(optimizer).bucket("dense").kept - before)
    # With four workers half of the values would be more bytes than a dense exchange.
    assert kept == [sizes // 2 if hvd.size() == 2 else sizes, sizes, pytest.approx(sizes / 10, abs=3)]
    assert_same_everywhere(params)


def test_rules_choose_for_each_parameter() -> None:
    params = parameters()
    rules = Rules([Rule("a.*", None), Rule(role="matrix", compression=TopKInt8(0.05))], otherwise=TopK(0.1))
    optimizer = optimizer_for(params, rules)
    train(params, optimizer, [0, 1])
    engine = exchange_of(optimizer).engine
    assert {each.name for each in engine.parameters} == {"b.weight", "c"}
    assert engine.counters.bucket("b.weight").kept == 2 * 100
    assert engine.counters.bucket("c").kept == 2 * 500
    assert_same_everywhere(params)
    saved = residual_state_dict(optimizer)
    load_residual_state_dict(optimizer_for(parameters(), rules), saved)


@pytest.mark.parametrize("even", [GraVAC(window=20), TopKInt8()], ids=str)
def test_different_policies_are_an_error_at_the_first_step(even: Any) -> None:
    params = parameters()
    optimizer = optimizer_for(params, even if hvd.rank() % 2 == 0 else GraVAC(window=50))
    with pytest.raises(ConfigurationError, match=r"workers were given different settings.*compression"):
        train(params, optimizer, [0])
