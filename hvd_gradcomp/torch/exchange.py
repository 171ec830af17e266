"""Between Horovod's optimizer and the engine: which gradients take which way, and how results return to `p.grad`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from horovod.common.util import split_list
from horovod.torch import mpi_ops

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.telemetry import Counters
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
        self._engine: Engine | None = None
        self._results: dict[str, torch.Tensor] = {}
        # Whether an optimizer state was loaded whose residuals were not.
        self._warn_about_residuals = False
        # Parameters seen with a sparse gradient -> its number of sparse dimensions.
        self._sparse: dict[str, int] = {}
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
        if p.grad is None:
            p.grad = self._missing(p, name)
        if p.grad.is_sparse and not self.optimizer.sparse_as_dense:
            return self._submit_sparse(p, name)
        if not self._is_compressed(p):
            return self._submit_dense(p, name)
        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
        taken = p.grad.is_sparse or _owns_its_memory(gradient)
        self.engine.submit(name, gradient if taken else gradient.clone())
        return lambda: self._returned(p, gradient, taken, self._result(name))

    def finish(self) -> None:
        """Complete the exchanges of this step."""
        self._results.update(self.engine.finish())

    def load_state(self, state: dict[str, dict[str, torch.Tensor]], step: int) -> None:
        """Replace all that this worker keeps; see `Engine.load_state`."""
        self._warn_about_residuals = False
        self.engine.load_state(state, step)

    # -- making the engine --------------------------------------------------------------------------------------------

    def compressed_parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients are compressed, in the order of the optimizer."""
        exchanged = self.optimizer._requires_update
        ordered = [p for group in self.optimizer.param_groups for p in group["params"] if p in exchanged]
        return [p for p in ordered if self._is_compressed(p)]

    def _is_compressed(self, p: torch.Tensor) -> bool:
        return self.compressor.takes(p.numel()) and p.dtype in _KINDS

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
        )

    def _group_names(self, compressed: list[torch.Tensor]) -> list[list[str]] | None:
        if self._groups is None:
            return None
        groups = self._groups if isinstance(self._groups, list) else split_list(compressed, self._groups)
        return [[self.names[p] for p in group if p in self.names] for group in groups]

    # -- the three ways -----------------------------------------------------------------------------------------------

    def _missing(self, p: torch.Tensor, name: str) -> torch.Tensor:
        """The gradient of a parameter that took no part in this step on this worker."""
        if name not in self._sparse:
            return torch.zeros_like(p)
        indices = torch.zeros(self._sparse[name], 0, dtype=torch.int64, device=p.device)
        values = torch.zeros(0, *p.shape[self._sparse[name] :], dtype=p.dtype, device=p.device)
        return torch.sparse_coo_tensor(indices, values, p.shape)

    def _submit_sparse(self, p: torch.Tensor, name: str) -> Handle:
        """A sparse gradient travels as Horovod sends it: all indices and values by allgather."""
        self._sparse[name] = p.grad.sparse_dim()
        if self._is_compressed(p):
            self.engine.submit(name, None)
        handle, _ = self.optimizer._sparse_allreduce_grad_async(p, name)

        def complete() -> torch.Tensor:
            # First, since a worker where this gradient is not sparse would be found there.
            self.finish()
            result: torch.Tensor = handle()
            return result

        return complete

    def _submit_dense(self, p: torch.Tensor, name: str) -> Handle:
        """Uncompressed, under Horovod's own name, so that Horovod fuses it with others."""
        optimizer = self.optimizer
        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
        # Horovod refuses bfloat16, and what is not contiguous.
        sent = gradient.to(torch.float32) if gradient.dtype == torch.bfloat16 else gradient.contiguous()
        # Horovod divides by the worker count itself; the predivide factor only moves a part of that before the sum.
        factor = optimizer.gradient_predivide_factor if optimizer.op == mpi_ops.Average else 1.0
        counted = self.counters.bucket("dense")
        counted.exchanges += 1
        counted.elements += sent.numel()
        counted.kept += sent.numel()
        counted.dense_bytes += gradient.numel() * gradient.element_size()
        counted.sent_bytes += sent.numel() * sent.element_size()
        counted.received_bytes += sent.numel() * sent.element_size()
        handle = mpi_ops.allreduce_async_(
            sent,
            name=name,
            op=optimizer.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=optimizer.process_set,
        )

        def complete() -> torch.Tensor:
            self.finish()
            with counted.timed("exchange"):
                return wait(handle).to(gradient.dtype)

        return complete

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

    def _state_loaded(self) -> None:
        if self.compressor.memory.keeps and self.compressed_parameters() and not self.engine.state:
            self._warn_about_residuals = True


def _owns_its_memory(gradient: torch.Tensor) -> bool:
    """Whether nothing but this gradient lies in its memory, so that the engine may keep it as a residual."""
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    return whole and gradient.is_contiguous() and not gradient._is_view()


def require_members(optimizer: Any) -> None:
    """Refuse a call on a worker outside the optimizer's process set.

    Raises:
        ConfigurationError: this worker is outside.
    """
    if not optimizer.process_set.included():
        raise ConfigurationError("this worker is not in the optimizer's process set and exchanges nothing there")
