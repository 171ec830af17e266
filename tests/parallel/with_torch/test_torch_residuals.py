"""Residuals on real workers: nothing is lost between steps, and checkpoints keep what is still owed."""

from __future__ import annotations

import io
import warnings
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from known_gradients import Reference, all_gradients, assert_gradients, backward, gradients, parameters
from torch_workers import assert_same_everywhere, optimizer_for, train

from hvd_gradcomp.torch import (
    ConfigurationError,
    NoMemory,
    TopK,
    TopKInt8,
    compression_from_spec,
    load_residual_state_dict,
    residual_state_dict,
)
from hvd_gradcomp.torch.optimizer import exchange_of

COMPRESSION = TopKInt8(ratio=0.05)
LARGE = ("a.weight", "b.weight", "c")


def residuals(optimizer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in exchange_of(optimizer).engine.residuals.items()}


def owed(optimizer: Any, ranks: hvd.ProcessSet = hvd.global_process_set) -> dict[str, torch.Tensor]:
    """The sum of all workers' residuals."""
    found = exchange_of(optimizer).engine.residuals
    return {
        name: hvd.allreduce(found[name].double(), name=f"owed.{name}", op=hvd.Sum, process_set=ranks) for name in LARGE
    }


@pytest.mark.parametrize("spec", ["topk(ratio=0.01) >> int8", "topk(ratio=0.1)", "fp16", "bf16", "int8(memory=ef)"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_conservation(spec: str, op: Any) -> None:
    """All gradients so far = all results so far + what is still owed, summed over the workers."""
    params = parameters()
    optimizer = optimizer_for(params, compression_from_spec(spec), op=op)
    given = {name: np.zeros(params[name].shape) for name in LARGE}
    got = {name: np.zeros(params[name].shape) for name in LARGE}
    for step in range(5):
        train(params, optimizer, [step])
        for name in LARGE:
            given[name] += sum(g[name].astype(np.float64) for g in all_gradients(step).values())
            got[name] += params[name].grad.double().numpy() * (hvd.size() if op == hvd.Average else 1)  # type: ignore
    left = owed(optimizer)
    # Sums in bfloat16 and float16 are rounded once more on their way, which no worker's residual can know.
    coarse = {"bf16": 2e-2, "fp16": 2e-3}.get(spec, 1e-5)
    for name in LARGE:
        total = got[name].reshape(-1) + left[name].numpy()
        scale = np.abs(given[name]).max()
        np.testing.assert_allclose(total, given[name].reshape(-1), atol=coarse * scale, rtol=0)


def test_no_memory_keeps_nothing() -> None:
    params = parameters()
    optimizer = optimizer_for(params, TopK(ratio=0.05, memory=NoMemory()))
    train(params, optimizer, [0, 1])
    assert not residuals(optimizer)


def save_and_load(checkpoint: Any) -> Any:
    """Through a file, as a script does it: rank 0 saves and loads, the others are told."""
    loaded = None
    if hvd.rank() == 0:
        file = io.BytesIO()
        torch.save(checkpoint, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    return hvd.broadcast_object(loaded, root_rank=0, name="checkpoint")


def test_a_checkpoint_holds_the_mean_and_restores_it_everywhere() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    train(params, optimizer, [0, 1])
    before, mine = owed(optimizer), residuals(optimizer)
    state = residual_state_dict(optimizer)
    assert all(torch.equal(residuals(optimizer)[name], mine[name]) for name in LARGE), "saving changed a residual"
    fresh = optimizer_for(params, COMPRESSION)
    load_residual_state_dict(fresh, save_and_load(state))
    assert_same_everywhere(residuals(fresh))
    after = owed(fresh)
    for name in LARGE:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-5)
        mean = before[name] / hvd.size()
        torch.testing.assert_close(residuals(fresh)[name].double(), mean, rtol=1e-5, atol=1e-5)
        assert mean.abs().max() > 0


def test_training_goes_on_from_a_checkpoint_as_the_reference_does() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    train(params, optimizer, [0, 1])
    state = save_and_load(residual_state_dict(optimizer))
    again = parameters()
    resumed = optimizer_for(again, COMPRESSION)
    load_residual_state_dict(resumed, state)
    reference = Reference(COMPRESSION)
    for rank in reference.ranks:
        reference.residuals[rank] = {name: residuals(resumed)[name].numpy() for name in LARGE}
    for step in (2, 3):
        resumed.zero_grad()
        backward(again, gradients(step, hvd.rank()))
        resumed.step()
        assert_gradients(again, reference.step(all_gradients(step)), reference)


def test_another_number_of_workers_loads_the_same_mean(even_ranks: hvd.ProcessSet) -> None:
    """Saved by all, loaded by some (and the reverse): the mean, on which averaged updates depend, is conserved."""
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    train(params, optimizer, [0, 1])
    before = owed(optimizer)
    state = save_and_load(residual_state_dict(optimizer))
    fewer = optimizer_for(parameters(), COMPRESSION, process_set=even_ranks)
    if even_ranks.included():
        load_residual_state_dict(fewer, state)
        after = owed(fewer, even_ranks)
        for name in LARGE:
            torch.testing.assert_close(after[name] / even_ranks.size(), before[name] / hvd.size(), rtol=1e-5, atol=1e-5)
        state = residual_state_dict(fewer)
    else:
        with pytest.raises(ConfigurationError, match="not in the optimizer's process set"):
            residual_state_dict(fewer)
    everybody = optimizer_for(parameters(), COMPRESSION)
    load_residual_state_dict(everybody, save_and_load(state))
    for name, total in owed(everybody).items():
        torch.testing.assert_close(total, before[name], rtol=1e-5, atol=1e-5)


def test_saving_before_the_first_step() -> None:
    optimizer = optimizer_for(parameters(), COMPRESSION)
    fresh = optimizer_for(parameters(), COMPRESSION)
    load_residual_state_dict(fresh, save_and_load(residual_state_dict(optimizer)))
    assert all(not value.any() for value in residuals(fresh).values())


def test_the_broadcast_of_optimizer_state_leaves_residuals_alone() -> None:
    params = parameters()
    sgd = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, params.items(), compression=COMPRESSION)
    train(params, optimizer, [0, 1])
    mine = residuals(optimizer)
    first = hvd.broadcast(mine["c"], root_rank=0, name="first")
    assert hvd.rank() == 0 or not torch.equal(first, mine["c"])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(dict(params), root_rank=0)
    for name, value in mine.items():
        assert torch.equal(residuals(optimizer)[name], value)


def test_resuming_as_scripts_do_keeps_what_was_owed() -> None:
    """Rank 0 alone loads the optimizer, everybody the residuals, then comes Horovod's broadcast."""
    params = parameters()
    sgd = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, params.items(), compression=COMPRESSION)
    train(params, optimizer, [0, 1])
    before = owed(optimizer)
    saved = {"optimizer": optimizer.state_dict(), "residuals": residual_state_dict(optimizer)}
    again = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    sgd = torch.optim.SGD(again.values(), lr=0.1, momentum=0.9)
    resumed = hvd.DistributedOptimizer(sgd, again.items(), compression=COMPRESSION)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if hvd.rank() == 0:
            resumed.load_state_dict(saved["optimizer"])
        load_residual_state_dict(resumed, save_and_load(saved["residuals"]))
        hvd.broadcast_optimizer_state(resumed, root_rank=0)
        for name, total in owed(resumed).items():
            torch.testing.assert_close(total, before[name], rtol=1e-5, atol=1e-5)
        train(again, resumed, [2])
    assert_same_everywhere(again)


def test_a_checkpoint_without_residuals_is_a_warning() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    train(params, optimizer, [0])
    with pytest.warns(UserWarning, match="no residuals"):
        load_residual_state_dict(optimizer, None)
    assert not residuals(optimizer)
    train(params, optimizer, [1])
    assert_same_everywhere(params)


def test_an_optimizer_state_without_residuals_is_a_warning_once() -> None:
    saved = optimizer_for(parameters(), COMPRESSION).state_dict()
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    optimizer.load_state_dict(saved)
    with pytest.warns(UserWarning, match="loaded without the residuals"):
        train(params, optimizer, [0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(params, optimizer, [1])
        # In the course of training a state may be loaded as well: what is owed then is still here.
        optimizer.load_state_dict(optimizer.state_dict())
        train(params, optimizer, [2])


def test_no_warning_where_there_is_nothing_to_lose() -> None:
    for compression in (TopK(memory=NoMemory()), TopKInt8(dense_below=10**6)):
        params = parameters()
        optimizer = optimizer_for(params, compression)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(optimizer.state_dict())
            train(params, optimizer, [0])


@pytest.mark.parametrize("groups", [None, 3])
def test_a_state_loaded_in_the_middle_of_a_step_starts_a_new_step(groups: int | None) -> None:
    """As Horovod forgets its handles; some exchanges are on their way, some wait for the rest of a bucket."""
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION, groups=groups)
    train(params, optimizer, [0])
    kept = residuals(optimizer)
    backward(params, {name: g for name, g in gradients(1, hvd.rank()).items() if name in ("c", "a.bias")})
    optimizer.load_state_dict(optimizer.state_dict())
    for name, value in kept.items():
        assert torch.equal(residuals(optimizer)[name], value)
    train(params, optimizer, [2])
    reference = Reference(COMPRESSION)
    reference.step(all_gradients(0))
    assert_gradients(params, reference.step(all_gradients(2)), reference)


@pytest.mark.parametrize("state", [{}, {"format": "another"}, 3, {"mean": {}}], ids=str)
def test_something_else_than_residuals_is_refused(state: Any) -> None:
    optimizer = optimizer_for(parameters(), COMPRESSION)
    with pytest.raises(ConfigurationError, match="expected residuals"):
        load_residual_state_dict(optimizer, state)


def test_residuals_of_another_model_are_refused() -> None:
    optimizer = optimizer_for(parameters(), COMPRESSION)
    state = residual_state_dict(optimizer)
    other = optimizer_for(parameters({"c": (4999,), "a.weight": (3000,)}), COMPRESSION)
    with pytest.raises(ConfigurationError, match="another model"):
        load_residual_state_dict(other, state)


def test_a_stock_optimizer_has_no_residuals() -> None:
    optimizer = optimizer_for(parameters(), hvd.Compression.none)
    with pytest.raises(ConfigurationError, match="not made by"):
        residual_state_dict(optimizer)
