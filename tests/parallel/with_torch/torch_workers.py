"""What the tests of PyTorch do with an optimizer inside Horovod's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from known_gradients import backward, gradients


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


def train(params: Mapping[str, torch.nn.Parameter], optimizer: Any, steps: Sequence[int], **options: Any) -> None:
    """Some plain steps with this worker's own gradients."""
    for step in steps:
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank(), **options))
        optimizer.step()
