"""Elastic training with Keras 3: Horovod's state and callbacks of `horovod.tensorflow.keras.elastic`.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(..., epochs=10 - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)])

After workers came or went, all begin again from what the first worker committed last. Residuals are each worker's own:
they go back to the last commit with the weights, and a new worker has none. What a worker that left had not sent yet is
lost with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.tensorflow.keras.optimizer import Distributed
from hvd_gradcomp.tensorflow.paths import tensorflow_variable


class KerasState(ObjectState):
    """What elastic training saves, restores and gives to new workers of a model and its optimizer.

    Args:
        model: built, and compiled unless `optimizer` is given.
        optimizer: by default the model's.
        kwargs: further values, which become attributes: `epoch=0`, `batch=0`.

    Raises:
        ConfigurationError: the model is not built, or there is no optimizer.
    """

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, **kwargs: Any) -> None:
        self.model = model
        found = optimizer or getattr(model, "optimizer", None)
        if not model.built or found is None:
            raise ConfigurationError(
                "KerasState needs a model that is built (model.build(input_shape)) and an optimizer: compile the model "
                "first, or pass optimizer="
            )
        self.optimizer = found
        if not found.built:
            found.build(model.trainable_variables)
        self._remember()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Remember everything as it is."""
        self._remember()
        super().save()

    def restore(self) -> None:
        """Put back what was remembered."""
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(value)
        if self._residuals is not None:
            self._kept().write(*self._residuals)
        super().restore()

    def sync(self) -> None:
        """Give all workers what the first one has."""
        hvd.broadcast_variables(self._variables(), root_rank=0)
        self._meet_again()
        self._remember()
        super().sync()

    def _variables(self) -> list[tf.Variable]:
        return [tensorflow_variable(each) for each in [*self.model.variables, *self.optimizer.variables]]

    def _kept(self) -> Any:
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        return getattr(inner, "hvd_gradcomp_residuals", None)

    def _remember(self) -> None:
        self._values = [tf.identity(each) for each in self._variables()]
        residuals = self._kept()
        self._residuals = None if residuals is None else (*residuals.read(), residuals.read_policy())

    def _meet_again(self) -> None:
        """Let the workers ask each other anew what they have in common: some may be new."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if isinstance(inner, Distributed):
            for exchange in inner.reducer.find(None):
                exchange.presence.forget()
            # A step that was traced for the old workers would not ask.
            self.model.train_function = None


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Horovod's `run`: call `function(state, ...)`, and again whenever workers have come or gone."""

    @functools.wraps(function)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(state, *args, **kwargs)
        except tf.errors.OpError as error:
            # From inside of a graph, or of the thread that exchanges, Horovod's own error comes as one of TensorFlow.
            if "Horovod" not in error.message:
                raise
            raise HorovodInternalError(error) from error

    made: Callable[..., Any] = run_fn(wrapper, _reset)
    return made


def _reset() -> None:
    hvd.shutdown()
    hvd.init()


class CommitStateCallback(keras.callbacks.Callback):
    """Commit `state` after every `batches_per_commit` batches, and after each epoch."""

    def __init__(self, state: KerasState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # All workers count alike after they have met again.
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep the number of the batch in `state.batch`: 0 between epochs.

    `fit` of Keras 3 takes the length of an epoch from its data, so leave out the first `state.batch` batches of an
    epoch that is begun again: `dataset.skip(state.batch)`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keep in `state.epoch` how many epochs are over, also those before the workers changed."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
