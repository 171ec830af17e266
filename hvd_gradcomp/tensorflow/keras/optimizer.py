"""Keras 3 optimizers that exchange gradients, with or without compression.

An optimizer keeps its object, its state and its name: its class is replaced by a subclass of the same name that
exchanges the gradients at the one place where Keras has accumulated them (if it does) and not yet clipped them. A model
saved with it is an ordinary model, which loads without this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.tensorflow.compression import Compression

from hvd_gradcomp.compressors import NoCompression
from hvd_gradcomp.compressors.base import as_compressor
from hvd_gradcomp.errors import ConfigurationError, UnsupportedError
from hvd_gradcomp.tensorflow.exchange import Gradient, GradientExchange
from hvd_gradcomp.tensorflow.keras import loss_scale
from hvd_gradcomp.tensorflow.keras.saving import write_residuals
from hvd_gradcomp.tensorflow.paths import tensorflow_variable
from hvd_gradcomp.tensorflow.reducer import Reducer
from hvd_gradcomp.tensorflow.settings import Settings

_ATTRIBUTE = "_hvd_gradcomp"
# Newer than the first releases of Keras 3.
_MULTI = getattr(keras.optimizers, "MultiOptimizer", None)


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Let a Keras 3 optimizer apply the workers' average of each gradient instead of this worker's gradient.

    Args:
        optimizer: any Keras optimizer; of a `LossScaleOptimizer`, its inner optimizer exchanges.
        name: kept for Horovod's sake, not needed.
        compression: one of Horovod's `Compression`, or of this package, such as `TopKInt8(ratio=0.01)`.
        backward_passes_per_step: steps over which gradients are added up before they are exchanged and applied. It
            becomes the optimizer's `gradient_accumulation_steps`, and is saved with it.
        average_aggregated_gradients: divide that sum by `backward_passes_per_step`.
        num_groups: older name of `groups`.
        groups: what to exchange together: a number of groups, or lists of variables.
        scale_local_gradients: divide the gradients of local variables (`register_local_var`) by the number of workers.

    The other options are Horovod's own, see `horovod.tensorflow.DistributedGradientTape`.

    Returns:
        The same optimizer object; its class is now a subclass of its own.

    Raises:
        ConfigurationError: the options contradict each other, or the optimizer exchanges gradients already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"expected an optimizer of Keras 3 ({keras.__version__}), got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}; for legacy Keras (TF_USE_LEGACY_KERAS=1) use horovod.tensorflow.keras"
        )
    if op not in (hvd.Average, hvd.Sum):
        raise ConfigurationError(f"op must be hvd.Average or hvd.Sum, got {op!r}")
    groups = groups if groups is not None else (num_groups or None)
    compressor = as_compressor(compression)
    settings = Settings(
        compressor or NoCompression(),
        op=op,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=tuple(map(tuple, groups)) if isinstance(groups, list) else groups,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
        backward_passes_per_step=backward_passes_per_step,
        stock=None if compressor else compression,
    )
    target = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    if isinstance(target, Distributed):
        raise ConfigurationError(f"this {type(target).__name__} exchanges gradients already: wrap it once")
    _accumulate(target, backward_passes_per_step)
    factor = 1 if average_aggregated_gradients else backward_passes_per_step
    distribution = Distribution(settings, factor, scale_local_gradients)
    object.__setattr__(target, "__class__", _distributed_class(type(target)))  # type: ignore[arg-type]
    setattr(target, _ATTRIBUTE, distribution)
    if target.built:
        distribution.track(target, target._trainable_variables)
    return optimizer


class Distribution:
    """What one optimizer exchanges, and how.

    Args:
        settings: for the exchange.
        factor: to multiply with after averaging, for sums over several backward passes.
        scale_local: see `DistributedOptimizer`.
    """

    def __init__(self, settings: Settings, factor: int, scale_local: bool) -> None:
        self.settings = settings
        self.factor = factor
        self.scale_local = scale_local
        self.reducer = Reducer(settings)
        self.local: set[int] = set()
        #: The variables last given to `fill`.
        self.filled: list[Any] = []
        #: Those of them that Keras is about to update.
        self.updated: list[Any] = []
        #: Whether the gradients of the last `apply` came to `reduce`.
        self.reached = False

    def exchange(self, variables: Sequence[Any]) -> GradientExchange:
        """The exchange of all of these that are not local."""
        return self.reducer.exchange(self._shared(variables))

    def track(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make the residuals part of the optimizer, as checkpoints see it."""
        if self.settings.stock is None and self._shared(variables):
            optimizer.hvd_gradcomp_residuals = self.exchange(variables).residuals

    def fill(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Zeros where only other workers have a gradient; see `GradientExchange.fill`."""
        self.filled = list(variables)
        shared = self._shared(variables)
        if not shared:
            return list(gradients)
        given = {id(each): gradient for each, gradient in zip(variables, gradients, strict=True)}
        found = self.exchange(variables).fill([given[id(each)] for each in shared])
        given.update({id(each): gradient for each, gradient in zip(shared, found, strict=True)})
        return [given[id(each)] for each in variables]

    def reduce(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """The gradients of `variables`, which are some of those last given to `fill`, reduced."""
        self.reached = True
        given = {id(each): gradient for each, gradient in zip(variables, gradients, strict=True)}
        shared = self._shared(self.filled)
        if shared:
            reduced = self._reduce([given.get(id(each)) for each in shared], shared)
            for each, gradient in zip(shared, reduced, strict=True):
                given[id(each)] = gradient if gradient is None or self.factor == 1 else gradient * self.factor
        return [self._scaled(given[id(each)]) if self._is_local(each) else given[id(each)] for each in variables]

    def _reduce(self, gradients: list[Gradient], variables: list[Any]) -> list[Gradient]:
        if self.settings.stock is None:
            return self.reducer(gradients, variables)
        settings = self.settings
        groups: Any = settings.groups
        if isinstance(groups, tuple):
            groups = [[tensorflow_variable(each) for each in group] for group in groups]
        reduce = hvd._make_allreduce_grads_fn(
            "DistributedOptimizer",
            settings.device_dense,
            settings.device_sparse,
            settings.stock,
            settings.sparse_as_dense,
            settings.op,
            settings.gradient_predivide_factor,
            groups,
            settings.process_set,
        )
        return list(reduce(gradients, [tensorflow_variable(each) for each in variables]))

    def _scaled(self, gradient: Gradient) -> Gradient:
        if not self.scale_local:
            return gradient
        workers = self.settings.process_set.size()
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / workers, gradient.indices, gradient.dense_shape)
        return gradient / workers

    def _is_local(self, variable: Any) -> bool:
        return id(tensorflow_variable(variable)) in self.local

    def _shared(self, variables: Sequence[Any]) -> list[Any]:
        return [each for each in variables if not self._is_local(each)]


class Distributed:
    """What the subclass adds to a Keras optimizer."""

    _hvd_gradcomp: Distribution

    @property
    def reducer(self) -> Reducer:
        """Where `counters` and `residual_state_dict` find what belongs to this optimizer."""
        return self._hvd_gradcomp.reducer

    def register_local_var(self, var: Any) -> None:
        """Do not exchange the gradient of `var`: this worker applies its own."""
        self._hvd_gradcomp.local.add(id(tensorflow_variable(var)))

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)  # type: ignore[misc]
        self._hvd_gradcomp.track(self, variables)

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore[attr-defined]
        distribution = self._hvd_gradcomp
        if len(grads) != len(variables) or not variables:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        # Before Keras drops the variables without a gradient, which may be others on other workers.
        gradients = distribution.fill(list(grads), variables)
        distribution.reached = False
        if _MULTI is not None and isinstance(self, _MULTI):
            # It only deals the gradients out, to optimizers that clip them.
            gradients = distribution.reduce(gradients, variables)
        super().apply(gradients, trainable_variables)  # type: ignore[misc]
        if not distribution.reached and not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            raise UnsupportedError(
                f"{type(self).__name__} applied gradients without asking for them to be clipped, where they would have "
                "been exchanged: its apply() must lead to that of keras.optimizers.Optimizer"
            )

    def _backend_apply_gradients(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any]) -> None:
        self._hvd_gradcomp.updated = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Gradient]) -> Sequence[Gradient]:
        # The one call that Keras makes exactly when it updates: after accumulation, before clipping and weight decay.
        return super()._clip_gradients(self._hvd_gradcomp.reduce(grads, self._hvd_gradcomp.updated))  # type: ignore[misc]

    def save_assets(self, dir_path: str) -> None:
        residuals = getattr(self, "hvd_gradcomp_residuals", None)
        if residuals is not None:
            write_residuals(Path(dir_path), residuals, self._hvd_gradcomp.settings.process_set)


def find_distributed(optimizer: Any) -> Distributed:
    """The optimizer that exchanges: `optimizer` itself, or the one inside of a `LossScaleOptimizer`.

    Raises:
        ConfigurationError: there is none.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, Distributed):
        raise ConfigurationError(f"{type(optimizer).__name__} was not made by DistributedOptimizer")
    return inner


@cache
def _distributed_class(base: Any) -> Any:
    # Name and module are those of the base, so that a saved model names a class that exists without this package.
    return type(base.__name__, (Distributed, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def _accumulate(optimizer: Any, passes: int) -> None:
    if passes == 1:
        return
    if not isinstance(passes, int) or passes < 1:
        raise ConfigurationError(f"backward_passes_per_step must be a whole number above 0, got {passes!r}")
    if optimizer.gradient_accumulation_steps not in (None, passes):
        raise ConfigurationError(
            f"backward_passes_per_step={passes} contradicts the optimizer's gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}: give one of them"
        )
    if optimizer.built and optimizer.gradient_accumulation_steps is None:
        raise ConfigurationError("backward_passes_per_step > 1 needs an optimizer that has not been built yet")
    optimizer.gradient_accumulation_steps = passes


loss_scale.register(lambda optimizer: isinstance(optimizer, Distributed))
