"""Results of Horovod on another CUDA stream than the default one: ordered, and kept until the work is done.

Only the calls are looked at here: there is no GPU where these tests run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from horovod.torch import mpi_ops

from hvd_gradcomp.torch import transport


@dataclass(eq=False)
class _Stream:
    waited_for: list[object] = field(default_factory=list)

    def wait_stream(self, other: object) -> None:
        self.waited_for.append(other)


class _CudaTensor(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
    used_on: object = None

    def record_stream(self, stream: object) -> None:
        self.used_on = stream


@pytest.mark.parametrize("in_tuple", [False, True])
@pytest.mark.parametrize("aside", [False, True])
def test_a_result_is_ordered_before_work_on_another_stream(
    monkeypatch: pytest.MonkeyPatch, aside: bool, in_tuple: bool
) -> None:
    default = _Stream()
    current = _Stream() if aside else default
    result = torch.ones(3).as_subclass(_CudaTensor)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(mpi_ops, "synchronize", lambda _: (result, torch.ones(1)) if in_tuple else result)
    found = transport.wait(7)
    assert (found[0] if in_tuple else found) is result
    assert current.waited_for == ([default] if aside else [])
    assert result.used_on is (current if aside else None)


def test_a_result_on_the_cpu_asks_for_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    result = torch.ones(3)
    monkeypatch.setattr(mpi_ops, "synchronize", lambda _: result)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: pytest.fail("there is no GPU"))
    assert transport.wait(7) is result
