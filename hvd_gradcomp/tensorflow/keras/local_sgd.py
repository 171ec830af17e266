"""Local SGD for Keras 3: workers step on their own and meet every H steps, as a callback of `model.fit`.

What happens when they meet is in `engine/meeting.py`. A callback, because it is outside of the step that Keras traces
or compiles: the optimizer stays an ordinary one, and the step may be compiled by XLA, as no collective is in it.

References:
    S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    D. Basu, D. Data, C. Karakus, S. Diggavi, "Qsparse-local-SGD: Distributed SGD with Quantization, Sparsification,
    and Local Computations", NeurIPS 2019 (compression of the change, with error feedback).
    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
from horovod.tensorflow.compression import Compression

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine import Parameter
from hvd_gradcomp.engine.meeting import Meetings, change_compressor
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.local_steps import LocalSteps, check_outer, steps_until_meeting
from hvd_gradcomp.telemetry import Counters
from hvd_gradcomp.tensorflow.checkpoint import mean_state, state_from
from hvd_gradcomp.tensorflow.keras.local_saving import read, write
from hvd_gradcomp.tensorflow.keras.optimizer import Distributed
from hvd_gradcomp.tensorflow.keras.replica import Replica, broadcast, values_of
from hvd_gradcomp.tensorflow.paths import tensorflow_variable
from hvd_gradcomp.tensorflow.transport import HorovodTransport

_FORMAT = "hvd_gradcomp local SGD of Keras 1"


class LocalSGD(keras.callbacks.Callback):
    """Lets each worker take the steps of `model.fit` by itself, and all meet every `sync_every` steps and at the end.

    With `sync_every=1`, no compression and no outer optimizer each step is a local step followed by
    `hvd.grouped_allreduce(model.trainable_variables, op=hvd.Average)`, bit for bit.

    The model is compiled with an ordinary optimizer. Every worker must take the same number of steps. Put this callback
    before those that look at the weights or save them. In a loop of your own call `start(model)` before the first step,
    `step()` after each and `synchronize()` after the last.

    Args:
        sync_every: the number H of local steps between two meetings, or a function that gives it for the number of
            steps done (see `PostLocal`). With `steps_per_execution` workers meet after whole executions.
        compression: a compressor of this package for the change since the last meeting; None averages parameters.
        outer: an optimizer of Keras with the settings of one that applies the averaged change as if it were a
            gradient; None subtracts it. See `DiLoCo`.
        buffers: average the other floating-point weights of the model as well, such as the moving statistics of batch
            normalization, at every meeting; by default they stay each worker's own.
        every_epoch: meet at the end of each epoch too, before the model is validated and saved. Without, what is
            validated and saved between two meetings is each worker's own model.
        root_rank: the worker that gives all others its weights and optimizer state at the start, unless a state has
            been loaded; None if they are the same already.
        process_set: the workers that meet.

    Raises:
        ConfigurationError: some of these cannot work.
    """

    def __init__(
        self,
        sync_every: LocalSteps,
        *,
        compression: Compressor | type[Compressor] | None = None,
        outer: keras.optimizers.Optimizer | None = None,
        buffers: bool = False,
        every_epoch: bool = False,
        root_rank: int | None = 0,
        process_set: hvd.ProcessSet = hvd.global_process_set,
    ) -> None:
        super().__init__()
        steps_until_meeting(sync_every, 0)
        if outer is not None and not isinstance(outer, keras.optimizers.Optimizer):
            raise ConfigurationError(f"outer must be an optimizer of Keras or None, got {type(outer).__name__}")
        self.sync_every = sync_every
        self.every_epoch = every_epoch
        self.root_rank = root_rank
        self._compressor = change_compressor(compression, Compression.none)
        self._outer = outer
        self._averages_buffers = buffers
        self._process_set = process_set
        self._meetings: Meetings | None = None
        self._replica: Replica | None = None
        # What was loaded before there was a model.
        self._loaded: list[Callable[[], None]] = []
        self._resumes = False
        self._training = False
        self._first_batch = 0

    @property
    def counters(self) -> Counters:
        """What was sent so far by this worker; `dense_bytes` are those of meeting at the same steps uncompressed."""
        return self._started().counters

    @property
    def steps(self) -> int:
        """How many local steps this worker has taken."""
        return self._meetings.clock.steps if self._meetings else 0

    def start(self, model: keras.Model) -> None:
        """Before the first step: take this model's weights for what the workers have in common. Collective.

        Raises:
            ConfigurationError: its optimizer exchanges gradients, or this callback belongs to another model.
        """
        optimizer = model.optimizer
        if isinstance(getattr(optimizer, "inner_optimizer", optimizer), Distributed):
            raise ConfigurationError(
                "local SGD needs an ordinary optimizer, got one that exchanges gradients already: compile the model "
                "without hvd.DistributedOptimizer, or train without this callback"
            )
        variables = [tensorflow_variable(each) for each in model.trainable_variables]
        if self._replica is not None:
            if [id(each) for each in variables] != [id(each) for each in self._replica.variables.values()]:
                raise ConfigurationError(
                    "this callback has begun with other trainable variables: make a new one for another model, or when "
                    "layers are frozen or thawed"
                )
            return
        if not variables:
            raise ConfigurationError("the model has no trainable variables: there is nothing to average")
        others = [tensorflow_variable(each) for each in model.non_trainable_weights] if self._averages_buffers else []
        buffers = [each for each in others if each.dtype.is_floating]
        if self.root_rank is not None and not self._resumes and self._process_set.size() > 1:
            everything = [*model.weights, *(optimizer.variables if optimizer is not None else ())]
            broadcast([tensorflow_variable(each) for each in everything], self.root_rank, self._process_set)
        self._replica = Replica(variables, self._outer, buffers, self._process_set)
        transport = HorovodTransport(self._process_set)
        self._meetings = Meetings(self._replica, self.sync_every, self._compressor, transport, scope="local:")
        for load in self._loaded:
            load()
        self._meetings.before_step()
        if optimizer is not None:
            optimizer.save_assets = self._write

    def step(self, count: int = 1) -> None:
        """Count local steps that this worker has taken, and meet if it is time for it."""
        self._started().after_steps(count)

    def synchronize(self) -> None:
        """Meet now, whatever the schedule says: before testing or saving, and after the last step. Collective.

        Raises:
            ConfigurationError: workers were given different settings, have taken different numbers of steps, or began
                with different weights; the message names ranks and settings.
            NonFiniteError: some worker's change holds NaN or infinity; weights and anchors stay as they were.
        """
        self._started().synchronize()

    # -- callbacks of Keras -------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._training = True
        # Models without an input shape are built by their first batch.
        if self.model.built:
            self.start(self.model)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._first_batch = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._meetings is None:
            self.start(self.model)
        # More than one with steps_per_execution.
        self.step(batch - self._first_batch + 1)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._training and self.every_epoch:
            self._catch_up()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.every_epoch:
            self._catch_up()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._training = False
        self._catch_up()

    def _catch_up(self) -> None:
        if self._meetings is not None and self._meetings.clock.since_meeting:
            self.synchronize()

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The steps, the anchors and the outer optimizer's state, in arrays of numpy; alike on all after a meeting.

        To save beside the model, with `residual_state_dict` for any number of workers. A `.keras` file written by
        `model.save` holds all this for the worker that wrote it: see `load`.
        """
        state = self._started().state_dict()
        anchors = {path: values_of(anchor) for path, anchor in state["anchors"].items()}
        return {"format": _FORMAT, **state, "anchors": anchors}

    def load_state_dict(self, state: Any) -> None:
        """The reverse of `state_dict`, on every worker, beside loading the model; before or after `start`.

        Raises:
            ConfigurationError: it is no such state, or (when training starts) belongs to another model or options.
        """
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            found = state.get("format") if isinstance(state, dict) else type(state).__name__
            raise ConfigurationError(f"expected what LocalSGD.state_dict() gave (format {_FORMAT!r}), got {found!r}")
        self._resumes = True
        self._when_started(lambda: self._started().load_state_dict(state))

    def residual_state_dict(self) -> dict[str, object]:
        """What the workers have not sent of their changes, as their mean, in numpy arrays.

        Collective: every worker makes the call, each gets the same.
        """
        engine = self._started().reduction.large
        return mean_state(engine, engine.state, engine.step, engine.policy_state)

    def load_residual_state_dict(self, state: Any) -> None:
        """Give this worker what was saved by `residual_state_dict`; on every worker, however many they are now.

        Raises:
            ConfigurationError: it is no such state, or (when training starts) belongs to another model.
        """

        def load() -> None:
            engine = self._started().reduction.large
            engine.load_state(*state_from(state, {each.name: each.size for each in engine.parameters}))

        self._when_started(load)

    def load(self, filepath: Any) -> None:
        """Go on from what `model.save` wrote on this worker: steps, anchors, outer optimizer and residuals.

        Beside loading the model from the same file. A file of another worker gives all but the residuals.

        Raises:
            ConfigurationError: there is none in the file, or (when training starts) it belongs to another model.
        """
        saved = read(filepath)
        self._resumes = True

        def load() -> None:
            meetings = self._started()
            meetings.load_state_dict(saved.common([each.name for each in self._parameters]))
            kept = saved.kept(meetings.reduction.large.parameters, self._process_set)
            if kept:
                meetings.reduction.large.load_state(*kept)

        self._when_started(load)

    def _write(self, folder: str) -> None:
        write(Path(folder), self._started(), self._process_set)

    @property
    def _parameters(self) -> Sequence[Parameter]:
        assert self._replica is not None
        return self._replica.parameters

    def _when_started(self, load: Callable[[], None]) -> None:
        if self._meetings is None:
            self._loaded.append(load)
        else:
            load()

    def _started(self) -> Meetings:
        if self._meetings is None:
            raise ConfigurationError("training has not started: call this after model.fit() has begun, or start(model)")
        return self._meetings


def DiLoCo(  # noqa: N802  (the paper's name)
    sync_every: LocalSteps, *, outer_lr: float = 0.7, outer_momentum: float = 0.9, **options: Any
) -> LocalSGD:
    """`LocalSGD` whose averaged change is applied by SGD with Nesterov momentum, as in DiLoCo.

    Args:
        sync_every: see `LocalSGD`; about 500 in the paper, with AdamW as the model's optimizer.
        outer_lr: > 0; with 1 and no momentum this is plain local SGD.
        outer_momentum: 0 <= outer_momentum < 1. Where there are few meetings a smaller one does better.
        options: further arguments of `LocalSGD`.

    Raises:
        ConfigurationError: an argument is out of its range.
    """
    check_outer(outer_lr, outer_momentum)
    if "outer" in options:
        raise ConfigurationError("DiLoCo brings its own outer optimizer: for another one use LocalSGD(outer=...)")
    outer = keras.optimizers.SGD(outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    return LocalSGD(sync_every, outer=outer, **options)
