"""What happens when the workers of local SGD meet: parameters are averaged, or their changes exchanged compressed.

When they meet, and the steps between, are in `local_sgd`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_gradcomp.collectives import Allgather
from hvd_gradcomp.compressors import Compressor, NoCompression
from hvd_gradcomp.engine import Parameter
from hvd_gradcomp.engine.agreement import compare_settings, settings_message
from hvd_gradcomp.engine.reduction import Reduction
from hvd_gradcomp.errors import ConfigurationError, NonFiniteError
from hvd_gradcomp.ops import backend
from hvd_gradcomp.torch.checkpoint import mean_state, state_from
from hvd_gradcomp.torch.gradients import all_finite
from hvd_gradcomp.torch.transport import HorovodTransport, wait

# Anchors of these are kept in float32, or small changes would be rounded away.
_HALVES = (torch.float16, torch.bfloat16)


class Meeting:
    """The workers of a process set, their parameters, and what was the same on all of them when they last met.

    Args:
        parameters: by name, in the same order on all workers.
        compressor: for the change since the last meeting; None averages the parameters.
        outer: see `LocalSGD`.
        buffers: by name, to be averaged as they are.
        process_set: the workers.
        scope: precedes the names of collectives.
    """

    def __init__(
        self,
        parameters: dict[str, torch.Tensor],
        compressor: Compressor | None,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None,
        buffers: dict[str, torch.Tensor],
        process_set: hvd.ProcessSet,
        scope: str,
    ) -> None:
        self._parameters = parameters
        self._has_anchors = compressor is not None or outer is not None
        self._compressor = compressor or NoCompression()
        self._make_outer = outer
        self._outer: torch.optim.Optimizer | None = None
        self._buffers = buffers
        self._process_set = process_set
        self._transport = HorovodTransport(process_set)
        self._scope = scope
        self._anchors: dict[str, torch.Tensor] = {}
        # Of the anchors that the workers have not compared yet.
        self._unchecked: int | None = None
        # Changes travel as float32 whatever the parameter is.
        described = [Parameter(name, p.numel(), "float32", tuple(p.shape)) for name, p in parameters.items()]
        self._reduction = Reduction(self._compressor, described, self._transport, scope=scope)
        self.counters = self._reduction.counters

    def remember_start(self) -> None:
        """Before the first step: what the parameters are now is what the workers have in common."""
        if not self._has_anchors or self._anchors:
            return
        self._outer = self._start_from(self._parameters)

    def hold(self, settings: Mapping[str, object], changed: bool) -> None:
        """Compare settings with all workers; then, if they have taken steps, bring parameters and buffers together.

        Args:
            settings: what else must be the same on all workers.
            changed: whether steps were taken since the last meeting, by which all workers agree that agree on steps.

        Raises:
            ConfigurationError: settings differ.
            NonFiniteError: some worker's change holds NaN or infinity; nothing was changed.
        """
        self._agree(settings)
        if not changed:
            return
        with torch.no_grad():
            if self._has_anchors:
                self._exchange_changes()
            else:
                self._average(self._parameters, "parameters")
            self._average(self._buffers, "buffers")

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all workers after a meeting."""
        return {
            "anchors": dict(self._anchors),
            "outer": self._outer.state_dict() if self._outer else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`.

        Raises:
            ConfigurationError: it belongs to another model, or to other options.
        """
        saved: dict[str, torch.Tensor] = state["anchors"]
        expected = {name: tuple(p.shape) for name, p in self._parameters.items()}
        if saved and {name: tuple(each.shape) for name, each in saved.items()} != expected:
            raise ConfigurationError(
                "the state was saved for other parameters than this optimizer has: load it into the same model, with "
                f"the same named_parameters (saved: {_few(saved)}; here: {_few(expected)})"
            )
        if (state["outer"] is None) != (self._make_outer is None) and saved:
            raise ConfigurationError(
                "the state was saved with an outer optimizer and is loaded without one, or the other way round: "
                "make LocalSGD (or DiLoCo) as it was made for the training that saved it"
            )
        self._anchors.clear()
        self._outer, self._unchecked = None, None
        if saved and self._has_anchors:
            self._outer = self._start_from(saved)
            if self._outer:
                self._outer.load_state_dict(state["outer"])

    def residual_state_dict(self) -> dict[str, object]:
        """See `LocalSGD`."""
        return mean_state(self._reduction.large, self._compressed(), self._process_set)

    def load_residual_state_dict(self, state: Any) -> None:
        """See `LocalSGD`."""
        self._reduction.large.load_state(*state_from(state, self._compressed()))

    # -- meeting ------------------------------------------------------------------------------------------------------

    def _agree(self, settings: Mapping[str, object]) -> None:
        ops, transport = backend("torch"), self._transport
        own = {
            **settings,
            "compression": str(self._compressor),
            "outer": repr(self._outer),
            "parameters": zlib.crc32(repr([(name, tuple(p.shape)) for name, p in self._parameters.items()]).encode()),
            "buffers": sorted(self._buffers),
        }
        if self._has_anchors:
            own["starting values (see hvd.broadcast_parameters)"] = self._unchecked
        message = settings_message(ops, own, torch.zeros(0))
        received = transport.wait(transport.start(Allgather(message), f"{self._scope}settings"))
        compare_settings(ops, received, transport.ranks, transport.rank)
        self._unchecked = None

    def _average(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        """Replace tensors by their average over the workers, in place."""
        if not tensors or self._transport.workers == 1:
            return
        # Horovod refuses bfloat16, and what is not contiguous.
        sent = [
            (each.detach().float() if each.dtype == torch.bfloat16 else each.detach()).contiguous()
            for each in tensors.values()
        ]
        size = sum(each.numel() * each.element_size() for each in sent)
        counted = self.counters.bucket(name)
        counted.exchanges += 1
        counted.elements += sum(each.numel() for each in sent)
        counted.kept += sum(each.numel() for each in sent)
        counted.dense_bytes += size
        counted.sent_bytes += size
        counted.received_bytes += size
        with counted.timed("exchange"):
            # As a group, so that the same tensors are always added in the same order.
            handle = mpi_ops.grouped_allreduce_async_(
                sent, name=f"{self._scope}{name}", op=mpi_ops.Average, process_set=self._process_set
            )
            results = wait(handle)
        for each, result in zip(tensors.values(), results, strict=True):
            if result.data_ptr() != each.data_ptr():
                each.copy_(result)

    def _exchange_changes(self) -> None:
        """Average what changed since the last meeting, and take all workers from the anchor along it."""
        changes = {
            name: self._anchors[name] - p.detach().to(self._anchors[name].dtype) for name, p in self._parameters.items()
        }
        mean = self._reduction.reduce(changes) if self._transport.workers > 1 else changes
        if not all_finite(mean.values()):
            raise NonFiniteError(
                "the parameters of some worker hold NaN or infinity, or changed by more than float32 can hold, since "
                "the workers last met: lower the learning rate or meet more often, and load the last checkpoint"
            )
        for name, anchor in self._anchors.items():
            change = mean[name].view_as(anchor).to(anchor.dtype)
            if self._outer:
                anchor.grad = change
            else:
                anchor.sub_(change)
        if self._outer:
            self._outer.step()
            self._outer.zero_grad(set_to_none=True)
        for name, p in self._parameters.items():
            p.copy_(self._anchors[name])

    # -- making -------------------------------------------------------------------------------------------------------

    def _start_from(self, values: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer | None:
        """Take `values` for what all workers have in common, which they compare when they next meet.

        Returns:
            A new outer optimizer of the anchors.
        """
        checksum = 0
        for name, p in self._parameters.items():
            dtype = torch.float32 if p.dtype in _HALVES else p.dtype
            anchor = values[name].detach().to(p.device, dtype, copy=True)
            self._anchors[name] = anchor
            checksum = zlib.crc32(anchor.cpu().contiguous().view(-1).view(torch.uint8).numpy(), checksum)
        self._unchecked = checksum
        return self._make_outer(list(self._anchors.values())) if self._make_outer else None

    def _compressed(self) -> dict[str, torch.Tensor]:
        return {each.name: self._parameters[each.name] for each in self._reduction.large.parameters}


def _few(names: Mapping[str, object]) -> str:
    first = ", ".join(list(names)[:3])
    return f"{len(names)} beginning with {first}"
