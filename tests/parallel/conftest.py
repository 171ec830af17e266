"""One Horovod job for all tests of a launch: every worker runs the same tests in the same order.

The first failure ends a worker's run: the others are then at some other point of the test, and what follows would say
nothing. scripts/parallel_tests.py launches each folder here by itself, because Horovod has a core for each framework
and two of them in one process, over Gloo, hang now and then. It shows each worker's report.
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.option.maxfail = 1
