"""Which variables have a gradient on any worker: what all workers must know before they exchange.

A layer may be unused on some workers; Horovod would wait for their gradients for ever. So the workers tell each other,
once, in the first step (or when a variable gets its first gradient later, which must then happen on all workers at
once). A variable without a gradient on every worker keeps None, as in Horovod.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_gradcomp.collectives import Allgather
from hvd_gradcomp.engine import Engine
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.tensorflow.graphs import require_eager_outside
from hvd_gradcomp.tensorflow.greeting import Greeting

#: No gradient; a tensor; `tf.IndexedSlices` with indices of either type.
MISSING, DENSE, SPARSE32, SPARSE64 = range(4)


class Presence:
    """What the workers of an engine know about each other's gradients.

    Args:
        engine: whose workers; they compare their settings first, since lists of different variables mean nothing.
        paths: what the variables are called.
        greeting: what is sent before anything else.
    """

    def __init__(self, engine: Engine, paths: Sequence[str], greeting: Greeting) -> None:
        self.engine = engine
        self.greeting = greeting
        self.transport = engine.transport
        self.paths = paths
        self._known = np.zeros(len(paths), np.uint8)
        self._asked = False

    def forget(self) -> None:
        """Ask anew with the next gradients, on all workers: they may be others than before."""
        self._known[:] = MISSING
        self._asked = False
        self.engine.meet_again()

    def agree(self, gradients: Sequence[Any]) -> None:
        """Ask the other workers, where they have not been asked about these gradients yet.

        Raises:
            ConfigurationError: workers were given different settings or variables, or a gradient is sparse on some and
                dense on others.
        """
        mine = np.array([_way(gradient) for gradient in gradients], np.uint8)
        if self._asked and not np.any((mine != MISSING) & (self._known == MISSING)):
            return
        require_eager_outside()
        if not self._asked and self.transport.workers > 1:
            self.greeting.send(gradients)
        with tf.init_scope():
            self.engine.begin_agreement(mine)
            self.engine.conclude_agreement()
            gathered = self.transport.wait(self.transport.start(Allgather(mine), "presence"))
        if len(gathered) != self.transport.workers * len(mine):
            raise ConfigurationError(
                f"workers were given different numbers of variables, this one {len(mine)}: give every worker the same"
            )
        workers = np.asarray(gathered).reshape(self.transport.workers, -1)
        # MISSING is the smallest, so the largest is what some worker has.
        known = workers.max(axis=0)
        for place in np.flatnonzero(((workers != MISSING) & (workers != known)).any(axis=0)):
            ranks = [rank for rank, way in zip(self.transport.ranks, workers[:, place], strict=True) if way == DENSE]
            raise ConfigurationError(
                f"the gradient of {self.paths[int(place)]!r} is a tensor on ranks {ranks} and IndexedSlices (or ones "
                "with another index type) on others: use sparse_as_dense=True, which makes all of them tensors"
            )
        self._known = known
        self._asked = True

    def filled(self, place: int, gradient: Any, shape: tf.TensorShape, dtype: tf.DType) -> Any:
        """The gradient; where only others have one, zeros in their form."""
        known = self._known[place]
        if gradient is not None or known == MISSING:
            return gradient
        if known == DENSE:
            return tf.zeros(shape, dtype)
        indices = tf.zeros([0], tf.int32 if known == SPARSE32 else tf.int64)
        return tf.IndexedSlices(tf.zeros([0, *shape[1:]], dtype), indices, tf.constant(shape.as_list()))


def _way(gradient: Any) -> int:
    if gradient is None:
        return MISSING
    if isinstance(gradient, tf.IndexedSlices):
        return SPARSE32 if gradient.indices.dtype == tf.int32 else SPARSE64
    return DENSE
