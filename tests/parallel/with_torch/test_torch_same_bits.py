"""The invariants "same bits" and "names, not order" over many steps of a real model."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch
from known_gradients import SHAPES, backward, gradients, parameters
from torch_workers import assert_same_everywhere, optimizer_for

from hvd_gradcomp.torch import TopKInt8, counters


class Branches(torch.nn.Module):
    """Three parts that each worker visits in an order of its own, and some of which it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(16, 64)
        self.parts = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)])
        self.norm = torch.nn.LayerNorm(64)
        self.head = torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, parts: list[int]) -> torch.Tensor:
        x = self.stem(x)
        for part in parts:
            x = x + torch.tanh(self.parts[part](self.norm(x)))
        logits: torch.Tensor = self.head(x)
        return logits


def test_bit_identical_parameters_after_50_steps() -> None:
    torch.manual_seed(hvd.rank())
    model = Branches()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        named_parameters=model.named_parameters(),
        compression=TopKInt8(ratio=0.02),
        groups=3,
    )
    random = np.random.default_rng(hvd.rank())
    losses = []
    weights = torch.as_tensor(np.random.default_rng(1).standard_normal((16, 4))).float()
    for step in range(50):
        optimizer.zero_grad()
        x = torch.as_tensor(random.standard_normal((8, 16))).float()
        parts = [int(part) for part in random.permutation(3)[: random.integers(0, 4)]]
        loss = torch.nn.functional.cross_entropy(model(x, parts), (x @ weights).argmax(dim=1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step in (0, 24):
            assert_same_everywhere(dict(model.named_parameters()))
    assert_same_everywhere(dict(model.named_parameters()))
    assert all(not torch.equal(p, start[name]) for name, p in model.named_parameters())
    assert sum(losses[-10:]) < sum(losses[:10])
    assert counters(optimizer).total.fallbacks == 0


def test_parameters_become_ready_in_different_orders() -> None:
    """Every worker's backward passes come in another order in every step, over several buckets."""
    compression = TopKInt8(ratio=0.05)
    shuffled, ordered = parameters(), parameters()
    optimizers = [optimizer_for(params, compression, groups=3) for params in (shuffled, ordered)]
    for step in range(4):
        order = list(np.random.default_rng([step, hvd.rank()]).permutation(list(SHAPES)))
        grads = gradients(step, hvd.rank())
        for optimizer, params, names in zip(optimizers, (shuffled, ordered), (order, list(SHAPES)), strict=True):
            optimizer.zero_grad()
            backward(params, grads, names)
            optimizer.step()
    for name, p in shuffled.items():
        if p.numel() >= 1024:
            assert torch.equal(p, ordered[name])
    assert_same_everywhere(shuffled)
