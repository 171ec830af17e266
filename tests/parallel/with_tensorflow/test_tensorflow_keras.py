"""Keras 3 models on several workers: models and optimizers of all kinds, mixed precision, saving, callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as horovod
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_workers import assert_same_everywhere

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.tensorflow import FP16, ConfigurationError, TopK, TopKInt8, counters

COMPRESSION = TopKInt8(ratio=0.05, dense_below=64)
Optimizer = keras.optimizers.Optimizer


def data(rank: int, samples: int = 32) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(100 + rank)
    x = random.standard_normal((samples, 20)).astype(np.float32)
    return x, x[:, :3].argmax(axis=1)


def classifier() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(40, activation="relu"), keras.layers.Dense(3, name="logits")]
    )


def compiled(model: keras.Model, optimizer: Optimizer, eager: bool = False, **options: Any) -> keras.Model:
    options.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(optimizer, run_eagerly=eager, **options)
    return model


def assert_alike(model: keras.Model) -> None:
    assert_same_everywhere([np.asarray(each) for each in [*model.weights, *model.optimizer.variables]])


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> dict[str, list[float]]:
    x, y = data(hvd.rank())
    history = model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=list(callbacks), **options)
    return history.history


def test_fit_with_all_callbacks():
    """SGD in a traced step; the metrics, and what EarlyStopping makes of them, are the same on all workers."""
    size = hvd.size()
    rates: list[float] = []
    model = classifier()
    # Weights that differ, until rank 0 gives its own.
    model.weights[0].assign_add(tf.fill((20, 40), float(hvd.rank())))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9), compression=COMPRESSION)
    history = fit(
        compiled(model, optimizer),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=2),
        keras.callbacks.EarlyStopping("loss", min_delta=10, patience=3),
        keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: rates.append(float(optimizer.learning_rate.numpy()))
        ),
        epochs=9,
    )
    assert_alike(model)
    assert_same_everywhere([np.array(history["loss"])])
    # Four batches an epoch: the first is a quarter of the way from 0.4 / size into the first of two epochs.
    assert rates[0] == pytest.approx(0.4 / size * (0.25 * (size - 1) / 2 + 1))
    assert rates[7] == pytest.approx(0.4)
    assert history["lr"][2:4] == pytest.approx([0.4, 0.2])
    # The first epoch is the best by that measure, and three more are waited for.
    assert len(history["loss"]) == 4
    total = counters(optimizer).total
    assert 0 < total.sent_bytes < 0.25 * total.dense_bytes


def test_momentum_correction_scales_what_was_summed_with_the_old_rate():
    model = compiled(classifier(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), eager=True)
    fit(model, epochs=1)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5)
    callback.set_model(model)
    before = [m.numpy() for m in model.optimizer.momentums]
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.05)
    for old, new in zip(before, model.optimizer.momentums, strict=True):
        np.testing.assert_allclose(new.numpy(), old / 2, rtol=1e-6)


def test_embeddings_two_outputs_and_a_frozen_layer():
    """AdamW, clipped after the exchange; the embedding's gradient is sparse."""
    keras.utils.set_random_seed(2)
    ids = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(30, 16)(ids))
    frozen = keras.layers.Dense(32, trainable=False)
    hidden = frozen(hidden)
    outputs = {"a": keras.layers.Dense(3, name="a")(hidden), "b": keras.layers.Dense(1, name="b")(hidden)}
    model = keras.Model(ids, outputs)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(0.01, global_clipnorm=0.5), compression=COMPRESSION)
    loss = {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"}
    compiled(model, optimizer, eager=True, loss=loss)
    before = frozen.kernel.numpy()
    random = np.random.default_rng(hvd.rank())
    x = random.integers(0, 30, (24, 4))
    y = {"a": x[:, 0] % 3, "b": x[:, 1:2] / 30}
    history = model.fit(x, y, batch_size=8, epochs=4, verbose=0)
    assert_alike(model)
    assert history.history["loss"][-1] < history.history["loss"][0]
    np.testing.assert_array_equal(frozen.kernel.numpy(), before)


class Changing(keras.Model):
    """A layer that rank 0 alone uses, and a training step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(40, activation="relu")
        self.extra = keras.layers.Dense(40)
        self.never = keras.layers.Dense(40)
        self.last = keras.layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        for layer in (self.extra, self.never, self.last):
            layer.build((None, 40))

    def call(self, x: Any) -> Any:
        hidden = self.first(x)
        return self.last(hidden + self.extra(hidden) if hvd.rank() == 0 else hidden)

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("compression", [COMPRESSION, hvd.Compression.none], ids=["topk", "dense"])
def test_a_layer_that_only_some_workers_use(compression):
    keras.utils.set_random_seed(3)
    model = Changing()
    model.build((None, 20))
    before = [model.extra.kernel.numpy(), model.never.kernel.numpy()]
    compiled(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression), eager=True)
    fit(model, epochs=2)
    assert_alike(model)
    assert np.any(model.extra.kernel.numpy() != before[0])
    np.testing.assert_array_equal(model.never.kernel.numpy(), before[1])


@pytest.mark.parametrize("wrapped", ["inside", "outside"])
def test_a_step_that_overflows_is_skipped_by_all(wrapped):
    """As a step of mixed_float16: one worker's gradient is infinite. Nothing is exchanged, nothing forgotten."""
    variable = keras.Variable(np.ones((40, 40), np.float32), name="w")
    if wrapped == "inside":
        inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=COMPRESSION)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    else:
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1024.0)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=COMPRESSION)
        inner = optimizer.inner_optimizer
    optimizer.build([variable])

    @tf.function
    def step(gradient: tf.Tensor) -> None:
        optimizer.apply([gradient * optimizer.dynamic_scale], [variable])

    random = np.random.default_rng(hvd.rank())
    step(tf.constant(random.standard_normal((40, 40)), tf.float32))
    (kept,) = inner.hvd_gradcomp_residuals.by_path.values()
    before = kept.residual.numpy(), variable.numpy()
    assert np.any(before[0])
    step(tf.fill((40, 40), np.inf if hvd.rank() == 0 else 1.0))
    np.testing.assert_array_equal(kept.residual.numpy(), before[0])
    np.testing.assert_array_equal(variable.numpy(), before[1])
    assert float(optimizer.dynamic_scale.numpy()) == 512
    assert int(inner.iterations.numpy()) == 1
    step(tf.ones((40, 40)))
    assert int(inner.iterations.numpy()) == 2
    assert_same_everywhere([variable.numpy()])


def test_mixed_float16_in_fit():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = compiled(classifier(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=COMPRESSION))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    history = fit(model, epochs=3)
    assert_alike(model)
    assert history["loss"][-1] < history["loss"][0]


OPTIMIZERS = sorted(
    name
    for name in dir(keras.optimizers)
    if isinstance(getattr(keras.optimizers, name), type)
    and issubclass(getattr(keras.optimizers, name), Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer")
)


def test_every_built_in_optimizer():
    """`apply` and `apply_gradients`; the same weights on all workers, and others than without an exchange."""
    assert {"SGD", "Adam", "AdamW", "RMSprop", "Lion"} <= set(OPTIMIZERS)
    random = np.random.default_rng(hvd.rank())
    for name in OPTIMIZERS:
        # Adafactor divides by the mean of a row's squares: with a row of zeros, as top-k leaves, that is no number.
        compression = FP16(dense_below=64) if name == "Adafactor" else COMPRESSION
        made = getattr(keras.optimizers, name)
        argument = 0.01 if name != "MultiOptimizer" else keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01))
        optimizer = hvd.DistributedOptimizer(made(argument), compression=compression)
        assert type(optimizer).__name__ == name
        variables = [keras.Variable(np.ones(shape, np.float32), name=f"v{shape[0]}") for shape in ((20, 30), (30,))]
        for call in range(2):
            gradients = [tf.constant(random.standard_normal(v.shape), tf.float32) for v in variables]
            if call:
                optimizer.apply(gradients, variables)
            else:
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
        assert np.any(variables[0].numpy() != 1), name
        assert np.all(np.isfinite(variables[0].numpy())), name
        assert_same_everywhere([v.numpy() for v in [*variables, *optimizer.variables]])


@pytest.mark.parametrize("average", [False, True])
def test_backward_passes_are_added_up_before_they_are_exchanged(average):
    variable = keras.Variable(np.zeros((40, 40), np.float32), name="w")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        compression=TopKInt8(ratio=1.0),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    for number in range(4):
        optimizer.apply([tf.fill((40, 40), 1.0 + number + hvd.rank())], [variable])
        if number == 0:
            assert not np.any(variable.numpy())
    expected = -sum(1.0 + number + (hvd.size() - 1) / 2 for number in range(4)) / (2 if average else 1)
    np.testing.assert_allclose(variable.numpy(), np.full((40, 40), expected), rtol=1e-2)
    assert counters(optimizer).total.exchanges == 2


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_gradients_are_clipped_after_the_exchange(clip):
    """Clipped before it, the large gradient of one worker would count as much as the small ones of the others."""
    variable = keras.Variable(np.zeros((40, 40), np.float32), name="w")
    sgd = keras.optimizers.SGD(1.0, **{clip: 1.0})
    optimizer = hvd.DistributedOptimizer(sgd, compression=TopK(ratio=1.0))
    mine = np.full((40, 40), -3.0, np.float32)
    if hvd.rank() == 0:
        mine[:20] = 100.0 * hvd.size()
    optimizer.apply([tf.constant(mine)], [variable])
    average = np.full((40, 40), -3.0)
    average[:20] = 100 - 3 * (hvd.size() - 1) / hvd.size()
    expected = np.clip(average, -1, 1) if clip == "clipvalue" else average / np.linalg.norm(average)
    np.testing.assert_allclose(variable.numpy(), -expected, rtol=1e-5)


def test_local_variables_keep_their_own_gradient():
    shared, own = (keras.Variable(np.zeros((40, 40), np.float32), name=name) for name in ("shared", "own"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=TopKInt8(ratio=1.0))
    optimizer.register_local_var(own)
    gradient = tf.fill((40, 40), 1.0 + hvd.rank())
    optimizer.apply([gradient, gradient], [shared, own])
    np.testing.assert_allclose(shared.numpy(), np.full((40, 40), -(1 + hvd.size()) / 2), rtol=1e-2)
    np.testing.assert_allclose(own.numpy(), np.full((40, 40), -(1.0 + hvd.rank()) / hvd.size()), rtol=1e-6)


def test_a_saved_model_resumes_as_if_it_had_not_stopped(tmp_path: Path):
    """With its residuals; and it is an ordinary model where this package is not at work."""
    path = tmp_path / f"{hvd.rank()}.keras"
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=COMPRESSION)
    model = compiled(classifier(), optimizer, eager=True)
    fit(model, epochs=2)
    model.save(path)
    expected = fit(model, epochs=2)

    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam
    assert int(plain.optimizer.iterations) == 8

    resumed = hvd.load_model(path, compression=COMPRESSION)
    resumed.run_eagerly = True
    assert fit(resumed, epochs=2) == expected
    assert_alike(resumed)

    paths = horovod.allgather_object(str(path))
    with pytest.warns(UserWarning, match="holds the residuals of rank"):
        hvd.load_model(paths[hvd.rank() - 1], compression=COMPRESSION)


def test_elastic_state_goes_back_to_what_was_committed_and_new_workers_get_it():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=COMPRESSION)
    model = compiled(classifier(), optimizer)
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    committed: list[Any] = []
    # Committing asks whether there are new hosts, which a job of fixed size does not know.
    state.commit = lambda: committed.append((state.epoch, state.batch)) or state.save()
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
    ]
    fit(model, *callbacks, epochs=2)
    # Four batches an epoch: after three, at the end of an epoch, and so on.
    assert committed == [(0, 2), (1, 0), (1, 1), (2, 0)]
    fit(model, *callbacks[:2], epochs=1)
    assert state.epoch == 3
    state.restore()
    assert (state.epoch, state.batch) == (2, 0)
    expected = fit(model, epochs=2)
    state.restore()
    # As a worker that is new: it knows nothing, and the others ask again with it.
    if hvd.rank() == hvd.size() - 1:
        for variable in [*model.weights, *optimizer.variables]:
            variable.assign(variable * 0)
    before = model.train_function
    state.sync()
    assert model.train_function is None
    assert before is not None
    assert fit(model, epochs=2) == expected
    assert_alike(model)


def test_the_best_model_is_kept_and_the_rate_falls_alike_on_all(tmp_path: Path):
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(tmp_path / f"{hvd.rank()}.keras"))
    model = compiled(classifier(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.2), compression=COMPRESSION))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, min_delta=10, patience=1)
    history = fit(model, hvd.callbacks.MetricAverageCallback(), callback, plateau, epochs=3)
    # By that measure the first epoch is the best, and the two after it are each one too many.
    assert history["learning_rate"] == pytest.approx([0.2, 0.2, 0.1])
    assert callback.best == min(history["loss"])
    assert type(keras.models.load_model(callback.filepath).optimizer) is keras.optimizers.SGD


def test_without_compression_it_trains_as_plain_horovod():
    """The same losses as Horovod's tape and TensorFlow's own arithmetic."""
    x, y = data(hvd.rank())
    model = compiled(classifier(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)), eager=True)
    weights = [tf.Variable(w.numpy()) for w in model.weights]
    for _ in range(10):
        with tf.GradientTape() as tape:
            logits = tf.nn.relu(x @ weights[0] + weights[1]) @ weights[2] + weights[3]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        tape = horovod.DistributedGradientTape(tape)
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.2 * g)
        model.reset_metrics()
        assert model.train_on_batch(x, y) == pytest.approx(float(loss), rel=1e-5)
    for w, trained in zip(weights, model.weights, strict=True):
        np.testing.assert_allclose(w.numpy(), trained.numpy(), rtol=1e-4, atol=1e-5)


def test_tapes_take_the_variables_of_keras():
    x, y = data(hvd.rank())
    model = classifier()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
    tape = horovod.DistributedGradientTape(tape, compression=COMPRESSION)
    assert_same_everywhere([g.numpy() for g in tape.gradient(loss, model.trainable_variables)])
    assert "logits/kernel" in "".join(counters(model.trainable_variables).buckets)


def test_a_worker_with_a_compression_of_horovods_own_is_an_error_on_all():
    variable = keras.Variable(np.zeros((40, 40), np.float32), name="w")
    compression = hvd.Compression.fp16 if hvd.rank() else COMPRESSION
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
    with pytest.raises(ConfigurationError, match=r"rank [01] has .*Horovod compression = 'FP16Compressor'|'topk"):
        optimizer.apply([tf.ones((40, 40))], [variable])


def test_what_cannot_work_says_so():
    with pytest.raises(ConfigurationError, match="expected an optimizer of Keras 3"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(ConfigurationError, match=r"needs a model that is built .* and an optimizer"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(3)]))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ConfigurationError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ConfigurationError, match="contradicts"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), backward_passes_per_step=2)
