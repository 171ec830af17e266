"""How an eager worker finds out, before anything can hang, that another one reduces its gradients with stock Horovod.

Horovod matches collectives by name, so a worker that adds gradients and one that gathers payloads would wait for each
other for ever. Before its first step a worker therefore adds a number of another type under the name under which stock
Horovod adds the first gradient: among workers of this package that is a sum that nobody needs, with any other it is
Horovod's own error at once, on both. In a graph those names follow from the graph around them, and nobody greets.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compression

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.tensorflow.settings import Settings


class Greeting:
    """What a tape or an optimizer of Horovod's sends first.

    Args:
        settings: how it was made.
        owner: what Horovod calls it; nobody greets without.
    """

    def __init__(self, settings: Settings, owner: str) -> None:
        self.settings = settings
        self.owner = owner

    def send(self, gradients: Sequence[Any]) -> None:
        """Greet the other workers, where execution is eager.

        Args:
            gradients: of the first step; Horovod counts those that are there.

        Raises:
            ConfigurationError: some worker adds its gradients instead.
        """
        dense = [place for place, each in enumerate(gradients) if isinstance(each, tf.Tensor)]
        if not self.owner or not tf.executing_eagerly():
            return
        settings = self.settings
        reduce = hvd._make_allreduce_grads_fn(
            self.owner,
            settings.device_dense,
            settings.device_sparse,
            Compression.none,
            settings.sparse_as_dense,
            hvd.Sum,
            1.0,
            None,
            settings.process_set,
        )
        try:
            # A worker without a gradient greets as well: the others wait for it.
            reduce(_numbers(gradients, dense[:1] or [0]))
        except tf.errors.OpError as error:
            # The other worker also waits for its other gradients. Not for all of these there will be an answer.
            threading.Thread(target=_end_waiting, args=(reduce, _numbers(gradients, dense)), daemon=True).start()
            raise ConfigurationError(
                f"some worker reduces its gradients without hvd_gradcomp, this one with {settings.compressor}: give "
                f"every worker the same compression (Horovod said: {_first_line(error)})"
            ) from None


def _numbers(gradients: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Something of another type in the places of some gradients."""
    return [tf.zeros([1], tf.int32) if place in places else None for place in range(len(gradients))]


def _end_waiting(reduce: Callable[[list[Any]], Any], numbers: list[Any]) -> None:
    with contextlib.suppress(tf.errors.OpError):
        reduce(numbers)


def _first_line(error: tf.errors.OpError) -> str:
    """What Horovod said, without where in the graph that was."""
    said = [line for line in str(error.message).splitlines() if "ismatched" in line]
    return said[0].strip() if said else str(error.message)
