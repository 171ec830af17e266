"""`hvd.allreduce(tensor, compression=TopKInt8)` outside an optimizer, without changing Horovod.

Horovod calls `compress`, adds up what it returns, and calls `decompress`; it tells neither the operation nor the
process set. So `compress` hands out a token: a one and, for each rank of the job, a one in that rank's place. What
comes back shows who took part, and whether the operation was a sum or an average and with which factors. Only then are
the payloads exchanged, so that an operation that has no meaning for them is an error before anything can hang.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common import process_sets
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.compressors.base import LocalContext, decode_locally, doors, encode_locally, require_finite
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.errors import UnsupportedError
from hvd_gradcomp.ops import backend, ops_for
from hvd_gradcomp.tensorflow.graphs import call
from hvd_gradcomp.tensorflow.host import exact_floats, own
from hvd_gradcomp.tensorflow.transport import HorovodTransport


class Tokens:
    """The TensorFlow door's side of `compress` and `decompress`."""

    @staticmethod
    def install() -> None:
        """Let compressors find this door for tensors of TensorFlow."""
        doors["tensorflow"] = Tokens()

    def compress(self, compressor: Compressor, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """A token for `tensor`, or the payload itself where Horovod is not running.

        Raises:
            NonFiniteError: the tensor holds NaN or infinity (in a graph: when it runs, in `decompress`).
        """
        tensor = tf.convert_to_tensor(tensor)
        if not hvd.is_initialized():
            with exact_floats():
                # On CPU as numpy, where subnormals survive.
                frame, ctx = encode_locally(compressor, backend("numpy"), tensor.numpy())
            return tf.convert_to_tensor(frame), ctx
        if compressor.meets == "dense":
            return tensor, None
        marks = np.zeros(1 + hvd.size())
        marks[0] = marks[1 + hvd.rank()] = 1
        return tf.constant(marks, tf.float64), tensor

    def decompress(self, compressor: Compressor, token: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The sum or average that `token` asks for, of what the workers' payloads decode to.

        Raises:
            UnsupportedError: the operation was neither Sum nor Average, or the result is differentiated.
        """
        if isinstance(ctx, LocalContext):
            with exact_floats():
                return tf.convert_to_tensor(decode_locally(compressor, token.numpy(), ctx))
        shape, dtype = tf.shape(ctx), ctx.dtype
        flat = tf.reshape(tf.cast(ctx, tf.float32), [-1])
        (total,) = call(partial(_sum, compressor), [token, flat], [tf.float32])
        shaped = tf.reshape(tf.cast(total, dtype), shape)
        shaped.set_shape(ctx.shape)
        return _without_gradient(ctx, shaped)


@tf.custom_gradient
def _without_gradient(tensor: tf.Tensor, result: tf.Tensor) -> Any:
    """`result`, which depends on `tensor` in a way that has no gradient."""

    def refuse(*upstream: tf.Tensor) -> NoReturn:
        raise UnsupportedError(
            "a compressed allreduce has no gradient: pass tf.stop_gradient(tensor), or call it outside of the tape"
        )

    return tf.identity(result), refuse


def _sum(compressor: Compressor, token: tf.Tensor, flat: tf.Tensor) -> list[Any]:
    """The result for the workers that `token` names; without error feedback, since there is no next step."""
    with exact_floats():
        ranks, factor = _read(token.numpy(), compressor)
        x = own(flat)
        ops = ops_for(x)
        require_finite(ops, x)
        parameter = Parameter("hvd_gradcomp.allreduce", len(x), "float32")
        engine = Engine(compressor, [parameter], HorovodTransport(_process_set(ranks)), average=False)
        engine.submit(parameter.name, x)
        return [engine.finish()[parameter.name] * np.float32(factor)]


def _read(token: np.ndarray, compressor: Compressor) -> tuple[list[int], float]:
    """Who took part, and the factor that their sum is to be multiplied by."""
    ranks = [int(rank) for rank in np.flatnonzero(token[1:])]
    factor = float(token[0]) / max(len(ranks), 1)
    if not ranks or not np.allclose(token[1:][ranks], factor):
        raise UnsupportedError(
            f"{compressor} can be used with op=hvd.Sum and op=hvd.Average only (this was Min, Max, Product or Adasum): "
            "its payloads are decoded and added, nothing else"
        )
    return ranks, factor


def _process_set(ranks: list[int]) -> hvd.ProcessSet:
    """The process set of exactly `ranks`."""
    for number, members in mpi_ops._basics._get_process_set_ids_and_ranks().items():
        if list(members) == ranks:
            found = process_sets._temp_process_set_object(number)
            found.ranks = ranks
            return found
    raise UnsupportedError(f"no process set holds exactly the ranks {ranks} that took part in this allreduce")
