"""Sign methods on real workers: every worker gets the sign that most of them sent."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from known_gradients import SHAPES, backward, gradients, parameters
from torch_workers import assert_same_everywhere, optimizer_for

from hvd_gradcomp.torch import Sign, compression_from_spec


def majority(xs: list[np.ndarray]) -> np.ndarray:
    return np.sign(np.sign(xs).sum(axis=0))


@pytest.mark.parametrize("spec", ["sign", "sign(memory=momentum(beta=0.5))"])
def test_parameters_move_by_the_majority(spec: str) -> None:
    params = parameters()
    optimizer = optimizer_for(params, compression_from_spec(spec))
    averages = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(hvd.size())]
    beta = 0.5 if "momentum" in spec else 0.0
    for number in range(3):
        optimizer.zero_grad()
        backward(params, gradients(number, hvd.rank()))
        optimizer.step()
        for rank, average in enumerate(averages):
            fresh = gradients(number, rank)
            averages[rank] = {name: beta * old + (1 - beta) * fresh[name] for name, old in average.items()}
        for name, p in params.items():
            expected = majority([average[name] for average in averages])
            assert np.array_equal(p.grad.numpy().reshape(-1), expected.astype(np.float32).reshape(-1)), name
    assert_same_everywhere(params)


def test_votes_outside_an_optimizer() -> None:
    xs = [np.random.default_rng(rank).standard_normal(3000).astype(np.float32) for rank in range(hvd.size())]
    mine = torch.from_numpy(xs[hvd.rank()])
    found = hvd.allreduce(mine, name="vote", compression=Sign)
    assert np.array_equal(found.numpy(), majority(xs).astype(np.float32))
    found = hvd.allreduce(mine, name="votes", op=hvd.Sum, compression=Sign())
    assert np.array_equal(found.numpy(), hvd.size() * majority(xs).astype(np.float32))
