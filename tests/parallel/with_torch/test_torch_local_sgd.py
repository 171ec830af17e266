"""Local SGD: what workers hold after they met, by which way, and what keeps them from meeting."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from known_gradients import Reference, backward, gradients, parameters
from torch_workers import assert_same_everywhere

from hvd_gradcomp.torch import (
    ConfigurationError,
    DiLoCo,
    LocalSGD,
    NonFiniteError,
    PostLocal,
    PowerSGD,
    TopKInt8,
    UnsupportedError,
)

COMPRESSION = TopKInt8(ratio=0.05)
Params = dict[str, torch.nn.Parameter]


def sgd(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params.values(), **{"lr": 0.25, **options})


def run(params: Params, optimizer: Any, steps: range, rank: int | None = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank() if rank is None else rank))
        optimizer.step()


def change_of(rank: int, steps: range) -> dict[str, np.ndarray]:
    """By how much the parameters of a worker that began with zeros shrink, with `sgd` and no momentum."""
    params = parameters()
    run(params, sgd(params), steps, rank)
    return {name: -p.detach().numpy() for name, p in params.items()}


def differ(params: Params) -> bool:
    everybody = hvd.allgather(params["c"].detach().unsqueeze(0), name="everybody")
    return not torch.equal(everybody[0], everybody[1])


def test_meeting_after_every_step_is_plain_averaging_bit_for_bit() -> None:
    params, plain = parameters(), parameters()
    optimizer = LocalSGD(sgd(params, momentum=0.9), sync_every=1, named_parameters=params.items())
    inner = sgd(plain, momentum=0.9)
    for step in range(4):
        run(params, optimizer, range(step, step + 1))
        run(plain, inner, range(step, step + 1))
        averages = hvd.grouped_allreduce([p.detach() for p in plain.values()], name="plain", op=hvd.Average)
        for p, average in zip(plain.values(), averages, strict=True):
            p.data.copy_(average)
        for name, p in params.items():
            assert torch.equal(p, plain[name]), name
    assert optimizer.steps == optimizer.counters.total.exchanges == 4


def test_between_meetings_workers_are_on_their_own() -> None:
    params = parameters()
    optimizer = LocalSGD(sgd(params), sync_every=3)
    run(params, optimizer, range(2))
    assert differ(params)
    run(params, optimizer, range(2, 3))
    assert_same_everywhere(params)
    mean = np.mean([change_of(rank, range(3))["c"] for rank in range(hvd.size())], axis=0)
    np.testing.assert_allclose(-params["c"].detach(), mean, atol=1e-5)
    run(params, optimizer, range(3, 4))
    optimizer.synchronize()
    assert_same_everywhere(params)
    optimizer.synchronize()
    assert optimizer.counters.total.exchanges == 2


def test_a_schedule_says_when_to_meet() -> None:
    params = parameters()
    optimizer = LocalSGD(sgd(params), sync_every=PostLocal(3, after=2))
    meetings = []
    for step in range(9):
        run(params, optimizer, range(step, step + 1))
        meetings.append(optimizer.counters.total.exchanges)
    assert meetings == [1, 2, 2, 2, 3, 3, 3, 4, 4]


def test_changes_are_compressed_with_error_feedback() -> None:
    params = parameters()
    optimizer = LocalSGD(sgd(params), 2, named_parameters=params.items(), compression=COMPRESSION)
    reference = Reference(COMPRESSION)
    anchor = {name: np.zeros(p.shape, np.float32) for name, p in params.items()}
    for meeting in range(3):
        steps = range(2 * meeting, 2 * meeting + 2)
        changes = {}
        for rank in range(hvd.size()):
            theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in anchor.items()}
            run(theirs, sgd(theirs), steps, rank)
            changes[rank] = {name: anchor[name] - p.detach().numpy() for name, p in theirs.items()}
        mean = reference.step(changes)
        run(params, optimizer, steps)
        for name, p in params.items():
            if reference.is_exact(anchor[name]):
                np.testing.assert_array_equal(p.detach(), anchor[name] - mean[name])
            else:
                np.testing.assert_allclose(p.detach(), anchor[name] - mean[name], atol=1e-5)
            anchor[name] = p.detach().numpy().copy()
    assert_same_everywhere(params)
    sent = optimizer.counters.total
    assert sent.sent_bytes < 0.2 * sent.dense_bytes


def test_a_method_with_rounds_of_its_own() -> None:
    params = parameters()
    optimizer = LocalSGD(sgd(params), 2, named_parameters=params.items(), compression=PowerSGD(rank=2))
    run(params, optimizer, range(4))
    assert_same_everywhere(params)
    assert params["a.weight"].abs().sum() > 0


def test_diloco_steps_along_the_average_change() -> None:
    params = parameters()
    optimizer = DiLoCo(sgd(params), 2, outer_lr=0.5, outer_momentum=0.8, named_parameters=params.items())
    expected = parameters()
    outer = torch.optim.SGD(expected.values(), lr=0.5, momentum=0.8, nesterov=True)
    for meeting in range(3):
        steps = range(2 * meeting, 2 * meeting + 2)
        run(params, optimizer, steps)
        changes = [change_of(rank, steps) for rank in range(hvd.size())]
        for name, p in expected.items():
            p.grad = torch.tensor(np.mean([change[name] for change in changes], axis=0))
        outer.step()
        for name, p in params.items():
            torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-4)
    assert_same_everywhere(params)


def test_diloco_without_momentum_at_rate_one_is_local_sgd() -> None:
    params, plain = parameters(), parameters()
    run(params, DiLoCo(sgd(params), 2, outer_lr=1, outer_momentum=0), range(4))
    run(plain, LocalSGD(sgd(plain), 2), range(4))
    for name, p in params.items():
        torch.testing.assert_close(p, plain[name], rtol=1e-5, atol=1e-5)


def test_training_goes_on_after_loading_as_if_it_had_not_stopped() -> None:
    params = parameters()
    optimizer = DiLoCo(sgd(params, momentum=0.9), 2, compression=COMPRESSION)
    run(params, optimizer, range(3))
    optimizer.synchronize()
    state = copy.deepcopy(optimizer.state_dict())  # as a file would be: PyTorch's own shares memory
    # Residuals are saved as the workers' mean, so the one that goes on has to have that as well.
    owed = optimizer.residual_state_dict()
    optimizer.load_residual_state_dict(owed)
    others = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    resumed = DiLoCo(sgd(others, momentum=0.9), 2, compression=COMPRESSION)
    resumed.load_state_dict(state)
    resumed.load_residual_state_dict(owed)
    for each, its in ((optimizer, params), (resumed, others)):
        run(its, each, range(3, 8))
        each.synchronize()
    assert resumed.steps == optimizer.steps == 8
    # Small tensors are added in an order of Horovod's own.
    for name, p in params.items():
        torch.testing.assert_close(p, others[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("averaged", [True, False])
def test_buffers(averaged: bool) -> None:
    params = parameters()
    statistics, count = torch.full((4,), float(hvd.rank())), torch.tensor(hvd.rank())
    buffers = {"mean": statistics, "count": count}.items() if averaged else ()
    optimizer = LocalSGD(sgd(params), 1, buffers=buffers)
    run(params, optimizer, range(1))
    assert statistics.tolist() == [(hvd.size() - 1) / 2 if averaged else hvd.rank()] * 4
    assert count == hvd.rank()


def test_bfloat16_parameters_do_not_lose_small_changes() -> None:
    params = parameters(dtype=torch.bfloat16)
    for p in params.values():
        p.data.fill_(1.0)
    optimizer = DiLoCo(sgd(params, lr=2.0**-10), 1, outer_lr=0.25, outer_momentum=0)
    for _ in range(8):
        for p in params.values():
            p.grad = torch.full_like(p, 8.0)
        optimizer.step()
    # A quarter of a change of 2**-7 is half of what bfloat16 can tell apart below 1: each would be rounded away.
    assert params["c"].max() < 1.0
    assert_same_everywhere(params)


def test_a_schedule_of_the_learning_rate_and_a_step_that_overflows() -> None:
    params = parameters()
    optimizer = LocalSGD(sgd(params, lr=1.0), 2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        for p in params.values():
            # Scaled by 4. One worker's third step overflows, and it alone leaves the step out.
            p.grad = torch.full_like(p, float("inf") if step == 2 and hvd.rank() == 0 else 4.0)
        scaler.scale(torch.tensor(1.0))
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    assert_same_everywhere(params)
    # Two steps of 1. Then at half the rate two of 1 on most workers, and one on worker 0: of 2, by its halved scale.
    assert params["c"][0].item() == -3.0
    assert optimizer.param_groups[0]["lr"] == 0.25


@contextlib.contextmanager
def refused(error: type[Exception], text: str) -> Any:
    with pytest.raises(error, match=text):
        yield
    hvd.barrier()


def test_workers_with_different_settings_are_told() -> None:
    params = parameters()
    optimizer = LocalSGD(sgd(params), 1 + hvd.rank() % 2)
    with refused(
        ConfigurationError, r"rank 1 has sync_every = '2', rank .* has|rank 0 has sync_every = '1', rank .* has"
    ):
        run(params, optimizer, range(2))
    params = parameters()
    optimizer = LocalSGD(sgd(params), 3, compression=COMPRESSION)
    params["c"].data[7] = hvd.rank()
    with refused(ConfigurationError, "starting values"):
        run(params, optimizer, range(3))
    params = parameters()
    optimizer = LocalSGD(sgd(params), 9)
    run(params, optimizer, range(1 + hvd.rank() % 2))
    with refused(ConfigurationError, "local steps"):
        optimizer.synchronize()


def test_a_change_that_is_not_finite_is_an_error_on_every_worker() -> None:
    params = parameters()
    optimizer = LocalSGD(sgd(params), 1, named_parameters=params.items(), compression=COMPRESSION)
    run(params, optimizer, range(1))
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer.zero_grad()
    backward(params, gradients(1, hvd.rank()))
    params["a.bias"].grad[0] = float("nan") if hvd.rank() == 1 else 1.0
    with refused(NonFiniteError, "lower the learning rate"):
        optimizer.step()
    # The state that all had in common is still there.
    with pytest.warns(UserWarning, match="1 steps after"):
        anchors = optimizer.state_dict()["anchors"]
    assert all(torch.equal(anchors[name], value) for name, value in before.items())


def test_what_cannot_work_is_refused() -> None:
    params = parameters()
    with pytest.raises(ConfigurationError, match="exchanges already"):
        LocalSGD(hvd.DistributedOptimizer(sgd(params)), 4)
    with pytest.raises(ConfigurationError, match="FP16"):
        LocalSGD(sgd(params), 4, compression=hvd.Compression.fp16)
    for wrong in (0, True, 2.5):
        with pytest.raises(ConfigurationError, match="whole number"):
            LocalSGD(sgd(params), wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="after 0 steps"):
        LocalSGD(sgd(params), lambda done: 0)
    with pytest.raises(ConfigurationError, match="has no name"):
        LocalSGD(sgd(params), 4, named_parameters=[("c", params["c"])])
    with pytest.raises(ConfigurationError, match="outer_momentum"):
        DiLoCo(sgd(params), 4, outer_momentum=1)
    optimizer = LocalSGD(sgd(params), 4)
    with pytest.raises(UnsupportedError, match="new parameters"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(ConfigurationError, match="ordinary optimizer"):
        optimizer.load_state_dict(sgd(params).state_dict())
    others = {"other": torch.nn.Parameter(torch.zeros(3))}
    saved = DiLoCo(sgd(others), 4, named_parameters=others.items())
    others["other"].grad = torch.ones(3)
    saved.step()
    with pytest.warns(UserWarning, match="1 steps after"):
        state = saved.state_dict()
    with pytest.raises(ConfigurationError, match="other parameters"):
        DiLoCo(sgd(params), 4).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="outer optimizer"):
        LocalSGD(sgd(others), 4, named_parameters=others.items(), compression=COMPRESSION).load_state_dict(state)
