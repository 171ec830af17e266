"""TensorFlow beside PyTorch in one Horovod job: each framework has a Horovod core of its own in every worker.

The two share one list of process sets, in which the module that was imported last looks itself up. So tests of
TensorFlow switch it over and back (`own_process_sets`), and the tests of PyTorch never see a difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.common import process_sets
from horovod.tensorflow import mpi_ops
from horovod.torch import mpi_ops as torch_ops
from known_gradients import SHAPES

process_sets._setup(torch_ops._basics)

#: Ranks 0, 2, ... of TensorFlow's core.
EVEN = hvd.ProcessSet(list(range(0, torch_ops.size(), 2)))


@pytest.fixture(scope="module", autouse=True)
def own_process_sets() -> Iterator[None]:
    """For the tests of a module: process sets are those of TensorFlow's core."""
    process_sets._setup(mpi_ops._basics)
    if not hvd.is_initialized():
        hvd.init(process_sets=[EVEN])
    yield
    process_sets._setup(torch_ops._basics)


def variables(shapes: Mapping[str, Sequence[int]] = SHAPES) -> dict[str, tf.Variable]:
    """Zeros, the same on all workers."""
    return {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()}


def reduced(
    own: Mapping[str, tf.Variable], gradients: Mapping[str, Any], compression: Any, **options: Any
) -> dict[str, Any]:
    """What a tape of Horovod's makes of these gradients: those of sum(v * g) are exactly g.

    A variable without an entry in `gradients` gets none.
    """
    with tf.GradientTape() as tape:
        terms = [tf.reduce_sum(own[name] * g) for name, g in gradients.items()]
        loss = tf.add_n(terms) if terms else tf.constant(0.0)
    tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
    return dict(zip(own, tape.gradient(loss, list(own.values())), strict=True))


def assert_same_everywhere(tensors: Sequence[Any]) -> None:
    """Every worker holds the same bits."""
    digest = hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in tensors)).digest()
    mine = np.frombuffer(digest, np.uint8)
    gathered = hvd.allgather(tf.constant(mine[None])).numpy()
    assert (gathered == mine).all(), "workers hold different bits"
