"""Between TensorFlow's gradients and the engine: which gradients take which way, and how results come back.

All compressed gradients of a step go through one Python call, so that every worker starts its exchanges in the same
order. A graph with that call is traced once; the engine runs whenever the graph does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.util import split_list

from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.feedback.shares import share_size, shared_part
from hvd_gradcomp.ops import ops_for
from hvd_gradcomp.tensorflow.direct import Direct
from hvd_gradcomp.tensorflow.graphs import call
from hvd_gradcomp.tensorflow.greeting import Greeting
from hvd_gradcomp.tensorflow.host import exact_floats, own
from hvd_gradcomp.tensorflow.paths import tensorflow_variable
from hvd_gradcomp.tensorflow.presence import Presence
from hvd_gradcomp.tensorflow.settings import Settings
from hvd_gradcomp.tensorflow.state import Residuals
from hvd_gradcomp.tensorflow.transport import HorovodTransport

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None

_KINDS = {tf.float32: "float32", tf.float64: "float64", tf.float16: "float16", tf.bfloat16: "bfloat16"}


class GradientExchange:
    """The gradients of one list of variables: large ones through the engine, small and sparse ones as Horovod does.

    Args:
        settings: how.
        variables: whose; the same list on every worker.
        paths: what they are called.
        scope: see `Engine`.
        owner: see `Greeting`.

    Attributes:
        residuals: what this worker has not sent yet.
    """

    def __init__(
        self, settings: Settings, variables: Sequence[tf.Variable], paths: Sequence[str], scope: str, owner: str = ""
    ) -> None:
        self.settings = settings
        self.paths = list(paths)
        self.shapes = [variable.shape for variable in variables]
        self.dtypes = [variable.dtype for variable in variables]
        self.compressed = [place for place in range(len(variables)) if self._is_compressed(place)]
        self.transport = HorovodTransport(settings.process_set)
        self.direct = Direct(settings, scope)
        self.engine = self._make_engine(variables, scope)
        self.presence = Presence(self.engine, self.paths, Greeting(settings, owner))
        self.residuals = Residuals(
            [variables[place] for place in self.compressed],
            [self.paths[place] for place in self.compressed],
            sorted({part for each in settings.compressor.members() for part in each.memory.parts}),
        )
        self._shares_known = False
        # Of the state that the engine has: another one in the variables is a checkpoint's.
        self._step_taken = self.engine.step
        # Two graphs that share this exchange may run at the same time.
        self._lock = threading.Lock()

    def fill(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The gradients, with zeros for those that only other workers have. None stays where no worker has one.

        Raises:
            ConfigurationError: a gradient is sparse on some workers and dense on others.
        """
        if self.settings.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        self.presence.agree(gradients)
        return [
            self.presence.filled(place, gradient, self.shapes[place], self.dtypes[place])
            for place, gradient in enumerate(gradients)
        ]

    def reduce(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The workers' average (or sum) of each gradient, eagerly or as part of a graph.

        Args:
            gradients: in the order of the variables: tensors, `tf.IndexedSlices`, or None.

        Returns:
            The same kinds, shapes and dtypes; None where no worker has a gradient.

        Raises:
            UnsupportedError: see `call`.
            ConfigurationError: a gradient is sparse on some workers and dense on others.
        """
        filled = self.fill(gradients)
        if hvd.size() == 1 and not os.environ.get("HOROVOD_ELASTIC"):
            # Nobody to send to, so nothing is lost by compression: as in Horovod's optimizer for PyTorch.
            return filled
        places = [place for place in self.compressed if isinstance(filled[place], tf.Tensor)]
        others = [place for place, each in enumerate(filled) if each is not None and place not in places]
        direct = [filled[place] for place in others]
        reduced = self.direct.reduce(direct, [self.paths[place] for place in others])
        results: list[Gradient] = [None] * len(filled)
        for place, result in zip(others, reduced, strict=True):
            results[place] = result
        sent = self._through_engine([filled[place] for place in places], places, direct)
        for place, result in zip(places, sent, strict=True):
            results[place] = tf.cast(tf.reshape(result, self.shapes[place]), filled[place].dtype)
        return results

    # -- choosing -----------------------------------------------------------------------------------------------------

    def _is_compressed(self, place: int) -> bool:
        shape = self.shapes[place]
        size = shape.num_elements()
        if size is None or self.dtypes[place] not in _KINDS:
            return False
        return self.settings.compressor.of(self.paths[place], tuple(shape.as_list())).takes(size)

    def _make_engine(self, variables: Sequence[tf.Variable], scope: str) -> Engine:
        settings = self.settings
        parameters = [
            Parameter(
                self.paths[place],
                self.shapes[place].num_elements(),
                _KINDS[self.dtypes[place]],
                tuple(self.shapes[place].as_list()),
            )
            for place in self.compressed
        ]
        options = {
            "dense_below": settings.compressor.dense_below,
            "sparse_as_dense": settings.sparse_as_dense,
            "backward_passes_per_step": settings.backward_passes_per_step,
            **settings.further,
        }
        return Engine(
            settings.compressor,
            parameters,
            self.transport,
            average=settings.averages,
            options=options,
            groups=self._group_names(variables),
            scope=scope,
        )

    def _group_names(self, variables: Sequence[tf.Variable]) -> list[list[str]] | None:
        groups = self.settings.groups
        if groups is None:
            return None
        if isinstance(groups, int):
            return split_list([self.paths[place] for place in self.compressed], groups)
        path_of = {id(variables[place]): self.paths[place] for place in self.compressed}
        members = [[id(tensorflow_variable(each)) for each in group] for group in groups]
        return [[path_of[each] for each in group if each in path_of] for group in members]

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _through_engine(
        self, gradients: Sequence[tf.Tensor], places: Sequence[int], direct: Sequence[Gradient]
    ) -> list[tf.Tensor]:
        flat = [tf.reshape(tf.cast(each, tf.float32), [-1]) for each in gradients]
        parts = [each.values if isinstance(each, tf.IndexedSlices) else each for each in direct]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in parts])
        sizes = tf.stack([tf.size(each) for each in parts]) if parts else tf.zeros([0], tf.int32)
        step = partial(self._step, [self.paths[place] for place in places], [each.dtype for each in parts])
        return call(step, [finite, sizes, *flat], [tf.float32] * len(flat) + [tf.bool])[:-1]

    def _step(
        self, names: list[str], dtypes: list[tf.DType], finite: tf.Tensor, sizes: tf.Tensor, *flat: tf.Tensor
    ) -> list[Any]:
        """One step of the engine; runs when the graph runs. The last of its results says that it has."""
        with self._lock, exact_floats():
            self._count(dtypes, sizes.numpy().tolist())
            if not names:
                return [True]
            gradients = {name: own(each) for name, each in zip(names, flat, strict=True)}
            if not finite:
                # Loss scaling skips the whole step if an uncompressed gradient is not finite: tell all workers.
                first = gradients[names[0]]
                gradients[names[0]] = ops_for(first).zeros(len(first), "float32", first) + float("nan")
            self._create_shares()
            self._take_state()
            for parameter in self.engine.parameters:
                self.engine.submit(parameter.name, gradients.get(parameter.name))
            results = self.engine.finish()
            self._step_taken = self.engine.step
            self.residuals.write(self.engine.state, self._step_taken, self.engine.policy_state)
            return [*(results[name] for name in names), True]

    def _create_shares(self) -> None:
        """Make the variables of what this worker keeps as an owner, as soon as it is known what it owns."""
        if self._shares_known:
            return
        self._shares_known = True
        engine, compressor = self.engine, self.settings.compressor
        if compressor.collective == "allgather":
            return
        kept: dict[str, dict[str, int]] = {each.name: {} for each in engine.parameters}
        for owner, owners, parts in engine.shares():
            for each in engine.parameters:
                size = share_size(each.name, each.size, owner, owners)
                kept[each.name] |= {shared_part(part, owner, owners): size for part in parts}
        self.residuals.create(kept)

    def _take_state(self) -> None:
        """Let the engine go on from the variables: what the last step left there, or a checkpoint put there."""
        state, step = self.residuals.read()
        if step == self._step_taken:
            self.engine.state = state
        else:
            self.engine.load_state(state, step, self.residuals.read_policy())
            self._step_taken = step

    def _count(self, dtypes: list[tf.DType], sizes: list[int]) -> None:
        counters = self.engine.counters.bucket("dense")
        for dtype, size in zip(dtypes, sizes, strict=True):
            # Horovod takes no bfloat16: it travels as float32.
            sent = (4 if dtype == tf.bfloat16 else dtype.size) * size
            counters.exchanges += 1
            counters.elements += size
            counters.kept += size
            counters.dense_bytes += dtype.size * size
            counters.sent_bytes += sent
            counters.received_bytes += sent
