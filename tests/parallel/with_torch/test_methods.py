"""Methods and memories on real workers: what arrives, what is kept, what is saved, and exchanges of several rounds."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from known_gradients import SHAPES, backward, gradients, parameters
from torch_workers import assert_same_everywhere, assert_same_parts, kept, optimizer_for

from hvd_gradcomp.collectives import Allreduce
from hvd_gradcomp.torch import (
    PowerSGD,
    RandomK,
    compression_from_spec,
    counters,
    load_residual_state_dict,
    residual_state_dict,
)
from hvd_gradcomp.torch.optimizer import exchange_of
from hvd_gradcomp.torch.transport import HorovodTransport

SPECS = [
    "randomk(ratio=0.05)",
    "randomk(ratio=0.05, memory=ef(decay=0.9)) >> fp16",
    "randomk(ratio=0.05) >> bf16",
    "threshold(value=2.0) >> int8",
    "dgc(ratio=0.01, warmup_steps=4) >> fp16",
    "topk(ratio=0.01, granularity=bucket) >> int8",
    "topk(ratio=0.01, granularity=model, memory=dgc(nesterov=True))",
    "powersgd(rank=2)",
    "powersgd(rank=1, granularity=model, memory=dgc)",
    "sketch(ratio=0.005, rows=3)",
    "onebit",
    "linear(bits=4)",
    "natural(memory=ef)",
    "terngrad_shared(memory=ef)",
    "topk(ratio=0.05) >> dynamic8",
]


def step(params: Any, optimizer: Any, number: int, mine: dict[str, np.ndarray] | None = None) -> None:
    optimizer.zero_grad()
    backward(params, gradients(number, hvd.rank()) if mine is None else mine)
    optimizer.step()


def sum_over_workers(x: torch.Tensor, name: str) -> torch.Tensor:
    return hvd.allreduce(x.double(), name=name, op=hvd.Sum)


@pytest.mark.parametrize("spec", SPECS)
def test_what_workers_hand_in_arrives_or_is_kept(spec: str) -> None:
    """Conservation of the sum over the workers, bit-identical parameters, and momentum for small tensors too."""
    params = parameters()
    compression = compression_from_spec(spec)
    memory = compression.memory
    optimizer = optimizer_for(params, compression)
    for number in range(4):
        before = kept(optimizer)
        step(params, optimizer, number)
        after = kept(optimizer)
        mine = gradients(number, hvd.rank())
        for name in sorted(after):
            old, zero = before.get(name, {}), torch.zeros(params[name].numel())
            g = torch.as_tensor(mine[name]).reshape(-1)
            x = g + getattr(memory, "decay", 1.0) * old.get("residual", zero)
            if "velocity" in memory.parts:
                x = x + memory.momentum * (old.get("velocity", zero) + (g if memory.nesterov else 0))
            owed = sum_over_workers(x - after[name].get("residual", zero), f"owed.{name}") / hvd.size()
            arrived = params[name].grad.reshape(-1).double()
            tolerance = 1e-2 if compression.sum_kind != "float32" else 1e-3
            assert (owed - arrived).abs().max() <= tolerance * (1 + x.abs().max()), name
        assert_same_everywhere(params)
    momentum = "velocity" in memory.parts
    assert (kept(optimizer).keys() == SHAPES.keys()) == momentum
    total = counters(optimizer).total
    assert total.sent_bytes < total.dense_bytes


@pytest.mark.parametrize("spec", ["topk(ratio=0.01, memory=dgc)", "powersgd(rank=2)", "randomk(ratio=0.05)"])
def test_all_that_is_kept_is_saved_and_restored(spec: str) -> None:
    """After a restart from a checkpoint, the next step is what it would have been but for who holds which residual."""
    params = parameters()
    optimizer = optimizer_for(params, compression_from_spec(spec))
    for number in range(3):
        step(params, optimizer, number)
    saved = residual_state_dict(optimizer)
    assert saved["step"] == 3
    new_params = parameters()
    new = optimizer_for(new_params, compression_from_spec(spec))
    load_residual_state_dict(new, saved)
    state = kept(new)
    for name, parts in kept(optimizer).items():
        for part, x in parts.items():
            wanted = x.double() if part == "factor" else sum_over_workers(x, f"{name}.{part}") / hvd.size()
            torch.testing.assert_close(state[name][part].double(), wanted, rtol=1e-5, atol=1e-6)
    # With the same gradient everywhere, methods that add see only the sum, which is the same for both.
    if spec != "topk(ratio=0.01, memory=dgc)":
        everyone = gradients(7, 0)
        step(params, optimizer, 3, everyone)
        step(new_params, new, 3, everyone)
        for name, p in params.items():
            torch.testing.assert_close(new_params[name].grad, p.grad, rtol=1e-4, atol=1e-4)
    assert_same_everywhere(new_params)
    assert exchange_of(new).engine.step >= 3


def test_own_exchanges_outside_an_optimizer() -> None:
    """hvd.allreduce with a method of several rounds, or with shared draws."""
    random = np.random.default_rng(5)
    x = torch.as_tensor((random.standard_normal((60, 2)) @ random.standard_normal((2, 50))).astype(np.float32))
    mine = x * (hvd.rank() + 1)
    mean = x * (hvd.size() + 1) / 2
    found = hvd.allreduce(mine, name="low rank", compression=PowerSGD(rank=2))
    torch.testing.assert_close(found, mean, rtol=1e-3, atol=1e-3)
    found = hvd.allreduce(mine, name="drawn", compression=RandomK(ratio=0.1))
    sent = found != 0
    assert 280 <= int(sent.sum()) <= 300
    torch.testing.assert_close(found[sent], mean[sent])


def test_largest_over_the_workers() -> None:
    """What methods with a shared scale ask for before they code."""
    transport = HorovodTransport(hvd.global_process_set)
    values = torch.tensor([float(hvd.rank()), -float(hvd.rank())])
    found = transport.wait(transport.start(Allreduce(values, "float32", "max"), "largest"))
    assert found.tolist() == [hvd.size() - 1, 0.0]


def test_steps_that_are_not_finite_leave_momentum_alone() -> None:
    params = parameters()
    optimizer = optimizer_for(params, compression_from_spec("topk(ratio=0.01, memory=dgc)"))
    step(params, optimizer, 0)
    before = kept(optimizer)
    mine = gradients(1, hvd.rank())
    if hvd.rank() == 1:
        mine["c"][3] = np.nan
    optimizer.zero_grad()
    backward(params, mine)
    optimizer.synchronize()
    assert all(p.grad.isnan().all() for p in params.values())
    assert_same_parts(kept(optimizer), before)
