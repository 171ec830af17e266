"""`hvd.DistributedGradientTape` and `hvd.DistributedOptimizer` with this package's compressors, in unpatched Horovod.

Both build their allreduce with `horovod.tensorflow._make_allreduce_grads_fn`, which Horovod looks up anew each time.
`register` puts a function in its place that returns a `Reducer` when the compression is one of ours, and Horovod's own
function otherwise: with stock compressions nothing changes. The tape's `gradient` is replaced as well, since it cannot
take the variables of Keras 3; again only where the compression is ours. `hvd.join` is replaced as well, see
`engine/joining.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.compressors.base import as_compressor
from hvd_gradcomp.engine.joining import join
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.tensorflow.paths import tensorflow_variable
from hvd_gradcomp.tensorflow.reducer import Reducer, reducer_of
from hvd_gradcomp.tensorflow.settings import Settings

_originals: dict[tuple[Any, str], Callable[..., Any]] = {}


def register() -> None:
    """Let Horovod for TensorFlow take this package's compressors. Done on import; repeating it changes nothing."""
    if _originals:
        return
    _replace(hvd, "_make_allreduce_grads_fn", _make_allreduce_grads_fn)
    _replace(hvd._DistributedGradientTape, "gradient", _gradient)
    _replace(hvd._DistributedGradientTape, "register_local_source", _register_local_source)
    _replace(hvd._DistributedAdasumOptimizer, "__init__", _adasum_init)
    # Both are names of one function, and users have the first.
    _replace(hvd, "join", join)
    _replace(mpi_ops, "join", join)


def unregister() -> None:
    """Undo `register`; tapes and optimizers that exist already keep working."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


@functools.wraps(hvd.DistributedGradientTape)
def DistributedGradientTape(*args: Any, **kwargs: Any) -> tf.GradientTape:  # noqa: N802  (Horovod's name)
    # Horovod copies its methods into a new class for each tape, so registering for this moment is enough.
    was_registered = bool(_originals)
    register()
    try:
        return hvd.DistributedGradientTape(*args, **kwargs)
    finally:
        if not was_registered:
            unregister()


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    _originals[owner, name] = original

    # AutoGraph has nothing to rewrite in what lies behind.
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, function)


def _make_allreduce_grads_fn(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    options = inspect.signature(original).bind(*args, **kwargs).arguments
    compressor = as_compressor(options["compression"])
    if compressor is None:
        made: Callable[..., Any] = original(*args, **kwargs)
        return made
    groups = options["groups"]
    settings = Settings(
        compressor,
        op=options["op"],
        sparse_as_dense=bool(options["sparse_as_dense"]),
        gradient_predivide_factor=options["gradient_predivide_factor"],
        groups=tuple(tuple(group) for group in groups) if isinstance(groups, list) else groups,
        process_set=options["process_set"],
        device_dense=options["device_dense"],
        device_sparse=options["device_sparse"],
    )
    return reducer_of(settings, options["name"])


def _gradient(original: Callable[..., Any], self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(self._allreduce_grads, Reducer):
        return original(self, target, sources, *args, **kwargs)
    return original(self, target, [tensorflow_variable(source) for source in sources], *args, **kwargs)


def _register_local_source(original: Callable[..., Any], self: Any, source: Any) -> None:
    original(self, tensorflow_variable(source) if isinstance(self._allreduce_grads, Reducer) else source)


def _adasum_init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    compressor = as_compressor(inspect.signature(original).bind(*args, **kwargs).arguments.get("compression"))
    if compressor is not None:
        raise ConfigurationError(
            f"op=hvd.Adasum cannot be used with {compressor}: Adasum combines whole gradients, not payloads. "
            "Use op=hvd.Average or op=hvd.Sum"
        )
    original(*args, **kwargs)
