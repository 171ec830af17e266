"""Residuals in checkpoints: one collective call gives every worker (and so rank 0) the workers' mean to save.

`optimizer.state_dict()` and `hvd.broadcast_optimizer_state` stay as Horovod has them and never touch residuals.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_gradcomp.engine import Engine
from hvd_gradcomp.feedback import mean_residuals, policy_from, residuals_from, whole_parts
from hvd_gradcomp.feedback.residuals import State
from hvd_gradcomp.ops import backend
from hvd_gradcomp.torch.exchange import GradientExchange, require_members
from hvd_gradcomp.torch.optimizer import exchange_of
from hvd_gradcomp.torch.transport import wait


def residual_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What the workers keep, by parameter name as their mean, to save beside `optimizer.state_dict()`.

    That is the residual and whatever else the memory keeps (velocities), what a method keeps besides (the factors of
    PowerSGD), the step that schedules go by, and what a policy has found out. A collective call: every worker of the
    optimizer's process set must make it; each gets the same tensors, on the CPU.
    With averaged gradients the mean says all that is still owed to the parameters; for op=Sum it does so as long as
    the number of workers stays the same.

    Raises:
        ConfigurationError: the optimizer has no compressor of this package, or this worker is not in its process set.
    """
    exchange = exchange_of(optimizer)
    require_members(optimizer)
    return mean_state(exchange.engine, _parameters(exchange), exchange.optimizer.process_set)


def load_residual_state_dict(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Give this worker what was saved by `residual_state_dict`, whatever the number of workers is now.

    Every worker must load it: where rank 0 alone reads the checkpoint, pass on `hvd.broadcast_object(state)`.

    Args:
        optimizer: made by `hvd.DistributedOptimizer` with a compressor of this package.
        state: what was saved; None, for a checkpoint without residuals, gives a warning and starts from zero.

    Raises:
        ConfigurationError: `state` is something else, or belongs to another model.
    """
    exchange = exchange_of(optimizer)
    if state is None:
        warnings.warn(
            "the checkpoint holds no residuals: training starts again without what had not been sent when it was saved",
            stacklevel=2,
        )
        exchange.load_state({}, 0)
        return
    exchange.load_state(*state_from(state, _parameters(exchange)))


def mean_state(
    engine: Engine, parameters: Mapping[str, torch.Tensor], process_set: hvd.ProcessSet
) -> dict[str, object]:
    """The mean over the workers of what an engine keeps for `parameters`. Collective."""
    handles = []
    shared = {}
    for name, p in parameters.items():
        parts = engine.compressor.of(name, tuple(p.shape)).memory.parts
        own = whole_parts(backend("torch"), name, p.numel(), engine.state.get(name, {}))
        for part in parts:
            total = own[part].clone() if part in own else torch.zeros(p.numel(), device=p.device)
            handle = mpi_ops.allreduce_async_(
                total, name=f"{engine.scope}{name}.{part}", op=mpi_ops.Sum, process_set=process_set
            )
            handles.append((name, part, handle))
        others = {part: value.cpu() for part, value in own.items() if part not in parts}
        if others:
            shared[name] = others
    totals: dict[str, dict[str, torch.Tensor]] = {}
    for name, part, handle in handles:
        totals.setdefault(name, {})[part] = wait(handle).cpu()
    return mean_residuals(
        backend("torch"), totals, process_set.size(), shared=shared, step=engine.step, policy=engine.policy_state
    )


def state_from(state: object, parameters: Mapping[str, torch.Tensor]) -> tuple[State, int, tuple[float, ...]]:
    """What `mean_state` gave, as state of an engine, the step it belongs to and what its policy knew.

    The state lies beside each of `parameters`.

    Raises:
        ConfigurationError: it is something else, or belongs to another model.
    """
    found, step = residuals_from(state, {name: p.numel() for name, p in parameters.items()})
    moved = {
        name: {part: value.to(parameters[name].device, torch.float32, copy=True) for part, value in parts.items()}
        for name, parts in found.items()
    }
    return moved, step, policy_from(state)


def _parameters(exchange: GradientExchange) -> dict[str, torch.Tensor]:
    return {exchange.names[p]: p for p in exchange.compressed_parameters()}
