"""What may happen around a step: clipping, skipped steps, overflow, several optimizers, every kind of update rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from known_gradients import SHAPES, Reference, all_gradients, assert_gradients, backward, gradients, parameters
from torch_workers import assert_same_everywhere, optimizer_for

from hvd_gradcomp.torch import FP16, Int8, TopKInt8, counters
from hvd_gradcomp.torch.optimizer import exchange_of

COMPRESSION = TopKInt8(ratio=0.05)


def residuals(optimizer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in exchange_of(optimizer).engine.residuals.items()}


def assert_residuals(optimizer: Any, expected: dict[str, torch.Tensor]) -> None:
    found = exchange_of(optimizer).engine.residuals
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def exchanges(optimizer: Any) -> int:
    """How often the first compressed bucket was exchanged."""
    return next(bucket.exchanges for name, bucket in counters(optimizer).buckets.items() if name != "dense")


def test_clipping_between_synchronize_and_step() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    reference = Reference(COMPRESSION)
    for step in range(3):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        optimizer.synchronize()
        expected = reference.step(all_gradients(step))
        assert_gradients(params, expected, reference)
        kept = residuals(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        total = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in expected.values()))
        assert norm.item() == pytest.approx(total, rel=1e-5)
        before = params["c"].detach().clone()
        with optimizer.skip_synchronize():
            optimizer.step()
        torch.testing.assert_close(before - params["c"], torch.as_tensor(expected["c"]) / norm, rtol=1e-3, atol=1e-5)
        # Clipping changes what is applied, not what is still owed.
        assert_residuals(optimizer, kept)
    assert exchanges(optimizer) == 3
    assert_same_everywhere(params)


@pytest.mark.parametrize("compression", [COMPRESSION, FP16], ids=["topk_int8", "fp16"])
def test_step_after_synchronize_exchanges_once(compression: Any) -> None:
    params, params_too = parameters(), parameters()
    twice, once = optimizer_for(params, compression), optimizer_for(params_too, compression)
    for step in range(3):
        for optimizer, its in ((twice, params), (once, params_too)):
            optimizer.zero_grad()
            backward(its, gradients(step, hvd.rank()))
        twice.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            twice.step()
        once.step()
    assert exchanges(twice) == exchanges(once) == 3
    # Horovod may add the two in different orders, and rounds to float16 after each addition.
    tolerance = 3e-2 if compression is FP16 else 1e-6
    for name, p in params.items():
        torch.testing.assert_close(p, params_too[name], rtol=tolerance, atol=tolerance)
    assert_same_everywhere(params)


def test_synchronize_three_times() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    backward(params, gradients(0, hvd.rank()))
    for _ in range(3):
        optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    reference = Reference(COMPRESSION)
    assert_gradients(params, reference.step(all_gradients(0)), reference)
    assert exchanges(optimizer) == 1


def test_a_new_backward_pass_after_synchronize_is_exchanged() -> None:
    """Without zero_grad the averaged gradient is part of the next one, as Horovod has it."""
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    reference = Reference(COMPRESSION)
    backward(params, gradients(0, hvd.rank()))
    optimizer.synchronize()
    average = reference.step(all_gradients(0))
    backward(params, gradients(1, hvd.rank()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    # The small ones are added in Horovod's order; take what this worker really holds.
    for name in ("a.weight", "b.weight", "c"):
        both = {
            rank: {name: grads[name] + average[name].astype(np.float32)} for rank, grads in all_gradients(1).items()
        }
        assert_gradients(params, reference.step(both), reference)
    assert exchanges(optimizer) == 2


def test_no_zero_grad_at_all() -> None:
    """Gradients then pile up, on the averages of the steps before: all workers must still agree."""
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    for step in range(3):
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
    assert_same_everywhere(params)


@pytest.mark.parametrize("zero", ["optimizer", "to_none", "to_zero"])
def test_either_zero_grad(zero: str) -> None:
    params = parameters()
    model = torch.nn.ParameterList(params.values())
    optimizer = optimizer_for(params, COMPRESSION)
    reference = Reference(COMPRESSION)
    for step in range(3):
        if zero == "optimizer":
            optimizer.zero_grad()
        else:
            model.zero_grad(set_to_none=zero == "to_none")
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
        assert_gradients(params, reference.step(all_gradients(step)), reference)


def test_zero_grad_between_backward_and_step_is_refused_as_by_horovod() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    backward(params, gradients(0, hvd.rank()))
    with pytest.raises(AssertionError, match="race condition"):
        optimizer.zero_grad()
    optimizer.step()


# -- gradients that are not finite ------------------------------------------------------------------------------------


def poisoned(step: int, rank: int, name: str, value: float) -> dict[str, np.ndarray]:
    grads = gradients(step, rank)
    if rank == hvd.size() - 1:
        grads[name].reshape(-1)[1] = value
    return grads


@pytest.mark.parametrize("compression", [COMPRESSION, FP16, Int8], ids=["topk_int8", "fp16", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_worker_is_not_finite(compression: Any, value: float) -> None:
    """All see NaN in the bucket, no residual changes, and training goes on as if the step had not been."""
    params = parameters()
    optimizer = optimizer_for(params, compression)
    reference = Reference(compression)
    for step in (0, 1, 2):
        optimizer.zero_grad()
        kept = residuals(optimizer) if step else {}
        if step == 1:
            backward(params, poisoned(step, hvd.rank(), "a.weight", value))
            optimizer.synchronize()
            assert all(params[name].grad.isnan().all() for name in ("a.weight", "b.weight", "c"))  # type: ignore
            assert_residuals(optimizer, kept)
            assert counters(optimizer).total.non_finite == 1
            continue
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
        if compression is not FP16:
            assert_gradients(params, reference.step(all_gradients(step)), reference)
    assert_same_everywhere(params)


def test_loss_scaling_skips_the_step_on_every_worker() -> None:
    """torch.amp.GradScaler as Horovod's examples use it: synchronize, unscale, step without synchronizing."""
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(4):
        optimizer.zero_grad()
        before = {name: p.detach().clone() for name, p in params.items()}
        kept = residuals(optimizer) if step else {}
        grads = gradients(step, hvd.rank())
        if step == 2:
            grads = poisoned(step, hvd.rank(), "b.weight", float("inf"))
        loss = sum(
            (params[name] * torch.as_tensor(g)).nan_to_num(posinf=float("inf")).sum() for name, g in grads.items()
        )
        scaler.scale(torch.as_tensor(loss)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(before[name], p) for name, p in params.items())
        assert moved == (step != 2)
        assert scaler.get_scale() == (4.0 if step < 2 else 2.0)
        if step == 2:
            assert_residuals(optimizer, kept)
    assert_same_everywhere(params)


@pytest.mark.parametrize("name", ["c", "a.bias"], ids=["another bucket", "a small tensor"])
@pytest.mark.parametrize("groups", [None, 3])
def test_a_step_that_will_be_skipped_sends_nothing_from_any_bucket(name: str, groups: int | None) -> None:
    """Loss scaling skips the whole step: what finite buckets sent in it would be lost."""
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION, groups=groups)
    reference = Reference(COMPRESSION)
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            kept = residuals(optimizer)
            backward(params, poisoned(step, hvd.rank(), name, float("inf")))
            optimizer.synchronize()
            assert_residuals(optimizer, kept)
            # With groups the others are finite; whoever steps all the same must not apply them either.
            assert all(params[each].grad.isnan().all() for each in ("a.weight", "b.weight", "c"))  # type: ignore
            continue
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
        assert_gradients(params, reference.step(all_gradients(step)), reference)


# -- update rules and other optimizers --------------------------------------------------------------------------------

RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_update_rule_sees_the_average(rule: str) -> None:
    """The same rule without Horovod, fed with the reference's averages, takes the same steps."""
    params, alone = parameters(), parameters()
    optimizer = hvd.DistributedOptimizer(
        RULES[rule](params.values()), named_parameters=params.items(), compression=COMPRESSION
    )
    hvd.broadcast_parameters(dict(params), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    plain = RULES[rule](alone.values())
    reference = Reference(COMPRESSION)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scheduler_alone = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    # The broadcast made a first step with zero gradients, which counts in Adam's bias correction.
    for p in alone.values():
        p.grad = torch.zeros_like(p)
    plain.step()
    for step in range(4):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
        for name, g in reference.step(all_gradients(step)).items():
            alone[name].grad = torch.as_tensor(g.astype(np.float32))
        plain.step()
        scheduler.step()
        scheduler_alone.step()
    for name, p in params.items():
        torch.testing.assert_close(p, alone[name], rtol=1e-4, atol=1e-5)
    assert_same_everywhere(params)


@pytest.mark.parametrize("named", [True, False])
def test_two_optimizers_take_turns(named: bool) -> None:
    """As in a GAN, and with both on their way at once; also when nobody named the parameters."""
    both = [parameters(), parameters()]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(params.values(), lr=1.0),
            named_parameters=params.items() if named else None,
            compression=COMPRESSION,
        )
        for params in both
    ]
    references = [Reference(COMPRESSION), Reference(COMPRESSION)]
    for step in range(3):
        for index in (0, 1):
            optimizers[index].zero_grad()
        # Workers take the two in different orders.
        for index in (0, 1) if (hvd.rank() + step) % 2 else (1, 0):
            backward(both[index], gradients(10 * step + index, hvd.rank()))
        for index in (1, 0):
            optimizers[index].step()
        for index in (0, 1):
            expected = references[index].step(all_gradients(10 * step + index))
            assert_gradients(both[index], expected, references[index])
    for params in both:
        assert_same_everywhere(params)


def test_a_gan() -> None:
    """The discriminator's parameters stand aside while the generator learns through them."""
    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    discriminator = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.Adam(each.parameters(), lr=1e-3), compression=COMPRESSION)
        for each in (generator, discriminator)
    ]
    random = torch.Generator().manual_seed(hvd.rank())
    for _ in range(3):
        noise, real = torch.randn(16, 8, generator=random), torch.randn(16, 32, generator=random)
        for p in discriminator.parameters():
            p.requires_grad_(True)
        optimizers[1].zero_grad()
        (discriminator(generator(noise).detach()).mean() - discriminator(real).mean()).backward()
        optimizers[1].step()
        for p in discriminator.parameters():
            p.requires_grad_(False)
        optimizers[0].zero_grad()
        (-discriminator(generator(noise)).mean()).backward()
        optimizers[0].step()
    for each in (generator, discriminator):
        assert_same_everywhere(dict(each.named_parameters()))


def test_several_parameter_groups() -> None:
    params = parameters()
    rates = {"a": 1.0, "b": 0.5, "c": 0.25}
    sgd = torch.optim.SGD(
        [
            {"params": [p for name, p in params.items() if name[0] == letter], "lr": rate}
            for letter, rate in rates.items()
        ],
        lr=9.0,
    )
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=params.items(), compression=COMPRESSION)
    backward(params, gradients(0, hvd.rank()))
    optimizer.step()
    expected = Reference(COMPRESSION).step(all_gradients(0))
    for name, p in params.items():
        torch.testing.assert_close(p.detach(), -rates[name[0]] * torch.as_tensor(expected[name]).float())


def test_optimizer_state_has_horovods_form() -> None:
    states = []
    for compression in (COMPRESSION, hvd.Compression.none):
        params = parameters()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params.values(), lr=0.1, momentum=0.9), params.items(), compression=compression
        )
        backward(params, gradients(0, hvd.rank()))
        optimizer.step()
        states.append(optimizer.state_dict())
    ours, stock = states
    assert ours.keys() == stock.keys()
    assert ours["param_groups"] == stock["param_groups"]
    assert {key: value.keys() for key, value in ours["state"].items()} == {
        key: value.keys() for key, value in stock["state"].items()
    }
    assert len(SHAPES) == len(ours["state"])
