"""What a worker keeps between steps, as `tf.Variable`s: a checkpoint that holds them resumes without a jump.

They hang on the variables whose gradients they belong to, so it does not matter whether a checkpoint or the training
asks for them first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from hvd_gradcomp.ops import Array
from hvd_gradcomp.tensorflow.host import is_on_host, own, view

_ATTRIBUTE = "_hvd_gradcomp_residual"


class Residual(tf.Module):
    """The residual of one variable on this worker.

    Args:
        size: elements of the variable.

    Attributes:
        value: float32, shape (size,).
        in_use: whether the engine has one; to it a residual of zeros and none are not quite the same.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.value = tf.Variable(tf.zeros([size]), trainable=False, name="residual")
        self.in_use = False

    @property
    def owes(self) -> bool:
        """Whether there is anything to send later; the variable alone says so after a checkpoint was restored."""
        return self.in_use or _any(self.value.value())

    def read(self) -> Array | None:
        """A copy for the engine to keep and change, or None where nothing is owed."""
        return own(self.value.value()) if self.owes else None

    def write(self, residual: Array | None) -> None:
        """Replace it; None means that nothing is owed any more."""
        if residual is not None or self.in_use:
            self.value.assign(tf.zeros_like(self.value) if residual is None else tf.convert_to_tensor(residual))
        self.in_use = residual is not None


class Residuals(tf.Module):
    """The residuals of some variables, by path.

    Pass this object to `tf.train.Checkpoint` on every worker, each with a file of its own, and a resumed run with as
    many workers goes on as if it had never stopped. For one file that serves any number of workers, see
    `residual_state_dict`.

    Attributes:
        by_path: the `Residual` of each variable.
    """

    def __init__(self, variables: Sequence[tf.Variable], paths: Sequence[str]) -> None:
        super().__init__()
        self.by_path = {path: _residual_of(each) for path, each in zip(paths, variables, strict=True)}

    def read(self) -> dict[str, Array]:
        """Copies of the residuals that there are, by path."""
        values = {path: each.read() for path, each in self.by_path.items()}
        return {path: value for path, value in values.items() if value is not None}

    def write(self, residuals: Mapping[str, Array]) -> None:
        """Replace all residuals; where one is missing, nothing is owed any more."""
        for path, each in self.by_path.items():
            each.write(residuals.get(path))


def _residual_of(variable: tf.Variable) -> Residual:
    found = getattr(variable, _ATTRIBUTE, None)
    if found is None:
        # Also while a function is traced: a variable lives outside of graphs.
        with tf.init_scope():
            found = Residual(variable.shape.num_elements())
        setattr(variable, _ATTRIBUTE, found)
    return found


def _any(value: tf.Tensor) -> bool:
    return bool(np.any(view(value)) if is_on_host(value) else tf.reduce_any(value != 0))
