"""What the tests of TensorFlow share: variables, gradients through a tape, and whether all workers hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from known_gradients import SHAPES
from workers import WORKERS

#: Ranks 0, 2, ...
EVEN = hvd.ProcessSet(list(range(0, WORKERS, 2)))


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
