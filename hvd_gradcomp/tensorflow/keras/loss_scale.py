"""Mixed precision: all workers skip a step, or none does.

Keras looks for NaN and infinity in a worker's own gradients and then runs the inner optimizer, or not. With gradients
that are exchanged inside it, workers whose gradients overflow would leave the others waiting. So where the inner
optimizer exchanges, the answer of the check becomes the answer of all workers; elsewhere it is Keras's own. A skipped
step exchanges nothing and leaves residuals as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

_originals: list[Callable[..., Any]] = []


def register(exchanges: Callable[[Any], bool]) -> None:
    """Make the check global where `exchanges(inner_optimizer)`. Repeating it changes nothing."""
    if _originals:
        return
    original = keras.optimizers.LossScaleOptimizer.check_finite
    _originals.append(original)

    def check_finite(self: Any, grads: Sequence[Any]) -> tf.Tensor:
        mine = original(self, grads)
        if not exchanges(self.inner_optimizer):
            return mine
        process_set = self.inner_optimizer._hvd_gradcomp.settings.process_set
        all_of_them = hvd.allreduce(tf.cast(mine, tf.int32), op=hvd.Min, process_set=process_set)
        return tf.cast(all_of_them, tf.bool)

    keras.optimizers.LossScaleOptimizer.check_finite = check_finite


def unregister() -> None:
    """Undo `register`."""
    while _originals:
        keras.optimizers.LossScaleOptimizer.check_finite = _originals.pop()
