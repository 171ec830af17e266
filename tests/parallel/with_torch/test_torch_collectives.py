"""How payloads meet, on real workers: conservation, same bits, names and not order, checkpoints, other settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from known_gradients import SHAPES, all_gradients, backward, gradients, parameters
from torch_workers import assert_same_everywhere, assert_same_parts, kept, optimizer_for

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.torch import (
    Int8,
    compression_from_spec,
    counters,
    load_residual_state_dict,
    residual_state_dict,
)
from hvd_gradcomp.torch.optimizer import exchange_of

COLLECTIVES = ("scatter_reduce", "hierarchical")


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers act as two nodes."""
    first = hvd.size() // 2
    monkeypatch.setenv("HVD_GRADCOMP_NODES", f"{first},{hvd.size() - first}")


def owed(optimizer: Any) -> dict[str, np.ndarray]:
    """The workers' mean of what has not been sent, by parameter."""
    mean: Any = residual_state_dict(optimizer)["mean"]
    return {name: parts["residual"].numpy().astype(np.float64) for name, parts in mean.items()}


def step(params: Mapping[str, Any], optimizer: Any, number: int, order: list[str] | None = None) -> None:
    optimizer.zero_grad()
    backward(params, gradients(number, hvd.rank()), order)
    optimizer.step()


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("spec", ["topk(ratio=0.05{}) >> int8", "int8(block=64{})", "topk(ratio=0.05, memory=dgc{})"])
def test_what_is_not_sent_is_kept_by_somebody(spec: str, collective: str) -> None:
    """In the mean over the workers: gradient + owed before = arrived + owed after, in whatever order gradients come."""
    compression = compression_from_spec(spec.format(f", collective={collective}"))
    params = parameters()
    optimizer = optimizer_for(params, compression, groups=2)
    before = None
    velocity: dict[str, Any] = dict.fromkeys(SHAPES, 0.0)
    for number in range(3):
        order = list(np.random.default_rng([number, hvd.rank()]).permutation(list(SHAPES)))
        step(params, optimizer, number, order)
        after = owed(optimizer)
        everyone = all_gradients(number)
        for name, left in after.items():
            mean = np.mean([each[name].reshape(-1).astype(np.float64) for each in everyone.values()], axis=0)
            if compression.memory.is_momentum:
                velocity[name] = mean
                if number:
                    # Where values were sent, velocities are cleared: only the first step has a plain formula.
                    continue
            due = mean + (before[name] if before else 0)
            arrived = params[name].grad.reshape(-1).numpy().astype(np.float64)
            np.testing.assert_allclose(arrived + left, due, rtol=0, atol=1e-4 * np.abs(due).max() + 1e-6)
        before = after
        assert_same_everywhere({name: p.grad for name, p in params.items()})
    total = counters(optimizer).total
    nodewise = collective == "hierarchical" and hvd.size() > 2
    assert (total.scattered > 0, total.nodewise > 0) == (collective == "scatter_reduce", nodewise)
    assert total.fallbacks == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_restart_from_a_checkpoint_with_another_collective(collective: str) -> None:
    """What owners keep of their shares is in the checkpoint, and is sent by whichever exchange follows."""
    params = parameters()
    optimizer = optimizer_for(params, compression_from_spec(f"topk(ratio=0.02, collective={collective})"))
    for number in range(2):
        step(params, optimizer, number)
    saved = residual_state_dict(optimizer)
    before = owed(optimizer)
    for other in (*COLLECTIVES, "allgather"):
        params = parameters()
        optimizer = optimizer_for(params, compression_from_spec(f"topk(ratio=0.02, collective={other})"))
        load_residual_state_dict(optimizer, saved)
        step(params, optimizer, 2)
        after = owed(optimizer)
        for name, left in after.items():
            due = before[name] + np.mean([each[name].reshape(-1) for each in all_gradients(2).values()], axis=0)
            arrived = params[name].grad.reshape(-1).numpy()
            np.testing.assert_allclose(arrived + left, due, rtol=0, atol=1e-5)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_gradient_that_is_not_finite(collective: str) -> None:
    """All workers see NaN, and nothing that is kept changes."""
    params = parameters()
    optimizer = optimizer_for(params, Int8(collective=collective))
    step(params, optimizer, 0)
    before = kept(optimizer)
    mine = gradients(1, hvd.rank())
    if hvd.rank() == hvd.size() - 1:
        mine["c"][3] = np.inf
    optimizer.zero_grad()
    backward(params, mine)
    optimizer.synchronize()
    assert params["c"].grad.isnan().all()
    assert_same_parts(kept(optimizer), before)


def test_workers_that_would_meet_in_different_ways() -> None:
    compression = Int8(collective="scatter_reduce" if hvd.rank() == 0 else "hierarchical")
    params = parameters()
    optimizer = optimizer_for(params, compression)
    with pytest.raises(ConfigurationError, match=r"scatter_reduce.*hierarchical|hierarchical.*scatter_reduce"):
        step(params, optimizer, 0)


def test_in_a_process_set(even_ranks: hvd.ProcessSet) -> None:
    """Owners are the workers of the process set."""
    if not even_ranks.included():
        return
    params = parameters()
    optimizer = optimizer_for(params, Int8(collective="scatter_reduce"), process_set=even_ranks)
    step(params, optimizer, 0)
    everyone = all_gradients(0, even_ranks.ranks)
    for name, p in params.items():
        mean = np.mean([each[name] for each in everyone.values()], axis=0)
        np.testing.assert_allclose(p.grad.numpy(), mean, rtol=0, atol=0.02 * np.abs(mean).max())
    assert_same_everywhere({name: p.grad for name, p in params.items()}, even_ranks)


def assert_conserved(params: Mapping[str, Any], optimizer: Any, number: int, before: Mapping[str, np.ndarray]) -> None:
    """Of the step that was just made with the gradients of `number`."""
    for name, left in owed(optimizer).items():
        due = np.mean([each[name].reshape(-1) for each in all_gradients(number).values()], axis=0) + before.get(name, 0)
        arrived = params[name].grad.reshape(-1).numpy()
        np.testing.assert_allclose(arrived + left, due, rtol=0, atol=1e-5)


def test_uneven_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without a share take part all the same, and operations without a name still match afterwards."""
    monkeypatch.setenv("HVD_GRADCOMP_NODES", f"1,{hvd.size() - 1}")
    params = parameters()
    optimizer = optimizer_for(params, compression_from_spec("topk(ratio=0.05, collective=hierarchical)"), groups=2)
    before: dict[str, np.ndarray] = {}
    for number in range(2):
        step(params, optimizer, number)
        assert_conserved(params, optimizer, number, before)
        before = owed(optimizer)
        assert_same_everywhere({name: p.grad for name, p in params.items()})
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_the_cheapest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network as configured, and on the one that is there."""
    monkeypatch.setenv("HVD_GRADCOMP_NETWORK", "1e-6,1e8,1e-7,1e12")
    for _ in range(2):
        params = parameters()
        optimizer = optimizer_for(params, compression_from_spec("topk(ratio=0.05, collective=auto) >> int8"))
        step(params, optimizer, 0)
        assert_conserved(params, optimizer, 0, {})
        assert_same_everywhere({name: p.grad for name, p in params.items()})
        chosen = exchange_of(optimizer).engine.chooser
        assert chosen is not None
        networks = [links.between for links in chosen.links.values()]
        rates = [rate for each in chosen.computing.values() for rate in each.values()]
        numbers = [number for each in networks for number in (each.latency_s, each.bytes_per_s)] + rates
        assert_same_everywhere({"speeds": torch.tensor(numbers, dtype=torch.float64)})
        assert ("HVD_GRADCOMP_NETWORK" in os.environ) == (not rates)
        total = counters(optimizer).total
        # With measured numbers any of them may be.
        assert "HVD_GRADCOMP_NETWORK" not in os.environ or (total.nodewise > 0) == (hvd.size() > 2)
        monkeypatch.delenv("HVD_GRADCOMP_NETWORK", raising=False)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_frozen_parameters_keep_what_is_owed_to_them(collective: str) -> None:
    params = parameters()
    optimizer = optimizer_for(params, compression_from_spec(f"topk(ratio=0.05, collective={collective})"))
    for number in range(2):
        step(params, optimizer, number)
    before = kept(optimizer)["a.weight"]
    params["a.weight"].requires_grad_(False)
    optimizer.zero_grad()
    backward(params, {name: g for name, g in gradients(2, hvd.rank()).items() if name != "a.weight"})
    optimizer.step()
    assert_same_parts({"a.weight": kept(optimizer)["a.weight"]}, {"a.weight": before})
