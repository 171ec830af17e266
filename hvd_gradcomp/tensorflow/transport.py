"""Horovod's collectives for TensorFlow as the transport of the engine.

Horovod knows a TensorFlow collective by the name of its node in a graph; an eager one has no name of its own, so two
must never be under way at once. And a graph cannot be run from inside a `tf.py_function`, where the engine runs: with
one thread in TensorFlow's pool, which is then occupied, that waits for ever. So one thread of this module runs all
requests eagerly, one after another, in the order in which they were started; it is the same on every worker, since the
engine takes a step's gradients in the order of the variables. A difference between workers does not pass unseen: every
payload carries a fingerprint of its parameters. While a request is under way the next bucket is compressed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common import process_sets
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.collectives import Allgather, Allreduce, Request, Transport, node_key, nodes_of, process_set_of
from hvd_gradcomp.errors import UnsupportedError
from hvd_gradcomp.ops import Array
from hvd_gradcomp.tensorflow.host import view
from hvd_gradcomp.wire.payload import JOIN_ADVICE

_ADDS = ("float32", "float16")


class _Line:
    """A thread that calls functions one after another; it does not keep the process from ending."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[tf.Tensor], Callable[[], tf.Tensor]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], tf.Tensor]) -> Future[tf.Tensor]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvd_gradcomp", daemon=True)
            self._thread.start()
        result: Future[tf.Tensor] = Future()
        self._waiting.put((result, function))
        return result

    def _run(self) -> None:
        while True:
            result, function = self._waiting.get()
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)


_line = _Line()


class HorovodTransport:
    """Collectives among the workers of a Horovod process set, on numpy arrays or eager tensors."""

    def __init__(self, process_set: hvd.ProcessSet) -> None:
        self.process_set = process_set

    @property
    def rank(self) -> int:
        """This worker's rank in the process set."""
        return int(self.process_set.rank())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers' ranks in the whole job."""
        return tuple(self.process_set.ranks)

    @property
    def workers(self) -> int:
        """The size of the process set."""
        return int(self.process_set.size())

    def adds(self, kind: str) -> bool:
        """Horovod adds float32 and float16; it refuses bfloat16."""
        return kind in _ADDS

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Workers of one host share a node."""
        key = np.frombuffer(node_key(hvd.rank(), hvd.size()), np.uint8)
        return nodes_of(np.asarray(self.start(Allgather(key), "hvd_gradcomp.nodes")()).tobytes())

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        """The workers of that group which this one is in; process sets that are missing are made.

        Raises:
            UnsupportedError: they cannot be made.
        """
        ranks = self.ranks
        named = [sorted(ranks[place] for place in group) for group in groups]
        mine = next(group for group in named if hvd.rank() in group)
        number = process_set_of(
            named,
            hvd.rank(),
            mpi_ops._basics._get_process_set_ids_and_ranks,
            hvd.add_process_set,
            everyone=len(ranks) == hvd.size(),
        )
        found = process_sets._temp_process_set_object(number)
        found.ranks = mine
        return HorovodTransport(found)

    def start(self, request: Request, name: str) -> Callable[[], Array]:
        """Begin a request as soon as those before it have ended; its name is not looked at, see above."""
        process_set = self.process_set
        if isinstance(request, Allreduce):
            on_host = isinstance(request.values, np.ndarray)
            # Converted here: the other thread may flush subnormals.
            values = tf.convert_to_tensor(_cast(request.values, request.kind))
            op = mpi_ops.Max if request.op == "max" else mpi_ops.Sum
            handle = _line.submit(lambda: mpi_ops._allreduce(values, op=op, process_set=process_set))
            return lambda: _cast(_view(_wait(handle), on_host), "float32")
        on_host = isinstance(request.payload, np.ndarray)
        payload = tf.convert_to_tensor(request.payload)
        if isinstance(request, Allgather):
            handle = _line.submit(lambda: mpi_ops.allgather(payload, process_set=process_set))
        else:
            splits = tf.constant(request.splits, tf.int32)
            handle = _line.submit(lambda: mpi_ops.alltoall(payload, splits, process_set=process_set)[0])
        return lambda: _view(_wait(handle), on_host)

    def wait(self, handle: Callable[[], Array]) -> Array:
        """The result behind a handle of `start`."""
        return handle()


def _cast(values: Array, kind: str) -> Array:
    """Float values in another format, in memory that may be changed."""
    return values.astype(kind) if isinstance(values, np.ndarray) else tf.cast(values, kind)


def _view(result: tf.Tensor, as_numpy: bool) -> Array:
    return view(result) if as_numpy else result


def _wait(handle: Future[tf.Tensor]) -> tf.Tensor:
    """The result, with a clearer word where a worker has called `hvd.join()`.

    Raises:
        UnsupportedError: a worker has joined.
    """
    try:
        return handle.result()
    except tf.errors.OpError as error:
        if "Join" not in error.message:
            raise
        raise UnsupportedError(
            f"Horovod said: {error.message}. A worker called hvd.join() while others still exchange compressed "
            f"gradients: {JOIN_ADVICE}"
        ) from error
