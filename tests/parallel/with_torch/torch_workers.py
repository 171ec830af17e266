"""What the tests of PyTorch do with an optimizer inside Horovod's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from known_gradients import all_gradients, backward, gradients

from hvd_gradcomp.torch.optimizer import exchange_of


def optimizer_for(params: Mapping[str, torch.nn.Parameter], compression: Any, **options: Any) -> Any:
    """SGD at learning rate 1 inside Horovod's optimizer, with named parameters."""
    sgd = torch.optim.SGD(params.values(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters=params.items(), compression=compression, **options)


def assert_same_everywhere(tensors: Mapping[str, torch.Tensor], ranks: hvd.ProcessSet = hvd.global_process_set) -> None:
    """Every worker holds the same bits."""
    digest = torch.tensor([_digest(tensors[name]) for name in sorted(tensors)], dtype=torch.int64)
    # Without a name it would be numbered, and workers outside a process set have counted fewer.
    gathered = hvd.allgather(digest.unsqueeze(0), name="digest", process_set=ranks)
    assert (gathered == digest).all(), "workers hold different bits"


def _digest(tensor: torch.Tensor) -> int:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "little")


def kept(optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of what this worker itself keeps, also as an owner: exact, where a mean over workers may round anew."""
    state = exchange_of(optimizer).engine.state
    return {name: {part: x.clone() for part, x in parts.items()} for name, parts in state.items()}


def assert_same_parts(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert {name: set(parts) for name, parts in found.items()} == {name: set(p) for name, p in expected.items()}
    assert all(torch.equal(x, expected[name][part]) for name, parts in found.items() for part, x in parts.items())


def train(params: Mapping[str, torch.nn.Parameter], optimizer: Any, steps: Sequence[int], **options: Any) -> None:
    """Some plain steps with this worker's own gradients."""
    for step in steps:
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank(), **options))
        optimizer.step()


class Ledger:
    """What all workers' gradients came to, and what has arrived of them, for the parameters in `names`."""

    def __init__(self, params: Mapping[str, torch.nn.Parameter], names: Sequence[str]) -> None:
        self.given = {name: np.zeros(params[name].shape) for name in names}
        self.got = {name: np.zeros(params[name].shape) for name in names}

    def note(self, params: Mapping[str, torch.nn.Parameter], step: int) -> None:
        """Add step number `step`, which has just been taken by `train`."""
        for name in self.given:
            self.given[name] += sum(g[name].astype(np.float64) for g in all_gradients(step).values())
            self.got[name] += params[name].grad.double().numpy() * hvd.size()  # type: ignore[union-attr]

    def assert_nothing_lost(self, optimizer: Any) -> None:
        """What has not arrived is in the workers' residuals; where there is none, everything has."""
        residuals = exchange_of(optimizer).engine.residuals
        for name, given in self.given.items():
            mine = residuals[name] if name in residuals else torch.zeros(given.size)
            left = hvd.allreduce(mine.double(), name=f"owed.{name}", op=hvd.Sum).numpy()
            np.testing.assert_allclose(self.got[name].reshape(-1) + left, given.reshape(-1), atol=1e-3)
