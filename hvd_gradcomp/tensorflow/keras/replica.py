"""The tensors of one worker of local SGD in Keras: parameters, anchors, buffers. When workers meet is not here."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_gradcomp.engine import Parameter
from hvd_gradcomp.engine.meeting import count_whole
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array
from hvd_gradcomp.telemetry import BucketCounters
from hvd_gradcomp.tensorflow.host import own
from hvd_gradcomp.tensorflow.paths import paths_of

# Anchors of these are kept in float32, or small changes would be rounded away.
_HALVES = (tf.float16, tf.bfloat16)


class Replica:
    """See `engine.meeting.Replica`.

    Args:
        variables: the parameters, in the same order on all workers.
        outer: an optimizer whose settings those of the averaged change's are; None subtracts it.
        buffers: to be averaged as they are.
        process_set: the workers.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        outer: keras.optimizers.Optimizer | None,
        buffers: Sequence[tf.Variable],
        process_set: hvd.ProcessSet,
    ) -> None:
        self.variables = dict(zip(paths_of(variables), variables, strict=True))
        self.parameters = [
            Parameter(path, each.shape.num_elements(), "float32", tuple(each.shape.as_list()))
            for path, each in self.variables.items()
        ]
        self.buffers = paths_of(buffers)
        self.anchors: dict[str, keras.Variable] = {}
        self._buffers = buffers
        self._pattern = outer
        self._outer: keras.optimizers.Optimizer | None = None
        self._process_set = process_set

    @property
    def like(self) -> np.ndarray:
        """An array on the device that collectives use: settings are compared on the CPU."""
        return np.zeros(0, np.float32)

    @property
    def has_outer(self) -> bool:
        """Whether an outer optimizer applies the averaged change."""
        return self._pattern is not None

    def outer_settings(self) -> str:
        """By what workers compare their outer optimizers."""
        if self._pattern is None:
            return "None"
        config = {key: value for key, value in self._pattern.get_config().items() if key != "name"}
        return f"{type(self._pattern).__name__} {json.dumps(config, sort_keys=True, default=str)}"

    def outer_state(self) -> list[np.ndarray] | None:
        """What the outer optimizer keeps; None where there is none, or no anchors yet."""
        return [values_of(each) for each in self._outer.variables] if self._outer else None

    def load_outer_state(self, state: Any) -> None:
        """The reverse of `outer_state`, after `start`.

        Raises:
            ConfigurationError: it is the state of another optimizer.
        """
        assert self._outer is not None
        expected = [tuple(each.shape) for each in self._outer.variables]
        if [np.shape(each) for each in state] != expected:
            raise ConfigurationError(
                f"the state of an outer optimizer with variables of shapes {[np.shape(each) for each in state]} was "
                f"saved, this one ({type(self._outer).__name__}) has {expected}: make it as it was made then"
            )
        for variable, value in zip(self._outer.variables, state, strict=True):
            variable.assign(value)

    def start(self, values: Mapping[str, Any] | None) -> int:
        """Make anchors and a new outer optimizer; a checksum of the anchors."""
        values = self.variables if values is None else values
        checksum = 0
        for number, (path, variable) in enumerate(self.variables.items()):
            dtype = tf.float32 if variable.dtype in _HALVES else variable.dtype
            value = tf.cast(values[path], dtype).numpy()
            self.anchors[path] = keras.Variable(value, dtype=dtype.name, name=f"anchor{number}")
            checksum = zlib.crc32(np.ascontiguousarray(value).tobytes(), checksum)
        if self._pattern is not None:
            self._outer = type(self._pattern).from_config(self._pattern.get_config())
            self._outer.build(list(self.anchors.values()))
        return checksum

    def changes(self) -> dict[str, Array]:
        """What changed since the last meeting."""
        return {
            path: own(tf.convert_to_tensor(anchor) - tf.cast(self.variables[path], anchor.dtype))
            for path, anchor in self.anchors.items()
        }

    def advance(self, change: Mapping[str, Array]) -> None:
        """Take the anchors and the parameters along the workers' average change."""
        steps = {
            path: tf.cast(tf.reshape(tf.convert_to_tensor(change[path]), anchor.shape), anchor.dtype)
            for path, anchor in self.anchors.items()
        }
        if self._outer is not None:
            self._outer.apply(list(steps.values()), list(self.anchors.values()))
        for path, anchor in self.anchors.items():
            if self._outer is None:
                anchor.assign_sub(steps[path])
            variable = self.variables[path]
            variable.assign(tf.cast(tf.convert_to_tensor(anchor), variable.dtype))

    def average(self, what: str, counted: BucketCounters) -> None:
        """Replace "parameters" or "buffers" by their average over the workers, in place."""
        variables = list(self.variables.values()) if what == "parameters" else list(self._buffers)
        # Horovod refuses bfloat16.
        sent = [tf.cast(each, tf.float32) if each.dtype == tf.bfloat16 else each.value() for each in variables]
        elements = [each.shape.num_elements() for each in sent]
        count_whole(counted, sum(elements), sum(n * each.dtype.size for n, each in zip(elements, sent, strict=True)))
        with counted.timed("exchange"):
            # As a group, so that the same tensors are always added in the same order.
            results = hvd.grouped_allreduce(sent, op=hvd.Average, process_set=self._process_set)
        for variable, result in zip(variables, results, strict=True):
            variable.assign(tf.cast(result, variable.dtype))


def values_of(variable: keras.Variable) -> np.ndarray:
    """A copy."""
    return np.copy(tf.convert_to_tensor(variable).numpy())


def broadcast(variables: Sequence[tf.Variable], root_rank: int, process_set: hvd.ProcessSet) -> None:
    """Give every worker the values of one of them; Horovod refuses bfloat16, whose bits travel as integers."""
    hvd.broadcast_variables([each for each in variables if each.dtype != tf.bfloat16], root_rank, process_set)
    for each in variables:
        if each.dtype == tf.bfloat16:
            bits = hvd.broadcast(tf.bitcast(each.value(), tf.uint16), root_rank, process_set=process_set)
            each.assign(tf.bitcast(bits, tf.bfloat16))
