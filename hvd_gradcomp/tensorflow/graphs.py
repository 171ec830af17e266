"""Calling Python from TensorFlow, eagerly or as a node of a graph; and the graphs in which that cannot work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvd_gradcomp.errors import UnsupportedError

_LAST_CALL = "_hvd_gradcomp_last_call"


def call(
    function: Callable[..., Sequence[object]], inputs: Sequence[tf.Tensor], outputs: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """`function(*inputs)` when the graph under construction runs, or at once where execution is eager.

    The calls of one graph run one after another, in the order of the program: the same order on every worker.

    Args:
        function: takes eager tensors, returns arrays of any framework.
        inputs: its arguments.
        outputs: the dtypes of what it returns.

    Raises:
        UnsupportedError: the graph is compiled by XLA, or is a graph of TensorFlow 1.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(result) for result in function(*inputs)]
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise UnsupportedError(
            "compressed gradients cannot be exchanged in a function with jit_compile=True: XLA compiles no collective "
            "of Horovod and no Python call. Use tf.function(jit_compile=False), or model.compile(jit_compile=False)"
        )
    require_eager_outside()
    last = getattr(graph, _LAST_CALL, None)
    with tf.control_dependencies([] if last is None else [last]):
        results = tf.py_function(function, list(inputs), list(outputs))
    setattr(graph, _LAST_CALL, results[0].op)
    return list(results)


def require_eager_outside() -> None:
    """Refuse the graphs of TensorFlow 1, which know no Python at run time.

    Raises:
        UnsupportedError: this is one.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise UnsupportedError(
            "compressed gradients need TensorFlow 2's eager execution or tf.function; this is a graph of TensorFlow 1 "
            "(tf.compat.v1.Session or disable_eager_execution()). Use one of those, or Horovod's own Compression.fp16"
        )
