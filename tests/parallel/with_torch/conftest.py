"""Horovod's core for PyTorch, and process sets."""

from __future__ import annotations

import os
from collections.abc import Iterator

import horovod.torch as hvd
import pytest
import torch
from horovod.common import process_sets
from horovod.torch import mpi_ops
from workers import WORKERS

EVEN = hvd.ProcessSet(list(range(0, WORKERS, 2)))


def pytest_configure() -> None:
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init(process_sets=[EVEN])


@pytest.fixture(autouse=True)
def _together() -> None:
    """Workers begin each test together, so that a timeout counts the test and not the tests before it."""
    hvd.barrier()


@pytest.fixture(autouse=True, scope="module")
def _no_sets_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take away the process sets that a module's hierarchical exchanges made: each costs time in all tests after it."""
    yield
    if request.session.testsfailed:
        return
    for number in sorted(mpi_ops._basics._get_process_set_ids_and_ranks()):
        if number not in (0, EVEN.process_set_id):
            hvd.remove_process_set(process_sets._temp_process_set_object(number))


@pytest.fixture
def even_ranks() -> Iterator[hvd.ProcessSet]:
    """A process set made when Horovod started: ranks 0, 2, ..."""
    yield EVEN
    _even_out()


@pytest.fixture
def last_ranks() -> Iterator[hvd.ProcessSet]:
    """A process set made while Horovod runs: the later half of the ranks."""
    found = hvd.add_process_set(range(WORKERS // 2, WORKERS))
    yield found
    hvd.remove_process_set(found)
    _even_out()


def _even_out() -> None:
    """Let all workers have begun equally many operations after some of them worked in process sets.

    Horovod calls an operation without a name by how many this worker has begun. In a process set its members begin more
    than the others, and then all would wait for each other without end, as in any program.
    """
    begun = hvd.allreduce_async(torch.zeros(1), name="begun")
    hvd.synchronize(begun)
    most = int(hvd.allreduce(torch.tensor(begun), name="most", op=hvd.Max))
    nowhere = hvd.ProcessSet([])
    nowhere.process_set_id = 1_000_000
    for _ in range(most - begun):
        # An operation that is refused has been counted, and nobody else takes part in it.
        with pytest.raises(ValueError, match="does not exist"):
            hvd.allreduce_async(torch.zeros(1), name="catching up", op=hvd.Sum, process_set=nowhere)
