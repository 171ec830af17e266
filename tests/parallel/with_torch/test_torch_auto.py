"""Policy `auto` on real workers: measured and decided together, nothing lost, saved and restored, errors if it differs.

Which ratio it takes depends on how long things take here, and is not looked at.
"""

from __future__ import annotations

import math

import horovod.torch as hvd
import pytest
import torch
from known_gradients import parameters
from torch_workers import Ledger, assert_same_everywhere, optimizer_for, train

from hvd_gradcomp.torch import (
    Auto,
    ConfigurationError,
    Int8,
    TopK,
    compression_from_spec,
    load_residual_state_dict,
    policy_report,
    residual_state_dict,
)
from hvd_gradcomp.torch.optimizer import exchange_of

LARGE = ("a.weight", "b.weight", "c")
# Predictions after the third step and the eighth.
SPEC = "auto(topk >> int8, window=4, every=4)"


def test_all_decide_alike_lose_nothing_and_go_on_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_gradcomp.engine.choosing._BYTES", dict.fromkeys(("allreduce", "allgather", "alltoall"), 1))
    params = parameters()
    optimizer = optimizer_for(params, compression_from_spec(SPEC))
    ledger = Ledger(params, LARGE)
    reports = []
    for step in range(9):
        train(params, optimizer, [step])
        reports.append(policy_report(optimizer))
        ledger.note(params, step)
        if step == 4:
            # Whatever was found: a change of method in the middle, on all workers.
            engine = exchange_of(optimizer).engine
            engine.adaptation.state = (2.0, *engine.adaptation.state[1:])
    assert [each["ratio"] for each in reports[:2]] == [1, 1]
    assert all(math.isnan(each["dense"]) for each in reports[:2])
    assert not any(math.isnan(number) for each in reports[2:] for number in each.values())
    assert reports[4] != reports[8]
    gathered = hvd.allgather_object(repr(reports))
    assert len(set(gathered)) == 1, gathered
    ledger.assert_nothing_lost(optimizer)
    assert_same_everywhere(params)
    state = residual_state_dict(optimizer)
    again = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    resumed = optimizer_for(again, compression_from_spec(SPEC))
    load_residual_state_dict(resumed, hvd.broadcast_object(state, root_rank=0, name="state"))
    assert repr(policy_report(resumed)) == repr(policy_report(optimizer))
    train(again, resumed, [9, 10])
    assert_same_everywhere(again)


def test_different_limits_are_an_error_at_the_first_step() -> None:
    params = parameters()
    method = TopK() >> Int8()
    optimizer = optimizer_for(params, Auto(method) if hvd.rank() % 2 == 0 else Auto(method, lowest=0.001))
    with pytest.raises(ConfigurationError, match=r"workers were given different settings.*compression"):
        train(params, optimizer, [0])
