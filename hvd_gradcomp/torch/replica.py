"""The tensors of one worker of local SGD in PyTorch: parameters, anchors, buffers. When workers meet is not here."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_gradcomp.engine import Parameter
from hvd_gradcomp.engine.meeting import count_whole
from hvd_gradcomp.telemetry import BucketCounters
from hvd_gradcomp.torch.transport import wait

#: Makes, for a list of tensors, the optimizer that applies the averaged change to them.
Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

# Anchors of these are kept in float32, or small changes would be rounded away.
_HALVES = (torch.float16, torch.bfloat16)


class Replica:
    """See `engine.meeting.Replica`.

    Args:
        tensors: the parameters by name, in the same order on all workers.
        outer: see `LocalSGD`.
        buffers: by name, to be averaged as they are.
        process_set: the workers.
        scope: precedes the names of collectives.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        outer: Outer | None,
        buffers: dict[str, torch.Tensor],
        process_set: hvd.ProcessSet,
        scope: str,
    ) -> None:
        self.tensors = tensors
        self.parameters = [Parameter(name, p.numel(), "float32", tuple(p.shape)) for name, p in tensors.items()]
        self.buffers = list(buffers)
        self.anchors: dict[str, torch.Tensor] = {}
        self._buffers = buffers
        self._make_outer = outer
        self._outer: torch.optim.Optimizer | None = None
        self._process_set = process_set
        self._scope = scope

    @property
    def like(self) -> torch.Tensor:
        """An array on the device that collectives use: settings are compared on the CPU."""
        return torch.zeros(0)

    @property
    def has_outer(self) -> bool:
        """Whether an outer optimizer applies the averaged change."""
        return self._make_outer is not None

    def outer_settings(self) -> str:
        """By what workers compare their outer optimizers."""
        return repr(self._outer)

    def outer_state(self) -> Any:
        """What the outer optimizer keeps; None where there is none."""
        return self._outer.state_dict() if self._outer else None

    def load_outer_state(self, state: Any) -> None:
        """The reverse of `outer_state`, after `start`."""
        assert self._outer is not None
        self._outer.load_state_dict(state)

    def start(self, values: Mapping[str, torch.Tensor] | None) -> int:
        """Make anchors and a new outer optimizer; a checksum of the anchors."""
        values = self.tensors if values is None else values
        checksum = 0
        for name, p in self.tensors.items():
            dtype = torch.float32 if p.dtype in _HALVES else p.dtype
            anchor = values[name].detach().to(p.device, dtype, copy=True)
            self.anchors[name] = anchor
            checksum = zlib.crc32(anchor.cpu().contiguous().view(-1).view(torch.uint8).numpy(), checksum)
        self._outer = self._make_outer(list(self.anchors.values())) if self._make_outer else None
        return checksum

    @torch.no_grad()
    def changes(self) -> dict[str, torch.Tensor]:
        """What changed since the last meeting."""
        return {name: self.anchors[name] - p.detach().to(self.anchors[name].dtype) for name, p in self.tensors.items()}

    @torch.no_grad()
    def advance(self, change: Mapping[str, torch.Tensor]) -> None:
        """Take the anchors and the parameters along the workers' average change."""
        for name, anchor in self.anchors.items():
            step = change[name].view_as(anchor).to(anchor.dtype)
            if self._outer:
                anchor.grad = step
            else:
                anchor.sub_(step)
        if self._outer:
            self._outer.step()
            self._outer.zero_grad(set_to_none=True)
        for name, p in self.tensors.items():
            p.copy_(self.anchors[name])

    @torch.no_grad()
    def average(self, what: str, counted: BucketCounters) -> None:
        """Replace "parameters" or "buffers" by their average over the workers, in place."""
        tensors = list((self.tensors if what == "parameters" else self._buffers).values())
        # Horovod refuses bfloat16, and what is not contiguous.
        sent = [
            (each.detach().float() if each.dtype == torch.bfloat16 else each.detach()).contiguous() for each in tensors
        ]
        count_whole(
            counted, sum(each.numel() for each in sent), sum(each.numel() * each.element_size() for each in sent)
        )
        with counted.timed("exchange"):
            # As a group, so that the same tensors are always added in the same order.
            handle = mpi_ops.grouped_allreduce_async_(
                sent, name=f"{self._scope}{what}", op=mpi_ops.Average, process_set=self._process_set
            )
            results = wait(handle)
        for each, result in zip(tensors, results, strict=True):
            if result.data_ptr() != each.data_ptr():
                each.copy_(result)
