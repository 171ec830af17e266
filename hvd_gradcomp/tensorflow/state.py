"""What a worker keeps between steps, as `tf.Variable`s: a checkpoint that holds them resumes without a jump.

They hang on the variables whose gradients they belong to, so it does not matter whether a checkpoint or the training
asks for them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import tensorflow as tf

from hvd_gradcomp.ops import Array
from hvd_gradcomp.tensorflow.host import is_on_host, own, view

_Made = TypeVar("_Made")
_ATTRIBUTE = "_hvd_gradcomp_kept"
# The engine's name for what has not been sent yet.
_RESIDUAL = "residual"


class Kept(tf.Module):
    """What this worker keeps for one variable.

    Args:
        size: elements of the variable.
        device: where it lives.

    Attributes:
        parts: name of a part -> its variable; "residual" is float32, shape (size,).
        step: how many exchanges there have been.
        policy: what a policy remembers, float64, any length; the same for all variables of a model.
        in_use: the parts that the engine has; to it a residual of zeros and none are not quite the same.
    """

    def __init__(self, size: int, device: str) -> None:
        super().__init__()
        self._size = size
        self._device = device
        self.parts: dict[str, tf.Variable] = {}
        with tf.device(device):
            self.step = tf.Variable(0, trainable=False, dtype=tf.int64, name="step")
            # A checkpoint may be restored before the first step, when nobody knows how much a policy remembers.
            self.policy = tf.Variable(tf.zeros([0], tf.float64), shape=[None], trainable=False, name="policy")
        self.in_use: frozenset[str] = frozenset()
        self.create([_RESIDUAL])

    def create(self, parts: Iterable[str] | Mapping[str, int]) -> None:
        """Make the variables of these parts of a memory: zero, or as a checkpoint says that was restored before.

        Args:
            parts: their names; with their sizes where they are not those of the variable.
        """
        sizes = parts if isinstance(parts, Mapping) else dict.fromkeys(parts, self._size)
        with tf.device(self._device):
            for part, size in sizes.items():
                if part not in self.parts:
                    self.parts[part] = tf.Variable(tf.zeros([size]), trainable=False, name=part)

    @property
    def residual(self) -> tf.Variable:
        """What has not been sent yet."""
        return self.parts[_RESIDUAL]

    @property
    def owes(self) -> bool:
        """Whether there is anything; the variables alone say so after a checkpoint was restored."""
        return bool(self.in_use) or any(_any(variable.value()) for variable in self.parts.values())

    def read(self) -> dict[str, Array]:
        """Copies of the parts, for the engine to keep and change."""
        return {
            part: own(variable.value())
            for part, variable in self.parts.items()
            if part in self.in_use or _any(variable.value())
        }

    def write(self, parts: Mapping[str, Array]) -> None:
        """Replace all parts; one that is missing becomes zero."""
        for part in self.in_use - parts.keys():
            self.parts[part].assign(tf.zeros_like(self.parts[part]))
        for part, value in parts.items():
            tensor = tf.convert_to_tensor(value)
            if part in self.parts and self.parts[part].shape == tensor.shape:
                self.parts[part].assign(tensor)
            else:
                self.parts[part] = tf.Variable(tensor, trainable=False, name=part)
        self.in_use = frozenset(parts)


class Residuals(tf.Module):
    """What this worker keeps for some variables, by path: residuals, and what else a memory or a method keeps.

    Pass this object to `tf.train.Checkpoint` on every worker, each with a file of its own, and a resumed run with as
    many workers goes on as if it had never stopped. For one file that serves any number of workers, see
    `residual_state_dict`.

    Args:
        variables: for which.
        paths: what they are called.
        parts: what the memory keeps of each.

    Attributes:
        by_path: path -> what is kept for that variable.
    """

    def __init__(self, variables: Sequence[tf.Variable], paths: Sequence[str], parts: Sequence[str] = ()) -> None:
        super().__init__()
        kept = _outside_graphs(lambda: [_kept_of(variable, parts) for variable in variables])
        self.by_path = dict(zip(paths, kept, strict=True))

    def create(self, parts: Mapping[str, Mapping[str, int]]) -> None:
        """Make further variables, so that a checkpoint that holds them finds them: path -> part -> its size."""

        def make() -> None:
            for path, sizes in parts.items():
                self.by_path[path].create(sizes)

        _outside_graphs(make)

    def read(self) -> tuple[dict[str, dict[str, Array]], int]:
        """Copies of what there is, path -> part -> array, and the step, which schedules and shared draws go by."""
        found = {path: each.read() for path, each in self.by_path.items()}
        steps = [int(each.step) for each in self.by_path.values()]
        return {path: parts for path, parts in found.items() if parts}, max(steps, default=0)

    def read_policy(self) -> tuple[float, ...]:
        """What a policy remembers; () where there is none."""
        found = (tuple(each.policy.numpy().tolist()) for each in self.by_path.values())
        return next((each for each in found if each), ())

    def write(self, state: Mapping[str, Mapping[str, Array]], step: int, policy: Sequence[float] = ()) -> None:
        """Replace everything; what is missing in `state` becomes zero."""
        for path, each in self.by_path.items():
            each.write(state.get(path, {}))
            each.step.assign(step)
        if self.read_policy() != tuple(policy):
            # It changes now and then only, and most often there is none.
            for each in self.by_path.values():
                each.policy.assign(np.array(policy, np.float64))


def _outside_graphs(make: Callable[[], _Made]) -> _Made:
    # A function that is being traced would be traced once more if it saw a new variable on its own thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _kept_of(variable: tf.Variable, parts: Sequence[str]) -> Kept:
    found: Kept | None = getattr(variable, _ATTRIBUTE, None)
    if found is None:
        found = Kept(variable.shape.num_elements(), variable.device)
        setattr(variable, _ATTRIBUTE, found)
    found.create(parts)
    return found


def _any(value: tf.Tensor) -> bool:
    return bool(np.any(view(value)) if is_on_host(value) else tf.reduce_any(value != 0))
