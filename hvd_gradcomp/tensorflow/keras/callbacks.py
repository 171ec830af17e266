"""Horovod's callbacks for Keras 3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.tensorflow.paths import tensorflow_variable


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """After the first batch, give every worker the weights and the optimizer state of one of them.

    Then all are built, whether they were drawn at random or read from a checkpoint. Seeds of dropout are not given on:
    workers are to drop different values.

    Args:
        root_rank: the worker that gives.
        device: where to put the collective.
        local_variables: a variable, or several, that each worker keeps as it is.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        local = local_variables if isinstance(local_variables, Iterable) else [local_variables]
        self._local = {id(tensorflow_variable(each)) for each in local if each is not None}

    def register_local_var(self, var: Any) -> None:
        """Let each worker keep `var` as it is."""
        self._local.add(id(tensorflow_variable(var)))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.broadcast_done:
            return
        everything = [*self.model.weights, *self.model.optimizer.variables]
        variables = [tensorflow_variable(each) for each in everything]
        with tf.device(self.device):
            hvd.broadcast_variables([each for each in variables if id(each) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """At the end of each epoch, average its metrics over the workers, for the callbacks that come after this one.

    So that EarlyStopping, ReduceLROnPlateau and ModelCheckpoint decide alike on all workers, put it before them.

    Args:
        device: where to put the collective.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        names = sorted(logs or {})
        if not logs or not names:
            return
        own = np.array([float(logs[name]) for name in names])
        with tf.device(self.device):
            averages = hvd.allreduce(tf.constant(own), op=hvd.Average, name="MetricAverageCallback").numpy()
        logs.update(zip(names, averages.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiply the initial learning rate by a factor while `start_epoch <= epoch < end_epoch`.

    Args:
        initial_lr: the learning rate to multiply.
        multiplier: a function of the epoch, or a number whose power `epoch - start_epoch` is the factor.
        start_epoch: the first epoch that is changed.
        end_epoch: the first that is not any more; None for no end.
        staircase: change at the beginning of epochs only; else with every batch, by fractions of an epoch.
        momentum_correction: where an optimizer sums up learning rate times gradient as its momentum (SGD, RMSprop),
            scale that sum with the learning rate.
        steps_per_epoch: batches of an epoch, where Keras cannot tell.

    References:
        P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 2.3.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigurationError("initial_lr is required: the learning rate of the optimizer before this callback")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.steps_per_epoch is None and not self.staircase:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigurationError(
                    f"Keras does not know how many batches an epoch has: give steps_per_epoch to {type(self).__name__}"
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        old, new = self._learning_rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        if self.momentum_correction and old not in (0, new):
            # Keras adds learning rate times gradient into the momentum, so that holds the old rate.
            optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
            if getattr(optimizer, "momentum", 0):
                for momentum in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []:
                    momentum.assign(momentum * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr / hvd.size()` to `initial_lr` over the first epochs.

    lr(epoch) = initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1), with fractions of epochs.

    Args:
        initial_lr: the learning rate after warm-up.
        warmup_epochs: how long it takes.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: 1 for a line on rank 0 at its end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def factor(epoch: float) -> float:
            # At the last batch of an epoch the fraction is a whole number, which looks better in plots.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return float((epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size())

        super().__init__(
            initial_lr,
            factor,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch == self.end_epoch - 1 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the model whenever `monitor` has become better.

    Put it after `MetricAverageCallback`, so that all workers agree on what is best, and give every worker a file of its
    own if it is to keep its residuals, or use it on rank 0 alone.

    Args:
        monitor: which metric.
        verbose: 1 for a line whenever it saves.
        save_weights_only: weights instead of the whole model.
        mode: "min", "max" or "auto".
        save_freq: "epoch", or a number of batches.
        filepath: where to; in Horovod's own version it is an attribute that is set later, which works here too.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        super().__init__(
            filepath=filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
