"""Local SGD in Keras: what workers hold after they met, by which way, what is saved, what keeps them from meeting.

How changes are compressed and applied is the same code as for PyTorch, and is tested there against a reference.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import horovod.tensorflow as horovod
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_workers import assert_same_everywhere

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.tensorflow import ConfigurationError, NonFiniteError, PowerSGD, TopKInt8

COMPRESSION = TopKInt8(ratio=0.05, dense_below=64)
#: Batches of an epoch.
BATCHES = 4


def model(momentum: float = 0.9, **options: Any) -> keras.Model:
    """The same on all workers; with some statistics of batch normalization."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(40, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="statistics"),
        keras.layers.Dense(3, name="logits"),
    ]
    made = keras.Sequential([keras.Input((20,)), *layers], name="classifier")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Tracing takes longer than these few steps.
    options = options or {"run_eagerly": True}
    made.compile(keras.optimizers.SGD(0.1, momentum=momentum), loss, **options)
    return made


def fit(trained: keras.Model, *callbacks: keras.callbacks.Callback, rank: int | None = None, **options: Any) -> None:
    random = np.random.default_rng(hvd.rank() if rank is None else rank)
    x = random.standard_normal((8 * BATCHES, 20)).astype(np.float32)
    trained.fit(x, x[:, :3].argmax(1), 8, callbacks=list(callbacks), verbose=0, shuffle=False, **options)


def weights(trained: keras.Model) -> list[np.ndarray]:
    return [each.numpy() for each in trained.trainable_variables]


def differ(trained: keras.Model) -> bool:
    everybody = hvd.allgather(tf.convert_to_tensor(trained.trainable_variables[0])[None]).numpy()
    return bool((everybody[0] != everybody[1]).any())


class Each(keras.callbacks.Callback):
    """Calls a function after each batch."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.function()


def test_meeting_after_every_step_is_plain_averaging_bit_for_bit() -> None:
    plain, met = model(jit_compile=False), model(jit_compile=False)

    def average() -> None:
        variables = [each.value for each in plain.trainable_variables]
        averages = horovod.grouped_allreduce([each.value() for each in variables], op=hvd.Average)
        for variable, each in zip(variables, averages, strict=True):
            variable.assign(each)

    local = hvd.LocalSGD(1)
    fit(plain, Each(average))
    fit(met, local)
    for one, other in zip(weights(plain), weights(met), strict=True):
        np.testing.assert_array_equal(one, other)
    assert local.steps == local.counters.total.exchanges == BATCHES


def test_workers_meet_every_third_step_and_at_the_end() -> None:
    """XLA may compile the step: it holds no collective."""
    trained, local = model(jit_compile=True), hvd.LocalSGD(3)
    # Weights that differ, until rank 0 gives its own.
    trained.weights[0].assign_add(tf.fill((20, 40), float(hvd.rank())))
    apart: list[bool] = []
    fit(trained, local, Each(lambda: apart.append(differ(trained))), epochs=2)
    assert apart == [True, True, False, True, True, False, True, True]
    assert_same_everywhere(weights(trained))
    assert local.counters.total.exchanges == 3
    # The statistics of batch normalization, and momentum, are each worker's own.
    assert len({each.tobytes() for each in hvd.allgather(trained.layers[1].moving_mean.value[None]).numpy()}) > 1


def test_bytes_are_divided_by_the_steps_and_by_what_is_saved() -> None:
    size = 4 * sum(each.size for each in weights(model()))
    for steps, compression in ((1, None), (4, None), (4, COMPRESSION)):
        local = hvd.LocalSGD(steps, compression=compression)
        fit(model(), local)
        total = local.counters.total
        assert total.dense_bytes == size * BATCHES // steps
        if compression is None:
            assert total.sent_bytes == total.dense_bytes
        else:
            # A quarter of the values lies in tensors that are too small to be compressed.
            assert total.sent_bytes < 0.45 * total.dense_bytes


@pytest.mark.parametrize("compression", [None, PowerSGD(rank=2, dense_below=64)], ids=str)
def test_diloco_steps_along_the_average_change(compression: Any) -> None:
    trained = model(momentum=0.0)
    start = weights(trained)
    if compression is None:
        # One meeting from a known start: by lr * (1 + momentum) times the change, as Nesterov has it.
        changes = []
        for rank in range(hvd.size()):
            other = model(momentum=0.0)
            fit(other, rank=rank)
            changes.append([a - b for a, b in zip(start, weights(other), strict=True)])
        mean = [np.mean(each, axis=0) for each in zip(*changes, strict=True)]
    fit(trained, hvd.DiLoCo(BATCHES, outer_lr=0.5, outer_momentum=0.8, compression=compression))
    assert_same_everywhere(weights(trained))
    if compression is None:
        for value, before, change in zip(weights(trained), start, mean, strict=True):
            np.testing.assert_allclose(value, before - 0.5 * 1.8 * change, atol=1e-5)


def test_a_schedule_and_several_steps_an_execution() -> None:
    meetings: list[int] = []
    local = hvd.LocalSGD(hvd.PostLocal(3, after=2))
    fit(model(), local, Each(lambda: meetings.append(local.counters.total.exchanges)), epochs=2)
    assert meetings == [1, 2, 2, 2, 3, 3, 3, 4]
    # Two steps at a time: workers meet after the second execution, and find that it was time a step before.
    local = hvd.LocalSGD(3)
    fit(model(steps_per_execution=2, run_eagerly=True), local, epochs=2)
    assert (local.steps, local.counters.total.exchanges) == (2 * BATCHES, 2)


def test_every_epoch_workers_meet_before_they_validate_and_save() -> None:
    trained = model()
    seen: list[bool] = []

    class Look(keras.callbacks.Callback):
        def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
            seen.append(differ(trained))

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            seen.append(differ(trained))

    x = np.zeros((8, 20), np.float32)
    local = hvd.LocalSGD(100, every_epoch=True, buffers=True)
    fit(trained, local, Look(), epochs=2, validation_data=(x, np.zeros(8)))
    assert seen == [False] * 4
    assert_same_everywhere([each.numpy() for each in trained.weights])
    # Parameters and buffers, twice.
    assert local.counters.total.exchanges == 4


def test_a_model_that_is_built_by_its_first_batch_and_a_loop_of_ones_own() -> None:
    keras.utils.set_random_seed(hvd.rank())
    late = keras.Sequential([keras.layers.Dense(40), keras.layers.Dense(3)])
    late.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    fit(late, hvd.DiLoCo(3))
    assert_same_everywhere(weights(late))

    mine = model()
    local = hvd.LocalSGD(2)
    local.start(mine)
    for step in range(3):
        for variable in mine.trainable_variables:
            variable.assign_add(tf.fill(variable.shape, float(hvd.rank() + step)))
        local.step()
        assert differ(mine) == (step != 1)
    local.synchronize()
    assert_same_everywhere(weights(mine))


@pytest.mark.parametrize("way", ["file", "states"])
def test_training_goes_on_after_loading_as_if_it_had_not_stopped(way: str, tmp_path: Path) -> None:
    """Residuals, outer momentum, anchors and the number of steps, beside what Keras saves."""
    trained, local = model(), hvd.DiLoCo(3, outer_momentum=0.5, compression=COMPRESSION)
    fit(trained, local, epochs=1)
    path = tmp_path / f"{hvd.rank()}.keras"
    trained.save(path)
    new = hvd.DiLoCo(3, outer_momentum=0.5, compression=COMPRESSION)
    owed = local.residual_state_dict()
    assert any(np.any(parts["residual"]) for parts in owed["mean"].values())
    if way == "file":
        # Here Keras gives variables other paths.
        resumed = keras.models.load_model(path)
        resumed.compile(resumed.optimizer, resumed.loss, run_eagerly=True)
        new.load(path)
    else:
        resumed = model()
        resumed.optimizer.build(resumed.trainable_variables)
        resumed.load_weights(path)
        new.load_state_dict(local.state_dict())
        # The workers' mean, which the one that goes on has to have as well.
        new.load_residual_state_dict(owed)
        local.load_residual_state_dict(owed)
    for each, callback in ((trained, local), (resumed, new)):
        fit(each, callback, epochs=2)
    assert new.steps == local.steps == 3 * BATCHES
    for one, other in zip(weights(trained), weights(resumed), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_file_of_another_worker_gives_all_but_the_residuals(tmp_path: Path) -> None:
    trained, local = model(), hvd.LocalSGD(2, compression=COMPRESSION)
    fit(trained, local)
    path = tmp_path / "model.keras"
    trained.save(path)
    paths = horovod.allgather_object(str(path))
    resumed, new = keras.models.load_model(paths[0]), hvd.LocalSGD(2, compression=COMPRESSION)
    new.load(paths[0])
    with contextlib.nullcontext() if hvd.rank() == 0 else pytest.warns(UserWarning, match="residuals of rank 0"):
        new.start(resumed)
    assert new.steps == BATCHES
    horovod.allreduce(tf.zeros(1), name="read")  # nobody ends, and cleans up, before all have read
    saved = new.state_dict()["anchors"]
    assert all(np.array_equal(a, b) for a, b in zip(saved.values(), weights(resumed), strict=True))


def test_half_precision_does_not_lose_small_changes() -> None:
    keras.utils.set_random_seed(1)
    ones = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones", dtype="bfloat16")])
    ones.compile("sgd", "mse")
    local = hvd.LocalSGD(1, outer=keras.optimizers.SGD(0.25))
    local.start(ones)
    kernel = ones.trainable_variables[0]
    for _ in range(8):
        kernel.assign_sub(tf.fill(kernel.shape, tf.constant(2.0**-7, tf.bfloat16)))
        local.step()
    # A quarter of a change of 2**-7 is half of what bfloat16 can tell apart below 1: each would be rounded away.
    assert float(tf.reduce_max(kernel.value)) < 1.0
    assert_same_everywhere([np.array(tf.cast(kernel.value, tf.float32))])


@contextlib.contextmanager
def refused(error: type[Exception], text: str) -> Any:
    with pytest.raises(error, match=text):
        yield
    horovod.allreduce(tf.zeros(1), name="refused")


def test_workers_with_different_settings_are_told_at_the_first_meeting() -> None:
    with refused(ConfigurationError, "rank 1 has sync_every = '2', rank .* has|rank 0 has sync_every = '1'"):
        fit(model(), hvd.LocalSGD(1 + hvd.rank() % 2))
    with refused(ConfigurationError, "has outer = .*momentum"):
        fit(model(), hvd.DiLoCo(2, outer_momentum=0.5 + 0.1 * (hvd.rank() % 2)))
    trained = model()
    trained.weights[0].assign_add(tf.fill((20, 40), float(hvd.rank())))
    with refused(ConfigurationError, "starting values"):
        fit(trained, hvd.LocalSGD(2, compression=COMPRESSION, root_rank=None))
    local = hvd.LocalSGD(9)
    local.start(model())
    local.step(1 + hvd.rank() % 2)
    with refused(ConfigurationError, "local steps"):
        local.synchronize()


def test_a_change_that_is_not_finite_is_an_error_on_every_worker() -> None:
    trained, local = model(), hvd.LocalSGD(1, compression=COMPRESSION)
    fit(trained, local)
    before = weights(trained)
    trained.trainable_variables[1].assign(tf.fill((40,), float("nan") if hvd.rank() == 1 else 1.0))
    with refused(NonFiniteError, "lower the learning rate"):
        local.step()
    with pytest.warns(UserWarning, match="1 steps after"):
        anchors = local.state_dict()["anchors"]
    assert all(np.array_equal(a, b) for a, b in zip(anchors.values(), before, strict=True))


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    for wrong in (0, True, 2.5, lambda done: 0):
        with pytest.raises(ConfigurationError, match="whole number"):
            hvd.LocalSGD(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="FP16"):
        hvd.LocalSGD(2, compression=hvd.Compression.fp16)
    with pytest.raises(ConfigurationError, match="outer_momentum"):
        hvd.DiLoCo(2, outer_momentum=1)
    with pytest.raises(ConfigurationError, match="optimizer of Keras"):
        hvd.LocalSGD(2, outer="sgd")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has not started"):
        hvd.LocalSGD(2).synchronize()
    trained, local = model(), hvd.LocalSGD(2)
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(ConfigurationError, match="exchanges gradients already"):
        local.start(trained)
    local.start(model())
    with pytest.raises(ConfigurationError, match="other trainable variables"):
        local.start(model())
    with pytest.raises(ConfigurationError, match=r"expected what LocalSGD\.state_dict"):
        local.load_state_dict({"anchors": {}})
    path = tmp_path / "plain.keras"
    model().save(path)
    with pytest.raises(ConfigurationError, match="no state of local SGD"):
        local.load(path)
    diloco = hvd.DiLoCo(2)
    diloco.start(model())
    local = hvd.LocalSGD(2, compression=COMPRESSION)
    local.start(model())
    with pytest.raises(ConfigurationError, match="outer optimizer"):
        local.load_state_dict(diloco.state_dict())
