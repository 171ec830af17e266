"""Residuals in checkpoints: one collective call gives every worker (and so rank 0) the workers' mean to save.

`optimizer.state_dict()` and `hvd.broadcast_optimizer_state` stay as Horovod has them and never touch residuals.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvd_gradcomp.feedback import mean_residuals, residuals_from
from hvd_gradcomp.ops import backend
from hvd_gradcomp.torch.exchange import require_members
from hvd_gradcomp.torch.optimizer import exchange_of
from hvd_gradcomp.torch.transport import wait


def residual_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The workers' mean residual by parameter name, to save beside `optimizer.state_dict()`.

    A collective call: every worker of the optimizer's process set must make it; each gets the same tensors, on the CPU.
    With averaged gradients the mean says all that is still owed to the parameters; for op=Sum it does so as long as
    the number of workers stays the same.

    Raises:
        ConfigurationError: the optimizer has no compressor of this package, or this worker is not in its process set.
    """
    exchange = exchange_of(optimizer)
    require_members(optimizer)
    process_set = exchange.optimizer.process_set
    handles = []
    for p in exchange.compressed_parameters():
        name = exchange.names[p]
        own = exchange.engine.residuals.get(name)
        total = torch.zeros(p.numel(), device=p.device) if own is None else own.clone()
        handle = mpi_ops.allreduce_async_(
            total, name=f"{exchange.scope}{name}.residual", op=mpi_ops.Sum, process_set=process_set
        )
        handles.append((name, handle))
    totals = {name: wait(handle).cpu() for name, handle in handles}
    return mean_residuals(backend("torch"), totals, process_set.size())


def load_residual_state_dict(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Give this worker the mean residual saved by `residual_state_dict`, whatever the number of workers is now.

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
        exchange.load_residuals({})
        return
    parameters = {exchange.names[p]: p for p in exchange.compressed_parameters()}
    found = residuals_from(state, {name: p.numel() for name, p in parameters.items()})
    exchange.load_residuals(
        {name: value.to(parameters[name].device, torch.float32, copy=True) for name, value in found.items()}
    )
