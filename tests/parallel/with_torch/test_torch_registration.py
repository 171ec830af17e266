"""Plugging into Horovod and out again: stock compressions behave as if this package were not there."""

from __future__ import annotations

from collections.abc import Iterator

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import optimizer as stock
from known_gradients import Reference, all_gradients, assert_gradients, backward, gradients, parameters
from torch_workers import assert_same_everywhere, optimizer_for

import hvd_gradcomp.torch as hg


@pytest.fixture(autouse=True)
def _registered_afterwards() -> Iterator[None]:
    yield
    hg.register()


def methods() -> dict[str, object]:
    classes = (stock._DistributedOptimizer, stock._DistributedAdasumOptimizer)
    return {f"{cls.__name__}.{name}": value for cls in classes for name, value in vars(cls).items()}


def test_unregister_restores_horovods_own_methods() -> None:
    hg.register()
    ours = methods()
    hg.unregister()
    own = methods()
    replaced = {name for name in own if own[name] is not ours[name]}
    assert replaced, "register() replaced nothing"
    assert all(own[name].__code__.co_filename == stock.__file__ for name in replaced)  # type: ignore[attr-defined]
    assert own.keys() == ours.keys()
    hg.unregister()
    assert methods() == own


def test_register_twice_is_register_once() -> None:
    hg.register()
    once = methods()
    hg.register()
    assert methods() == once
    hg.unregister()
    restored = methods()
    assert restored != once
    hg.register()
    hg.register()
    hg.unregister()
    assert methods() == restored


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16], ids=["none", "fp16"])
@pytest.mark.parametrize("options", [{}, {"groups": 2, "backward_passes_per_step": 2}], ids=["plain", "options"])
def test_inert_with_stock_compressions(compression: object, options: dict[str, int]) -> None:
    results = []
    for registered in (True, False):
        (hg.register if registered else hg.unregister)()
        params = parameters()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params.values(), lr=0.1, momentum=0.9),
            named_parameters=params.items(),
            compression=compression,
            **options,
        )
        passes = options.get("backward_passes_per_step", 1)
        for step in range(3):
            for part in range(passes):
                # Whole numbers, whose sum is the same in whatever order Horovod adds them.
                drawn = gradients(10 * step + part, hvd.rank())
                backward(params, {name: g.round() for name, g in drawn.items()})
            optimizer.step()
            optimizer.zero_grad()
        results.append(({name: p.detach().clone() for name, p in params.items()}, optimizer.state_dict()))
    (with_us, state), (without_us, stock_state) = results
    for name, p in with_us.items():
        assert torch.equal(p, without_us[name])
        assert p.abs().max() > 0
    assert state["param_groups"] == stock_state["param_groups"]
    assert_same_everywhere(with_us)


@pytest.mark.parametrize("registered", [True, False])
def test_own_optimizer_needs_no_registration(registered: bool) -> None:
    (hg.register if registered else hg.unregister)()
    before = methods()
    params = parameters()
    optimizer = hg.DistributedOptimizer(
        torch.optim.SGD(params.values(), lr=1.0), named_parameters=params.items(), compression=hg.TopKInt8(ratio=0.05)
    )
    assert methods() == before
    reference = Reference(hg.TopKInt8(ratio=0.05))
    for step in range(2):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
        assert_gradients(params, reference.step(all_gradients(step)), reference)
    assert isinstance(optimizer, torch.optim.SGD)


def test_own_optimizer_has_horovods_signature_and_takes_stock_compressions() -> None:
    import inspect

    assert inspect.signature(hg.DistributedOptimizer) == inspect.signature(hvd.DistributedOptimizer)
    params = parameters()
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    optimizer = hg.DistributedOptimizer(sgd, named_parameters=params.items(), compression=hvd.Compression.fp16)
    backward(params, gradients(0, hvd.rank()))
    optimizer.step()
    assert_same_everywhere(params)
    with pytest.raises(hg.ConfigurationError, match="not made by"):
        hg.counters(optimizer)


def test_an_optimizer_outlives_unregister() -> None:
    hg.register()
    params = parameters()
    optimizer = optimizer_for(params, hg.TopK(ratio=0.1))
    hg.unregister()
    reference = Reference(hg.TopK(ratio=0.1))
    for step in range(2):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank()))
        optimizer.step()
        assert_gradients(params, reference.step(all_gradients(step)), reference)


@pytest.mark.parametrize("compression", [hg.TopKInt8, hg.TopK, hg.Int8], ids=["TopKInt8", "TopK", "Int8"])
def test_the_bare_class_is_an_instance_with_defaults(compression: type) -> None:
    params, params_too = parameters(), parameters()
    optimizer = optimizer_for(params, compression)
    optimizer_too = optimizer_for(params_too, compression())
    reference = Reference(compression)
    for step in range(2):
        expected = reference.step(all_gradients(step))
        for each, its in ((optimizer, params), (optimizer_too, params_too)):
            each.zero_grad()
            backward(its, gradients(step, hvd.rank()))
            each.step()
            assert_gradients(its, expected, reference)
