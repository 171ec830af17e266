"""`hvd.allreduce(tensor, compression=TopKInt8)` outside an optimizer, without changing Horovod.

Horovod calls `compress`, adds up what it returns, and calls `decompress`; it tells neither the operation nor the
process set. So `compress` hands out a token: some numbers, and for each rank of the job a one in that rank's place.
What comes back shows who took part, whether the operation was a sum or an average and with which factors, and whether
some worker cannot go on. Only then are the payloads exchanged, so that what has no meaning for them, or cannot be sent,
is an error on every worker before anything can hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common import process_sets
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.compressors.base import LocalContext, decode_locally, doors, encode_locally
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.errors import NonFiniteError, UnsupportedError
from hvd_gradcomp.ops import backend
from hvd_gradcomp.tensorflow.graphs import call
from hvd_gradcomp.tensorflow.host import exact_floats, own
from hvd_gradcomp.tensorflow.transport import HorovodTransport

# Before the ranks' places: a one, and the rank plus one. Without the latter all tokens would be of equal length, and
# Adasum, which weighs them by that, would look like a sum with a factor.
_NUMBERS = 2


@dataclass(frozen=True)
class _Whole:
    """A tensor that is on its way uncompressed."""

    dtype: tf.DType


class Tokens:
    """The TensorFlow door's side of `compress` and `decompress`."""

    @staticmethod
    def install() -> None:
        """Let compressors find this door for tensors of TensorFlow."""
        doors["tensorflow"] = Tokens()

    def compress(self, compressor: Compressor, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """A token for `tensor`, or the payload itself where Horovod is not running.

        Small tensors (`dense_below`) and integers are handed out as they are, for Horovod to reduce.
        """
        tensor = tf.convert_to_tensor(tensor)
        if not hvd.is_initialized():
            with exact_floats():
                # As numpy, where subnormals survive.
                frame, ctx = encode_locally(compressor, backend("numpy"), tensor.numpy())
            return tf.convert_to_tensor(frame), ctx
        if not _is_compressed(compressor, tensor):
            # Horovod refuses bfloat16.
            sent = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
            return sent, _Whole(tensor.dtype)
        finite = tf.reduce_all(tf.math.is_finite(tf.cast(tensor, tf.float32)))
        mark = tf.where(finite, tf.constant(1, tf.float64), tf.constant(np.nan, tf.float64))
        marks = mark * tf.one_hot(hvd.rank(), hvd.size(), dtype=tf.float64)
        # NaN times zero is NaN: the other places are set, not multiplied.
        marks = tf.where(tf.range(hvd.size()) == hvd.rank(), marks, tf.constant(0, tf.float64))
        return tf.concat([tf.constant([1, hvd.rank() + 1], tf.float64), marks], 0), tensor

    def decompress(self, compressor: Compressor, token: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The sum or average that `token` asks for, of what the workers' payloads decode to.

        Raises:
            UnsupportedError: the operation was neither Sum nor Average, or the result is differentiated.
            NonFiniteError: some worker's tensor holds NaN or infinity.
        """
        if isinstance(ctx, LocalContext):
            with exact_floats():
                return tf.convert_to_tensor(decode_locally(compressor, token.numpy(), ctx))
        if isinstance(ctx, _Whole):
            return tf.cast(token, ctx.dtype)
        shape, dtype = tf.shape(ctx), ctx.dtype
        flat = tf.reshape(tf.cast(ctx, tf.float32), [-1])
        (total,) = call(partial(_sum, compressor), [token, flat, shape], [tf.float32])
        shaped = tf.reshape(tf.cast(total, dtype), shape)
        shaped.set_shape(ctx.shape)
        return _without_gradient(ctx, shaped)


def _is_compressed(compressor: Compressor, tensor: tf.Tensor) -> bool:
    size = tensor.shape.num_elements()
    # All workers pass the same shape, so they agree also on one that is known only later.
    large = size is None or size >= max(compressor.dense_below, 1)
    return compressor.meets != "dense" and large and tensor.dtype.is_floating


@tf.custom_gradient
def _without_gradient(tensor: tf.Tensor, result: tf.Tensor) -> Any:
    """`result`, which depends on `tensor` in a way that has no gradient."""

    def refuse(*upstream: tf.Tensor) -> NoReturn:
        raise UnsupportedError(
            "a compressed allreduce has no gradient: pass tf.stop_gradient(tensor), or call it outside of the tape"
        )

    return tf.identity(result), refuse


def _sum(compressor: Compressor, token: tf.Tensor, flat: tf.Tensor, shape: tf.Tensor) -> list[Any]:
    """The result for the workers that `token` names; without error feedback, since there is no next step."""
    with exact_floats():
        ranks, factor = _read(token.numpy(), compressor)
        x = own(flat)
        parameter = Parameter("hvd_gradcomp.allreduce", len(x), "float32", tuple(shape.numpy().tolist()))
        engine = Engine(compressor, [parameter], HorovodTransport(_process_set(ranks)), average=False)
        engine.submit(parameter.name, x)
        return [engine.finish()[parameter.name] * np.float32(factor)]


def _read(token: np.ndarray, compressor: Compressor) -> tuple[list[int], float]:
    """Who took part, and the factor that their sum is to be multiplied by."""
    marks = token[_NUMBERS:]
    ranks = [int(rank) for rank in np.flatnonzero(marks)]
    if len(token) == _NUMBERS + hvd.size() and ranks:
        unusable = [int(rank) for rank in np.flatnonzero(np.isnan(marks))]
        if unusable:
            raise NonFiniteError(
                f"the tensors of ranks {unusable} hold NaN or infinity (as float32) and cannot be compressed: "
                "look for the cause there, or use compression=hvd.Compression.none, which passes them on"
            )
        # What a sum of their tokens is, up to a factor.
        tokens = np.array([len(ranks), sum(ranks) + len(ranks), *([1] * len(ranks))])
        factor = float(token[0]) / len(ranks)
        if np.allclose([*token[:_NUMBERS], *marks[ranks]], tokens * factor):
            return ranks, factor
    raise UnsupportedError(
        f"{compressor} can be used with hvd.allreduce and hvd.grouped_allreduce, op=hvd.Sum and op=hvd.Average only "
        "(this was Min, Max, Product, Adasum or a reducescatter): its payloads are decoded and added, nothing else"
    )


def _process_set(ranks: list[int]) -> hvd.ProcessSet:
    """The process set of exactly `ranks`."""
    for number, members in mpi_ops._basics._get_process_set_ids_and_ranks().items():
        if list(members) == ranks:
            found = process_sets._temp_process_set_object(number)
            found.ranks = ranks
            return found
    raise UnsupportedError(f"no process set holds exactly the ranks {ranks} that took part in this allreduce")
