"""`hvd.join()` is refused where payloads are gathered, before Horovod hears of it.

That it works elsewhere is seen in jobs of their own (tests/jobs): a process that has gathered refuses it to its end.
"""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from known_gradients import backward, gradients, parameters
from torch_workers import assert_same_everywhere, optimizer_for

import hvd_gradcomp.torch as hg


def step(params: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(params, gradients(number, hvd.rank()))
    optimizer.step()


@pytest.mark.parametrize("spec", ["topk_int8", "powersgd(rank=2)", "randomk(ratio=0.1)", "gravac"])
def test_join_is_refused_and_training_goes_on(spec: str) -> None:
    params = parameters()
    optimizer = optimizer_for(params, compression=hg.compression_from_spec(spec))
    step(params, optimizer, 0)
    for join in (hvd.join, hvd.mpi_ops.join):
        with pytest.raises(hg.UnsupportedError, match=r"hvd\.join\(\) was called .*same number of batches"):
            join()
    step(params, optimizer, 1)
    assert_same_everywhere({name: p.data for name, p in params.items()})
