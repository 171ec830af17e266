"""The gradients that are not compressed: small tensors in one fused allreduce, sparse ones by allgather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_gradcomp.tensorflow.paths import node_name
from hvd_gradcomp.tensorflow.settings import Settings


class Direct:
    """Horovod's own collectives, under names that are the same on every worker.

    Args:
        settings: which operation, and among whom.
        scope: precedes the names.
    """

    def __init__(self, settings: Settings, scope: str) -> None:
        self.settings = settings
        self.scope = scope

    def reduce(self, gradients: Sequence[Any], paths: Sequence[str]) -> list[Any]:
        """The workers' average (or sum) of each gradient, in the form in which it came."""
        results = [
            self._sparse(gradient, path) if isinstance(gradient, tf.IndexedSlices) else None
            for gradient, path in zip(gradients, paths, strict=True)
        ]
        # Horovod fuses tensors of one type.
        for dtype in sorted({each.dtype for each in gradients}, key=lambda each: each.name):
            places = [
                place
                for place, each in enumerate(gradients)
                if each.dtype == dtype and not isinstance(each, tf.IndexedSlices)
            ]
            if places:
                reduced = self._dense([gradients[place] for place in places], paths[places[0]])
                for place, result in zip(places, reduced, strict=True):
                    results[place] = result
        return results

    def _dense(self, tensors: list[tf.Tensor], path: str) -> list[tf.Tensor]:
        settings = self.settings
        dtype = tensors[0].dtype
        if dtype == tf.bfloat16:
            # Horovod refuses it.
            tensors = [tf.cast(each, tf.float32) for each in tensors]
        # Horovod divides by the worker count itself; the predivide factor only moves a part of that before the sum.
        factor = settings.gradient_predivide_factor if settings.averages else 1.0
        reduced = hvd.grouped_allreduce(
            tensors,
            device_dense=settings.device_dense,
            op=settings.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=settings.process_set,
            ignore_name_scope=True,
            name=self._name("dense", path),
        )
        return [tf.cast(each, dtype) for each in reduced]

    def _sparse(self, slices: tf.IndexedSlices, path: str) -> tf.IndexedSlices:
        settings = self.settings
        with tf.device(settings.device_sparse):
            values, indices = (
                hvd.allgather(
                    part, name=self._name(kind, path), ignore_name_scope=True, process_set=settings.process_set
                )
                for part, kind in ((slices.values, "values"), (slices.indices, "indices"))
            )
            if settings.averages:
                values = values / tf.cast(settings.process_set.size(), values.dtype)
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def _name(self, kind: str, path: str) -> str:
        return node_name(f"hvd_gradcomp.{self.scope}{kind}.{path}")
