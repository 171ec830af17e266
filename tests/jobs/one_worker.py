"""A worker on its own, with and without horovodrun: training is plain local training, and nothing owed is lost."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from hvd_gradcomp.torch import TopKInt8, counters, load_residual_state_dict, residual_state_dict


def train(distributed: bool, owed: torch.Tensor | None = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Three steps; `owed` is part of the first gradient, or comes from the checkpoint of a job of several workers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(50, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=TopKInt8)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if owed is not None:
            state = residual_state_dict(optimizer)
            state["mean"]["weight"]["residual"] = owed.reshape(-1)  # type: ignore[index]
            load_residual_state_dict(optimizer, state)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 50) * (step + 1)).square().mean().backward()
        if owed is not None and not distributed and step == 0:
            model.weight.grad += owed  # type: ignore[operator]
        optimizer.step()
    return model, optimizer


def main() -> None:
    hvd.init()
    assert hvd.size() == 1
    for owed in (None, torch.randn(40, 50)):
        model, optimizer = train(True, owed)
        plain, _ = train(False, owed)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6 if owed is not None else 0, atol=1e-6 if owed is not None else 0)
    assert counters(optimizer).total.sent_bytes == 0
    state = residual_state_dict(optimizer)
    load_residual_state_dict(optimizer, state)
    optimizer.synchronize()
    with optimizer.skip_synchronize():  # type: ignore[attr-defined]
        optimizer.step()
    x = torch.randn(3000)
    for op in (hvd.Sum, hvd.Average):
        result = hvd.allreduce(x, compression=TopKInt8(ratio=0.5), op=op)
        large = x.abs() > 1
        torch.testing.assert_close(result[large], x[large], rtol=0, atol=0.1)
    print("one worker: fine")


if __name__ == "__main__":
    main()
