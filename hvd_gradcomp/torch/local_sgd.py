"""Local SGD for PyTorch: workers step on their own and meet every H steps, as an optimizer around an ordinary one.

What happens when they meet is in `engine/meeting.py`. What a compressor does not send of a worker's change stays as
that worker's residual and is sent at a later meeting. Gradients are not exchanged at all.

Not here: accumulating gradients over H batches and stepping once, which is Horovod's `backward_passes_per_step`.

References:
    S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    D. Basu, D. Data, C. Karakus, S. Diggavi, "Qsparse-local-SGD: Distributed SGD with Quantization, Sparsification,
    and Local Computations", NeurIPS 2019 (compression of the change, with error feedback).
    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine.meeting import Meetings, change_compressor
from hvd_gradcomp.errors import ConfigurationError, UnsupportedError
from hvd_gradcomp.policy.local_steps import LocalSteps, check_outer
from hvd_gradcomp.telemetry import Counters
from hvd_gradcomp.torch.checkpoint import mean_state, state_from
from hvd_gradcomp.torch.replica import Outer, Replica
from hvd_gradcomp.torch.transport import HorovodTransport

_FORMAT = "hvd_gradcomp local SGD 1"
# How many there have been in a process set: their collectives need different names.
_made: Counter[int] = Counter()


class LocalSGD(torch.optim.Optimizer):
    """Steps of `optimizer` on each worker by itself, and a meeting of all workers every `sync_every` steps.

    With `sync_every=1`, no compression and no outer optimizer each step is a local step followed by
    `hvd.grouped_allreduce(parameters, op=hvd.Average)`, bit for bit.

    Every worker must take the same number of steps, and call `synchronize()` after the last one. Workers must begin
    with the same parameters (`hvd.broadcast_parameters`); with compression or an outer optimizer this is checked.

    Args:
        optimizer: an ordinary optimizer of this worker's model, not made by `hvd.DistributedOptimizer`.
        sync_every: the number H of local steps between two meetings, or a function that gives it for the number of
            steps done (see `PostLocal`).
        named_parameters: as for `hvd.DistributedOptimizer`, for names in counters and checkpoints.
        compression: a compressor of this package for the change since the last meeting; None averages parameters.
        outer: makes, for a list of tensors, the optimizer that applies the averaged change as if it were a gradient;
            None subtracts it. See `DiLoCo`.
        buffers: named buffers (`model.named_buffers()`) whose floating-point ones, such as the running statistics of
            batch normalization, are averaged at every meeting; by default they stay each worker's own.
        process_set: the workers that meet.

    Raises:
        ConfigurationError: some of these cannot work.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sync_every: LocalSteps,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: Compressor | type[Compressor] | None = None,
        outer: Outer | None = None,
        buffers: Iterable[tuple[str, torch.Tensor]] = (),
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ) -> None:
        # Not calling the base's: parameters and state are the inner optimizer's, see __getattr__.
        self._optimizer = _local(optimizer)
        self._process_set = process_set
        _made[process_set.process_set_id] += 1
        scope = f"local{_made[process_set.process_set_id]}:"
        averaged = {name: buffer for name, buffer in buffers if buffer.is_floating_point()}
        self._replica = Replica(_named(optimizer, named_parameters), outer, averaged, process_set, scope)
        compressor = change_compressor(compression, mpi_ops.Compression.none)
        self._meetings = Meetings(self._replica, sync_every, compressor, HorovodTransport(process_set), scope)

    @property
    def counters(self) -> Counters:
        """What was sent so far by this worker; `dense_bytes` are those of meeting at the same steps uncompressed."""
        return self._meetings.counters

    @property
    def steps(self) -> int:
        """How many local steps this worker has taken."""
        return self._meetings.clock.steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of this worker, and a meeting if it is time for one.

        With `torch.amp.GradScaler` a step whose gradients overflowed on this worker changes nothing but is counted,
        so that workers keep meeting at the same steps.
        """
        self._meetings.before_step()
        skipped = self._overflowed()
        result = None
        if not skipped:
            result = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        self._meetings.after_steps()
        return result

    def synchronize(self) -> None:
        """Meet now, whatever the schedule says: before testing or saving, and after the last step. Collective.

        Raises:
            ConfigurationError: workers were given different settings, have taken different numbers of steps, or began
                with different parameters; the message names ranks and settings.
            NonFiniteError: some worker's change holds NaN or infinity; parameters and anchors stay as they were.
        """
        self._meetings.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer does."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: workers that know different parameters could not meet."""
        raise UnsupportedError("LocalSGD takes no new parameters: make a new one around the optimizer that has them")

    def state_dict(self) -> dict[str, Any]:
        """The inner and outer optimizers' state, the steps and the anchor; call `synchronize()` first.

        What workers have not sent yet is not in it: see `residual_state_dict`.
        """
        return {"format": _FORMAT, "optimizer": self._optimizer.state_dict(), **self._meetings.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of `state_dict`, on every worker, beside loading the model.

        Raises:
            ConfigurationError: it is not such a state, or belongs to another model or other options.
        """
        if not isinstance(state_dict, dict) or state_dict.get("format") != _FORMAT:
            found = state_dict.get("format") if isinstance(state_dict, dict) else type(state_dict).__name__
            raise ConfigurationError(
                f"expected what LocalSGD.state_dict() gave (format {_FORMAT!r}), got {found!r}; the state of an "
                "ordinary optimizer is loaded into the optimizer that LocalSGD was given"
            )
        self._meetings.load_state_dict(state_dict)
        self._optimizer.load_state_dict(state_dict["optimizer"])

    def residual_state_dict(self) -> dict[str, object]:
        """What the workers have not sent of their changes, as their mean; see `hvd_gradcomp.torch.residual_state_dict`.

        Collective: every worker makes the call, each gets the same tensors on the CPU.
        """
        return mean_state(self._meetings.reduction.large, self._compressed(), self._process_set)

    def load_residual_state_dict(self, state: Any) -> None:
        """Give this worker what was saved by `residual_state_dict`; on every worker, however many they are now."""
        self._meetings.reduction.large.load_state(*state_from(state, self._compressed()))

    def _compressed(self) -> dict[str, torch.Tensor]:
        return {each.name: self._replica.tensors[each.name] for each in self._meetings.reduction.large.parameters}

    def _overflowed(self) -> bool:
        """Undo the loss scale, where a GradScaler has left that to us; whether it found NaN or infinity."""
        scale, found = self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")
        if scale is not None and not found:
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                p.grad.div_(scale.to(p.grad.device))
        return bool(found)

    # GradScaler then always calls step() and hands over what it knows, where it would otherwise leave steps out.
    _step_supports_amp_scaling = True

    def __getattr__(self, name: str) -> Any:
        # param_groups, state, defaults, hooks: schedulers and scalers find the inner optimizer's.
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)


def DiLoCo(  # noqa: N802  (the paper's name)
    optimizer: torch.optim.Optimizer,
    sync_every: LocalSteps,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    **options: Any,
) -> LocalSGD:
    """`LocalSGD` whose averaged change is applied by SGD with Nesterov momentum, as in DiLoCo.

    Args:
        optimizer: the inner one; AdamW in the paper, with H of about 500 steps and the outer values given here.
        outer_lr: > 0; with 1 and no momentum this is plain local SGD.
        outer_momentum: 0 <= outer_momentum < 1. Where there are few meetings a smaller one does better.
        options: further arguments of `LocalSGD`.

    Raises:
        ConfigurationError: an argument is out of its range.
    """
    check_outer(outer_lr, outer_momentum)
    if "outer" in options:
        raise ConfigurationError("DiLoCo brings its own outer optimizer: for another one use LocalSGD(outer=...)")
    outer = functools.partial(torch.optim.SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    return LocalSGD(optimizer, sync_every, outer=outer, **options)


def _local(optimizer: object) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "_allreduce_grad_async") or isinstance(optimizer, LocalSGD):
        raise ConfigurationError(
            f"LocalSGD needs an ordinary optimizer, got one that exchanges already ({type(optimizer).__name__}): "
            "wrap the optimizer once, in LocalSGD or in hvd.DistributedOptimizer"
        )
    return optimizer


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[str, torch.Tensor]:
    """The parameters that are trained, by name, in the order of the optimizer."""
    given = {p: name for name, p in named_parameters or ()}
    named = {}
    for group, options in enumerate(optimizer.param_groups):
        for number, p in enumerate(options["params"]):
            if given and p not in given:
                raise ConfigurationError(
                    "named_parameters must name every parameter of the optimizer: parameter "
                    f"{number} of group {group}, of shape {tuple(p.shape)}, has no name"
                )
            if p.requires_grad:
                named[given.get(p, f"local_sgd.{group}.{number}")] = p
    if not named:
        raise ConfigurationError("the optimizer has no parameter that requires a gradient: there is nothing to average")
    return named
