"""Horovod's core for TensorFlow."""

from __future__ import annotations

import os

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from tensorflow_workers import EVEN


def pytest_configure() -> None:
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init(process_sets=[EVEN])


@pytest.fixture(autouse=True)
def _together() -> None:
    """Workers begin each test together, so that a timeout counts the test and not the tests before it."""
    hvd.allreduce(tf.zeros(1), name="together")
