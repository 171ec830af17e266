"""Horovod for Keras 3 on TensorFlow, under the names of `horovod.tensorflow.keras`, with or without compression.

    import hvd_gradcomp.tensorflow.keras as hvd
    from hvd_gradcomp.tensorflow import TopKInt8
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3), compression=TopKInt8(ratio=0.01))
    model.compile(optimizer=optimizer, loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

Horovod's own module works with Keras 2 only. Legacy Keras (TF_USE_LEGACY_KERAS=1) keeps using that one, with this
package's compressors once `hvd_gradcomp.tensorflow` is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as _hvd
import keras
import tensorflow as tf
from horovod.tensorflow import (
    Average,
    Compression,
    ProcessSet,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

import hvd_gradcomp.tensorflow  # noqa: F401  (registers the compressors)
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.local_steps import PostLocal
from hvd_gradcomp.tensorflow.keras import callbacks, elastic
from hvd_gradcomp.tensorflow.keras.local_sgd import DiLoCo, LocalSGD
from hvd_gradcomp.tensorflow.keras.optimizer import DistributedOptimizer, find_distributed
from hvd_gradcomp.tensorflow.keras.saving import read_residuals
from hvd_gradcomp.tensorflow.paths import tensorflow_variable

if keras.backend.backend() != "tensorflow":
    raise ConfigurationError(
        f"Keras runs on {keras.backend.backend()!r} here, this door is for its TensorFlow backend: set "
        "KERAS_BACKEND=tensorflow before keras is imported, or use hvd_gradcomp.torch for PyTorch"
    )

__all__ = [
    "Average",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "LocalSGD",
    "PostLocal",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> tf.Tensor:
    """The average (or `op`) over the workers of anything that is a tensor or can become one."""
    return _hvd.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """The workers' values one after another along the first dimension, in which alone they may differ."""
    return _hvd.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """The value of the worker `root_rank`; every worker passes one of the same shape."""
    return _hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> tf.Tensor:
    """This worker's part, along the first dimension, of the average (or sum) over the workers."""
    return _hvd.reducescatter(tf.convert_to_tensor(value), name=name, op=op)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Give every worker the values of the worker `root_rank`, for variables of Keras 3 or TensorFlow."""
    _hvd.broadcast_variables([tensorflow_variable(each) for each in variables], root_rank, process_set, inplace)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    **options: Any,
) -> keras.Model:
    """Load a model, saved with this package or without, and let its optimizer exchange gradients.

    Args:
        filepath: what `model.save` wrote. Residuals in it are used if they are this worker's.
        custom_optimizers: your own optimizer classes.
        custom_objects: as in `keras.models.load_model`.
        compression: see `DistributedOptimizer`.
        options: further options of `DistributedOptimizer`.
    """
    known = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
        optimizer = find_distributed(model.optimizer)
        residuals = getattr(optimizer, "hvd_gradcomp_residuals", None)
        if residuals is not None:
            read_residuals(filepath, residuals, optimizer._hvd_gradcomp.settings.process_set)
    return model
