"""`hvd.allreduce(tensor, compression=...)` outside a tape, Horovod's own state, and what is kept between steps."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from known_gradients import gradients
from tensorflow_workers import EVEN, reduced, variables

from hvd_gradcomp.tensorflow import (
    DGC,
    ConfigurationError,
    DistributedGradientTape,
    Int8,
    TopKInt8,
    load_residual_state_dict,
    register,
    residual_state_dict,
    residuals,
    unregister,
)

SIZE = 3000


def mine(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(SIZE).astype(np.float32)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"op": hvd.Average, "prescale_factor": 0.5}], ids=str)
def test_allreduce_gives_the_sum_or_average(in_graph, options):
    def reduce(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, compression=Int8, **options)

    run = tf.function(reduce, autograph=False) if in_graph else reduce
    found = run(tf.reshape(tf.constant(mine(hvd.rank())), (30, 100)))
    expected = np.sum([mine(rank) for rank in range(hvd.size())], axis=0)
    if options.get("op") != hvd.Sum:
        expected = expected / hvd.size() * options.get("prescale_factor", 1)
    assert found.shape == (30, 100)
    np.testing.assert_allclose(tf.reshape(found, [-1]), expected, atol=0.05 * hvd.size())


def test_allreduce_in_a_process_set():
    if EVEN.included():
        found = hvd.allreduce(tf.constant(mine(hvd.rank())), compression=Int8, op=hvd.Sum, process_set=EVEN)
        np.testing.assert_allclose(found, np.sum([mine(rank) for rank in EVEN.ranks], axis=0), atol=0.2)


def test_small_tensors_and_integers_go_as_they_are():
    assert float(hvd.allreduce(tf.ones(3), compression=TopKInt8(ratio=0.1), op=hvd.Sum)[2]) == hvd.size()
    assert int(hvd.allreduce(tf.ones(SIZE, tf.int32), compression=TopKInt8, op=hvd.Sum)[7]) == hvd.size()


def test_what_has_no_meaning_is_an_error_everywhere():
    x = tf.constant(mine(hvd.rank()))
    with pytest.raises(Exception, match=r"op=hvd\.Sum and op=hvd\.Average only"):
        hvd.allreduce(x, compression=Int8, op=hvd.Max)
    bad = tf.fill([SIZE], np.nan if hvd.rank() == 1 else 1.0)
    with pytest.raises(Exception, match=r"ranks \[1\] hold NaN"):
        hvd.allreduce(bad, compression=Int8)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(hvd.allreduce(x, compression=Int8))
    with pytest.raises(Exception, match="has no gradient"):
        tape.gradient(loss, x)


def test_horovod_is_as_it_was_with_its_own_compressions():
    """Stock compressions never meet our code; registering is idempotent, and can be undone."""
    own = variables({"w": (2000,)})
    made = hvd._make_allreduce_grads_fn
    register()
    assert hvd._make_allreduce_grads_fn is made
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=compression)
        assert type(tape._allreduce_grads).__module__.startswith("tensorflow")
        found = reduced(own, {"w": tf.fill([2000], 1.0 + hvd.rank())}, compression)["w"]
        assert float(found[0]) == np.mean(1.0 + np.arange(hvd.size()))
    unregister()
    try:
        assert hvd._make_allreduce_grads_fn is inspect.unwrap(made)
        tape = DistributedGradientTape(tf.GradientTape(), compression=TopKInt8(ratio=1.0))
        assert hvd._make_allreduce_grads_fn is inspect.unwrap(made)
        (found,) = tape._allreduce_grads([tf.fill([2000], 1.0 + hvd.rank())], [own["w"]])
        assert float(found[0]) == pytest.approx(np.mean(1.0 + np.arange(hvd.size())), rel=1e-2)
    finally:
        register()


@pytest.mark.parametrize("compression", [TopKInt8(ratio=0.02), DGC(ratio=0.02, dense_below=1024)], ids=str)
def test_a_checkpoint_of_every_worker_goes_on_as_if_nothing_had_happened(tmp_path: Path, compression: Any):
    """Restored before the first step and after it, in a tf.function; of residuals, and of velocities too."""
    names = ["a.weight", "b.weight", "c"]

    def run(own: dict[str, tf.Variable], numbers: Any) -> list[bytes]:
        step = tf.function(lambda given: reduced(own, given, compression), autograph=False)
        found = [step({name: tf.constant(g) for name, g in gradients(n, hvd.rank()).items()}) for n in numbers]
        return [found[-1][name].numpy().tobytes() for name in names]

    first = variables()
    run(first, range(3))
    saved = tf.train.Checkpoint(residuals=residuals(list(first.values()))).write(str(tmp_path / f"{hvd.rank()}"))
    expected = run(first, range(3, 6))
    for steps_before in (0, 1):
        again = variables()
        run(again, range(steps_before)) if steps_before else None
        tf.train.Checkpoint(residuals=residuals(list(again.values()))).read(saved).assert_existing_objects_matched()
        assert run(again, range(3, 6)) == expected


def test_the_mean_residual_serves_any_number_of_workers():
    own = variables()
    every = list(own.values())
    reduced(own, gradients(0, hvd.rank()), TopKInt8(ratio=0.02))
    kept = residuals(every).by_path
    gathered = hvd.allgather(kept["c"].residual[None]).numpy()
    state = residual_state_dict(every)
    np.testing.assert_allclose(state["mean"]["c"]["residual"], gathered.mean(axis=0), rtol=1e-5, atol=1e-6)
    fresh = variables()
    load_residual_state_dict(list(fresh.values()), state)
    loaded = residuals(list(fresh.values())).by_path["c"].residual.numpy()
    np.testing.assert_array_equal(loaded, state["mean"]["c"]["residual"])
    with pytest.warns(UserWarning, match="holds no residuals"):
        load_residual_state_dict(list(fresh.values()), None)
    assert not residuals(list(fresh.values())).by_path["c"].owes
    with pytest.raises(ConfigurationError, match="another model"):
        load_residual_state_dict([tf.Variable(tf.zeros(77), name="c")], state)
