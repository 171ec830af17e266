"""Between Horovod's optimizer and the engine: which gradients take which way, and how results return to `p.grad`."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import split_list
from horovod.torch import mpi_ops

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback.shares import plain_part
from hvd_gradcomp.telemetry import Counters
from hvd_gradcomp.torch.gradients import all_finite, owns_its_memory, sparse_dims
from hvd_gradcomp.torch.transport import HorovodTransport, wait

_KINDS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

Handle = Callable[[], torch.Tensor]


class GradientExchange:
    """The gradients of one Horovod optimizer: large ones through the engine, small and sparse ones as Horovod does.

    Args:
        optimizer: Horovod's distributed optimizer, already set up.
        compressor: how to compress.
        groups: Horovod's option, as given by the user.
        scope: see `Engine`.
    """

    def __init__(
        self,
        optimizer: Any,
        compressor: Compressor,
        groups: int | list[list[torch.Tensor]] | None,
        scope: str,
    ) -> None:
        self.optimizer = optimizer
        self.compressor = compressor
        self.names: dict[torch.Tensor, str] = optimizer._parameter_names
        self.scope = scope
        self._groups = groups
        # By name: it follows from name, shape and dtype, and is asked in every step.
        self._compressed: dict[str, bool] = {}
        self._engine: Engine | None = None
        self._results: dict[str, torch.Tensor] = {}
        # What waits for this step's uncompressed exchanges.
        self._uncompressed: dict[str, Handle] = {}
        # Whether an optimizer state was loaded whose residuals were not.
        self._warn_about_residuals = False
        # Parameters with sparse gradients -> their number of sparse dimensions; the same on all workers after a step.
        self._sparse: dict[str, int] = {}
        self._have_met = False
        self._greeting: int | None = None
        # Residuals of parameters that are frozen, while a step goes by without them.
        self._set_aside: dict[str, dict[str, torch.Tensor]] = {}
        optimizer.register_load_state_dict_post_hook(lambda _: self._state_loaded())

    @property
    def engine(self) -> Engine:
        """Made on first use: at construction Horovod has not yet listed the parameters that it exchanges."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    @property
    def counters(self) -> Counters:
        """What was sent so far."""
        return self.engine.counters

    def submit(self, p: torch.Tensor) -> Handle:
        """Take the gradient of `p` on its way; the handle waits for what is to become `p.grad`."""
        if self._warn_about_residuals:
            self._warn_about_residuals = False
            warnings.warn(
                "the optimizer state was loaded without the residuals of its compression: what earlier workers had not "
                "sent yet is lost. Save residual_state_dict(optimizer) too, and load it with load_residual_state_dict",
                stacklevel=2,
            )
        name = self.names[p]
        self._greet(p)
        self._set_layout(p, name)
        if p.grad.is_sparse and not self.optimizer.sparse_as_dense:
            return self._submit_sparse(p, name)
        if not self._is_compressed(p, name):
            return self._submit_dense(p, name)
        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
        taken = p.grad.is_sparse or owns_its_memory(gradient)
        if not p.requires_grad:
            gradient = self._frozen(p, name)
        self.engine.submit(name, gradient if taken else gradient.clone())
        return lambda: self._returned(p, gradient, taken, self._result(name))

    def finish(self) -> None:
        """Complete the exchanges of this step."""
        try:
            whole = {name: waiting() for name, waiting in self._uncompressed.items()}
            self._results.update(whole)
            # Loss scaling looks at all gradients: the step is skipped whichever of them is not finite.
            usable = self.compressor.meets == "dense" or all_finite(whole.values())
            self._results.update(self.engine.finish(usable))
        finally:
            self._end_step()

    def meet(self) -> None:
        """In the first step, find out whether the workers' settings agree, and whose gradients are sparse.

        A worker where a parameter with sparse gradients took no part has to join the others' allgather of nothing, and
        cannot know so by itself. What a parameter's gradient is in the first step, dense or sparse, it stays.

        Raises:
            ConfigurationError: workers were given different settings, or a gradient is dense on some and sparse on
                other workers.
        """
        exchanged = self._exchanged_parameters()
        if self._is_alone():
            self._add_what_is_owed(exchanged)
            return
        if self._have_met or not exchanged or self.compressor.meets == "dense":
            return
        self._greet(exchanged[0])
        try:
            wait(self._greeting)
        except ConfigurationError:
            # A worker that does not compress may wait for another parameter first: end its waiting for all of them.
            for p in exchanged:
                # Horovod refuses a name that is on its way already.
                with contextlib.suppress(HorovodInternalError, ValueError):
                    self._send_greeting(self.names[p])
            raise
        self.engine.conclude_agreement()
        if not self.optimizer.sparse_as_dense:
            dense = [int(p.grad is not None and not p.grad.is_sparse) for p in exchanged]
            sparse = [self._sparse.get(self.names[p], 0) or sparse_dims(p) for p in exchanged]
            layouts = torch.tensor([dense, sparse], dtype=torch.int32)
            name = f"{self.scope}{self._first_name}.layouts"
            process_set = self.optimizer.process_set
            wait(mpi_ops.allreduce_async_(layouts, name=name, op=mpi_ops.Max, process_set=process_set))
            found = {self.names[p]: (layouts[0, i], int(layouts[1, i])) for i, p in enumerate(exchanged)}
            both = sorted(name for name, (is_dense, dims) in found.items() if is_dense and dims)
            if both:
                raise ConfigurationError(
                    f"the gradients of {both} are sparse on some workers and dense on others: make them alike, or pass "
                    "sparse_as_dense=True to hvd.DistributedOptimizer"
                )
            self._sparse = {name: dims for name, (_, dims) in found.items() if dims}
        self._have_met = True

    def load_state(self, state: dict[str, dict[str, torch.Tensor]], step: int, policy: Sequence[float] = ()) -> None:
        """Replace all that this worker keeps; see `Engine.load_state`."""
        self._warn_about_residuals = False
        self.engine.load_state(state, step, policy)

    # -- making the engine --------------------------------------------------------------------------------------------

    def compressed_parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients are compressed, in the order of the optimizer."""
        return [p for p in self._exchanged_parameters() if self._is_compressed(p, self.names[p])]

    def compressor_of(self, p: torch.Tensor) -> Compressor:
        """What compresses the gradient of `p`; a policy may change its ratio."""
        return self.compressor.of(self.names[p], tuple(p.shape))

    def _exchanged_parameters(self) -> list[torch.Tensor]:
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self._is_alone():
            return [p for p in ordered if p.requires_grad]
        return [p for p in ordered if p in self.optimizer._requires_update]

    def _is_alone(self) -> bool:
        """Whether Horovod exchanges nothing, because this is the only worker."""
        return mpi_ops.size() == 1 and not self.optimizer._requires_update

    @functools.cached_property
    def _first_name(self) -> str:
        return min(self.names.values(), default="")

    def _is_compressed(self, p: torch.Tensor, name: str) -> bool:
        found = self._compressed.get(name)
        if found is None:
            found = self._compressed[name] = self.compressor_of(p).takes(p.numel()) and p.dtype in _KINDS
        return found

    def _make_engine(self) -> Engine:
        optimizer = self.optimizer
        compressed = self.compressed_parameters()
        parameters = [Parameter(self.names[p], p.numel(), _KINDS[p.dtype], tuple(p.shape)) for p in compressed]
        options = {
            "dense_below": self.compressor.dense_below,
            "sparse_as_dense": bool(optimizer.sparse_as_dense),
            "backward_passes_per_step": optimizer.backward_passes_per_step,
        }
        return Engine(
            self.compressor,
            parameters,
            HorovodTransport(optimizer.process_set),
            average=optimizer.op == mpi_ops.Average,
            options=options,
            groups=self._group_names(compressed),
            scope=self.scope,
            settings_name=self._first_name,
        )

    def _group_names(self, compressed: list[torch.Tensor]) -> list[list[str]] | None:
        if self._groups is None:
            return None
        groups = self._groups if isinstance(self._groups, list) else split_list(compressed, self._groups)
        return [[self.names[p] for p in group if p in self.names] for group in groups]

    # -- the three ways -----------------------------------------------------------------------------------------------

    def _greet(self, p: torch.Tensor) -> None:
        """Before the first gradient, start to compare settings, and to find workers that do not compress at all.

        Those add the gradient of the first parameter under its name; we add something of another type under it, which
        is Horovod's own error at once, on them and on us, where we would wait for their settings without end.
        """
        if self._have_met or self._greeting is not None or self.compressor.meets == "dense":
            return
        self.engine.begin_agreement(p)
        self._greeting = self._send_greeting(self._first_name)

    def _send_greeting(self, name: str) -> int:
        handle: int = mpi_ops.allreduce_async_(
            torch.zeros(1, dtype=torch.int32),
            name=f"{self.scope}{name}",
            op=mpi_ops.Sum,
            process_set=self.optimizer.process_set,
        )
        return handle

    def _set_layout(self, p: torch.Tensor, name: str) -> None:
        """Give `p` a gradient if it took no part in this step on this worker, and the layout that it has on all."""
        dims = self._sparse.get(name, 0)
        if p.grad is None and dims:
            indices = torch.zeros(dims, 0, dtype=torch.int64, device=p.device)
            values = torch.zeros(0, *p.shape[dims:], dtype=p.dtype, device=p.device)
            p.grad = torch.sparse_coo_tensor(indices, values, p.shape)
        elif p.grad is None:
            p.grad = torch.zeros_like(p)
        elif dims and not p.grad.is_sparse:
            p.grad = p.grad.to_sparse(dims)
        elif p.grad.is_sparse and not dims and self._have_met and not self.optimizer.sparse_as_dense:
            p.grad = p.grad.to_dense()

    def _frozen(self, p: torch.Tensor, name: str) -> torch.Tensor:
        """What a parameter that was frozen after the start sends: nothing, and its memory waits for its return."""
        parts = self.engine.state.get(name, {})
        kept = [part for part in parts if plain_part(part) in self.compressor_of(p).memory.parts]
        self._set_aside[name] = {part: parts.pop(part) for part in kept}
        return torch.zeros_like(p.grad)

    def _add_what_is_owed(self, parameters: list[torch.Tensor]) -> None:
        """On a worker on its own, apply what a checkpoint of several workers had not sent yet, all of it at once."""
        if not self.engine.residuals or not all_finite(p.grad for p in parameters if p.grad is not None):
            return
        for p in parameters:
            residual = self.engine.state.get(self.names[p], {}).pop("residual", None)
            if residual is not None:
                owed = residual.view(p.shape).to(p.dtype)
                p.grad = owed if p.grad is None else owed.add_(p.grad)

    def _submit_sparse(self, p: torch.Tensor, name: str) -> Handle:
        """A sparse gradient travels as Horovod sends it: all indices and values by allgather."""
        self._sparse[name] = sparse_dims(p)
        if self._is_compressed(p, name):
            self.engine.submit(name, None)
        handle, _ = self.optimizer._sparse_allreduce_grad_async(p, f"{self.scope}{name}")

        self._uncompressed[name] = handle
        return lambda: self._result(name)

    def _submit_dense(self, p: torch.Tensor, name: str) -> Handle:
        """Uncompressed, fused with others by Horovod."""
        optimizer = self.optimizer
        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
        # Horovod refuses bfloat16, and what is not contiguous.
        sent = (gradient.to(torch.float32) if gradient.dtype == torch.bfloat16 else gradient).contiguous()
        # Horovod divides by the worker count itself; the predivide factor only moves a part of that before the sum.
        factor = optimizer.gradient_predivide_factor if optimizer.op == mpi_ops.Average else 1.0
        counted = self.counters.bucket("dense")
        counted.exchanges += 1
        counted.elements += sent.numel()
        counted.kept += sent.numel()
        counted.dense_bytes += gradient.numel() * gradient.element_size()
        counted.sent_bytes += sent.numel() * sent.element_size()
        counted.received_bytes += sent.numel() * sent.element_size()
        suffix = ".dense" if name == self._first_name and self.compressor.meets != "dense" else ""
        handle = mpi_ops.allreduce_async_(
            sent,
            name=f"{self.scope}{name}{suffix}",
            op=optimizer.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=optimizer.process_set,
        )

        def complete() -> torch.Tensor:
            with counted.timed("exchange"):
                result: torch.Tensor = wait(handle)
            return result if sent is gradient else gradient.copy_(result)

        self._uncompressed[name] = complete
        return lambda: self._result(name)

    # -- results ------------------------------------------------------------------------------------------------------

    def _result(self, name: str) -> torch.Tensor:
        if name not in self._results:
            self.finish()
        return self._results.pop(name)

    def _returned(self, p: torch.Tensor, gradient: torch.Tensor, taken: bool, result: torch.Tensor) -> torch.Tensor:
        """The result in the shape and dtype of `p`, in memory of the old gradient's if others may look at that."""
        shaped = result.view(p.shape)
        if taken:
            return shaped.to(p.dtype)
        return gradient.copy_(shaped)

    def _end_step(self) -> None:
        for name, parts in self._set_aside.items():
            self.engine.state.setdefault(name, {}).update(parts)
        self._set_aside.clear()
        self._uncompressed.clear()

    def _state_loaded(self) -> None:
        # Horovod forgets its handles here; what they stand for has to be over before the same names come again.
        with contextlib.suppress(HorovodInternalError):
            for waiting in self._uncompressed.values():
                waiting()
            if self._engine is not None:
                self._engine.abandon()
                self._end_step()
        self._results.clear()
        keeps = any(self.compressor_of(p).memory.keeps for p in self.compressed_parameters())
        if keeps and not self.engine.state:
            self._warn_about_residuals = True


def require_members(optimizer: Any) -> None:
    """Refuse a call on a worker outside the optimizer's process set.

    Raises:
        ConfigurationError: this worker is outside.
    """
    if not optimizer.process_set.included():
        raise ConfigurationError("this worker is not in the optimizer's process set and exchanges nothing there")
