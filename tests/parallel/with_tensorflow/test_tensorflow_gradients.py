"""Gradients through `hvd.DistributedGradientTape`, in every form that TensorFlow has."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from known_gradients import Reference, all_gradients, gradients
from tensorflow_workers import EVEN, assert_same_everywhere, reduced, variables

from hvd_gradcomp.tensorflow import (
    ConfigurationError,
    TopK,
    TopKInt8,
    UnsupportedError,
    counters,
    residuals,
)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "tf.function"])
def test_fifty_steps_end_with_the_same_bits(in_graph):
    """A small network with batches of changing size; one trace, whatever their sizes."""
    random = np.random.default_rng(hvd.rank())
    weights = [
        tf.Variable(np.random.default_rng(0).standard_normal(shape), dtype=tf.float32) for shape in ((20, 80), (80, 40))
    ]
    momenta = [tf.Variable(tf.zeros_like(w)) for w in weights]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.tanh(x @ weights[0]) @ weights[1] - 1.0) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=TopKInt8(ratio=0.02))
        for w, m, g in zip(weights, momenta, tape.gradient(loss, weights), strict=True):
            m.assign(0.9 * m + g)
            w.assign_sub(0.05 * m)
        return loss

    run = tf.function(step, input_signature=[tf.TensorSpec([None, 20])]) if in_graph else step
    losses = [float(run(tf.constant(random.standard_normal((4 + number % 5, 20)), tf.float32))) for number in range(50)]
    assert_same_everywhere(weights)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    total = counters(weights).total
    assert total.sent_bytes < 0.06 * total.dense_bytes
    assert not in_graph or run.experimental_get_tracing_count() == 1


def test_gradients_that_only_some_workers_have():
    """None on one worker counts as zeros; None on all stays None; the step after has other ones missing."""
    own = variables()
    reference = Reference(TopKInt8(ratio=0.1))
    for number in range(3):
        everywhere = all_gradients(number)
        for rank in everywhere:
            del everywhere[rank]["b.weight"]
        del everywhere[number % hvd.size()]["c"], everywhere[hvd.size() - 1]["a.bias"]
        found = reduced(own, everywhere[hvd.rank()], TopKInt8(ratio=0.1))
        expected = reference.step(everywhere)
        assert found["b.weight"] is None
        for name in ("a.weight", "c"):
            assert found[name].numpy().tobytes() == expected[name].astype(np.float32).tobytes()
        np.testing.assert_allclose(found["a.bias"], expected["a.bias"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"process_set": EVEN},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_in_horovod(options):
    if options.get("process_set") is EVEN and hvd.rank() % 2:
        return
    ranks = EVEN.ranks if "process_set" in options else range(hvd.size())
    own = variables()
    reference = Reference(TopKInt8(ratio=0.1), ranks, average=options.get("op") != hvd.Sum)
    for number in range(2):
        found = reduced(own, gradients(number, hvd.rank()), TopKInt8(ratio=0.1), **options)
        for name, expected in reference.step(all_gradients(number, ranks)).items():
            if reference.is_exact(expected):
                assert found[name].numpy().tobytes() == expected.astype(np.float32).tobytes()
            else:
                np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


def test_groups_of_variables_become_buckets():
    own = variables()
    groups = [[own["a.weight"], own["c"]], [own["b.weight"]]]
    reduced(own, gradients(0, hvd.rank()), TopKInt8(ratio=0.1), groups=groups)
    assert set(counters(list(own.values())).buckets) == {"a.weight", "b.weight", "dense"}


@pytest.mark.parametrize("as_dense", [False, True])
def test_gradients_of_embeddings(as_dense):
    """IndexedSlices stay as they are in Horovod, or are compressed as tensors with sparse_as_dense."""
    table = tf.Variable(tf.ones((100, 32)), name="table")
    ids = tf.constant([hvd.rank(), 50, 50])

    @tf.function(autograph=False)
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids))
        tape = hvd.DistributedGradientTape(tape, compression=TopKInt8(ratio=1.0), sparse_as_dense=as_dense)
        return tape.gradient(loss, [table])[0]

    found = step()
    assert isinstance(found, tf.IndexedSlices) != as_dense
    expected = np.zeros((100, 32))
    expected[: hvd.size()] = 1 / hvd.size()
    expected[50] = 2
    np.testing.assert_allclose(tf.convert_to_tensor(found), expected, rtol=1e-2)


def test_local_sources_keep_their_own_gradient():
    own = variables({"shared": (50, 40), "own": (30, 40)})
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in own.values()]) * (1.0 + hvd.rank())
    tape = hvd.DistributedGradientTape(tape, compression=TopKInt8(ratio=1.0), scale_local_gradients=False)
    tape.register_local_source(own["own"])
    shared, local = tape.gradient(loss, list(own.values()))
    np.testing.assert_allclose(shared, np.full((50, 40), np.mean(1.0 + np.arange(hvd.size()))), rtol=1e-2)
    np.testing.assert_array_equal(local, np.full((30, 40), 1.0 + hvd.rank()))


@pytest.mark.parametrize("where", ["c", "a.bias"])
def test_a_gradient_that_is_not_finite_reaches_all_and_leaves_no_trace(where):
    """Whether the tensor is compressed or not: loss scaling skips the whole step."""
    own = variables()
    names = ["a.weight", "b.weight", "c"]
    kept = residuals([own[name] for name in names]).by_path
    reduced(own, gradients(0, hvd.rank()), TopKInt8)
    before = {name: kept[name].residual.numpy() for name in names}
    bad = gradients(1, hvd.rank())
    if hvd.rank() == hvd.size() - 1:
        bad[where].flat[3] = np.inf
    found = reduced(own, bad, TopKInt8)
    for name in names:
        assert np.isnan(found[name].numpy()).all()
        assert np.any(before[name])
        np.testing.assert_array_equal(kept[name].residual.numpy(), before[name])


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "tf.function"])
def test_subnormal_gradients_are_not_lost(in_graph):
    """TensorFlow's threads would flush them to zero."""
    own = variables({"w": (2000,)})
    tiny = np.full(2000, 2e-41, np.float32)
    kept = residuals(list(own.values())).by_path["w"].residual

    # The loss itself would flush them, so the reducer is called as the tape calls it.
    tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=TopK(ratio=0.25))
    reduce = (lambda g: tape._allreduce_grads([g], list(own.values()))[0]) if not in_graph else None
    run = reduce or tf.function(lambda g: tape._allreduce_grads([g], list(own.values()))[0])
    found = run(tf.constant(tiny)).numpy()
    assert np.count_nonzero(found) == 500
    assert (found[:500] == tiny[:500]).all()
    assert np.count_nonzero(kept.numpy()) == 1500


def test_two_tapes_in_one_function_run_in_the_same_order_everywhere():
    """Both reduce the gradients of two models inside one graph, where nothing else orders them."""
    first, second = variables({"w": (1500,)}), variables({"w": (1500,)})

    @tf.function
    def step(a: tf.Tensor, b: tf.Tensor) -> Any:
        return reduced(first, {"w": a}, TopKInt8(ratio=1.0))["w"], reduced(second, {"w": b}, TopKInt8(ratio=1.0))["w"]

    for _ in range(5):
        one, two = step(tf.ones(1500), 3.0 * tf.ones(1500))
        np.testing.assert_allclose([one[0], two[0]], [1, 3], rtol=1e-2)


def test_different_settings_are_an_error_on_every_worker():
    own = variables({"w": (2000,)})
    compression = TopKInt8(ratio=0.5 if hvd.rank() else 0.25)
    with pytest.raises(ConfigurationError, match=r"rank 1 has compression = 'topk\(ratio=0.5\)|rank 0 has compression"):
        reduced(own, {"w": tf.ones(2000)}, compression)


def test_what_cannot_work_says_so():
    own = variables({"w": (2000,)})
    with pytest.raises(ConfigurationError, match="Adasum"):
        hvd.DistributedGradientTape(tf.GradientTape(), compression=TopKInt8, op=hvd.Adasum)
    compiled = tf.function(lambda: reduced(own, {"w": tf.ones(2000)}, TopKInt8(ratio=0.2)), jit_compile=True)
    with pytest.raises(Exception, match="jit_compile=False"):
        compiled()
    tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=TopKInt8(ratio=0.3))
    with tf.Graph().as_default():
        v = tf.compat.v1.get_variable("v", shape=2000, use_resource=True)
        with pytest.raises(UnsupportedError, match="TensorFlow 2"):
            tape._allreduce_grads([tf.ones(2000)], [v])
