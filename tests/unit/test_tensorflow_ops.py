"""TensorFlow's primitives and what surrounds the engine there: the bytes of numpy, in TensorFlow's threads too."""

from __future__ import annotations

import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf
from arrays import COMPRESSORS, gradient, seeds
from golden_vectors import CASES, FINGERPRINT, INPUTS, golden
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import METHODS
from value_codes import CODES

from hvd_gradcomp.compressors import Context, Int8, TopK, compression_from_spec
from hvd_gradcomp.ops import backend, ops_for
from hvd_gradcomp.tensorflow import TopKInt8
from hvd_gradcomp.tensorflow.graphs import call
from hvd_gradcomp.tensorflow.host import exact_floats, own, view
from hvd_gradcomp.tensorflow.paths import node_name, paths_of
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.payload import split_payloads, write_payload

OPS = backend("tensorflow")
NUMPY = backend("numpy")
# Plain TensorFlow flushes subnormal values on CPU; the door does not let it.
NORMAL = [(name, spec) for name, spec in CASES if name != "subnormals"]


def payload(ops, make, name: str, spec: str) -> bytes:
    compressor = compression_from_spec(spec)
    frames = [compressor.encode(ops, make(x), Context())[0] for x in INPUTS[name]]
    return ops.to_host(write_payload(ops, frames, FINGERPRINT, frames[0]))


def test_tensors_find_their_primitives():
    assert ops_for(tf.ones(3)) is OPS
    assert OPS.name == "tensorflow"


@pytest.mark.parametrize(("name", "spec"), NORMAL)
def test_tensorflow_ops_give_the_golden_vectors(name, spec):
    assert payload(OPS, tf.constant, name, spec) == golden()[name, spec]


@pytest.mark.parametrize(("name", "spec"), NORMAL)
def test_tensorflow_ops_decode_what_numpy_decodes(name, spec):
    compressor = compression_from_spec(spec)
    results = []
    for ops, make in ((OPS, tf.constant), (NUMPY, np.array)):
        data = make(np.frombuffer(golden()[name, spec], np.uint8))
        (received,) = split_payloads(ops, data, [0], FINGERPRINT)
        results.append(
            [
                np.asarray(compressor.decode_add(ops, received.frames, make(np.zeros(len(x), np.float32)))).tobytes()
                for x in INPUTS[name]
            ]
        )
    assert results[0] == results[1]


@pytest.mark.parametrize("compressor", [*COMPRESSORS, Int8(block=1), TopK(ratio=1.0)], ids=str)
@settings(max_examples=10)
@given(
    kind=st.sampled_from(["normal", "all zeros", "ties", "1e30", "sparse"]),
    size=st.one_of(st.integers(1, 600), st.just(20000)),
    seed=seeds,
)
def test_tensorflow_ops_give_the_frames_and_residuals_of_numpy(compressor, kind, size, seed):
    x = gradient(kind, (size,), seed)
    expected, left = compressor.encode(NUMPY, x.copy(), Context())
    frame, residual = compressor.encode(OPS, tf.constant(x), Context())
    assert OPS.to_host(frame) == bytes(expected)
    assert residual.numpy().tobytes() == left.tobytes()


def test_tensorflow_ops_find_what_is_not_finite():
    assert OPS.all_finite(tf.constant([1.0, 3.4e38]))
    assert not OPS.all_finite(tf.constant([1.0, np.inf]))
    assert not OPS.all_finite(tf.constant([np.nan, 0.0]))


@pytest.mark.parametrize("spec", sorted({spec for _, spec in CASES}))
def test_the_engine_of_a_graph_gives_the_golden_vectors_of_subnormals(spec):
    """Inside a tf.py_function, on a thread of TensorFlow's that flushes subnormals."""

    def encode(x: tf.Tensor) -> list[np.ndarray]:
        with exact_floats():
            frames = [compression_from_spec(spec).encode(NUMPY, own(x), Context())[0]]
            return [write_payload(NUMPY, frames, FINGERPRINT, frames[0])]

    (x,) = INPUTS["subnormals"]
    (found,) = tf.function(lambda t: call(encode, [t], [tf.uint8]))(tf.constant(x))
    assert bytes(found.numpy()) == golden()["subnormals", spec]


def test_exact_floats_give_the_thread_back_as_it_was():
    tiny = np.array([1e-40], np.float32)

    def probe(x: tf.Tensor) -> list[np.ndarray]:
        before = view(x) * np.float32(1)
        with exact_floats():
            inside = view(x) * np.float32(1)
        return [np.concatenate([before, inside, view(x) * np.float32(1)])]

    (found,) = tf.function(lambda t: call(probe, [t], [tf.float32]))(tf.constant(tiny))
    assert (found.numpy() != 0).tolist() == [False, True, False]


def test_compress_and_decompress_without_workers():
    x = tf.constant(INPUTS["subnormals"][0].reshape(8, 8))
    payload_, ctx = TopK(ratio=1.0).compress(x)
    back = TopK(ratio=1.0).decompress(payload_, ctx)
    assert back.shape == (8, 8)
    assert back.numpy().tobytes() == x.numpy().tobytes()
    assert TopKInt8.compress(tf.ones(100))[0].dtype == tf.uint8


def test_calls_in_a_graph_keep_the_order_of_the_program():
    order: list[int] = []

    def note(number: int) -> list[float]:
        order.append(number)
        return [0.0]

    @tf.function
    def run() -> None:
        for number in range(6):
            call(lambda number=number: note(number), [], [tf.float32])

    run()
    run()
    assert order == [*range(6), *range(6)]
    assert run.experimental_get_tracing_count() == 1


def test_paths_are_distinct():
    variables = [tf.Variable(0.0, name=name) for name in ("w", "b", "w")]
    assert paths_of(variables) == ["w", "b", "w_1"]
    assert node_name("2.dense/kernel:0") == "2.dense.kernel.0"


def test_other_doors_do_not_import_tensorflow():
    code = "import hvd_gradcomp.torch, sys; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "compressor", [each for each in (*METHODS, *CODES) if each.meets in ("gather", "sum")], ids=str
)
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_tensorflow_ops_give_the_bytes_of_every_method(compressor, kind):
    x = gradient(kind, (1500,), 3)
    context = Context(rank=1, workers=2, name="layer.weight", step=3)
    found = []
    for ops, make in ((NUMPY, np.array), (OPS, tf.constant)):
        if compressor.meets == "gather":
            sent, residual = compressor.encode(ops, make(x), context)
            back = compressor.decode_add(ops, Reader(ops, sent), make(np.zeros_like(x)))
        else:
            sent, residual = compressor.summands(ops, make(x), context)
            back = compressor.from_sum(ops, sent, len(x), context)
        found.append([np.asarray(each).tobytes() for each in (sent, residual, back)])
    assert found[0] == found[1]


@pytest.mark.parametrize(("x_transposed", "y_transposed"), [(False, False), (True, False), (False, True), (True, True)])
def test_tensorflow_ops_multiply_matrices(x_transposed, y_transposed):
    x, y = gradient("normal", (6 * 5,), 1), gradient("normal", (5 * 4,), 2)
    options = {"x_transposed": x_transposed, "y_transposed": y_transposed}
    expected = NUMPY.matmul(x, y, 6, 5, 4, **options)
    found = OPS.matmul(tf.constant(x), tf.constant(y), 6, 5, 4, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_tensorflow_ops_add_where_positions_repeat():
    positions, values = np.array([3, 0, 3, 3]), np.array([1, 2, 4, 8], np.float32)
    found = OPS.scatter_add(tf.zeros(5), tf.constant(positions), tf.constant(values))
    assert found.numpy().tolist() == [2, 0, 0, 13, 0]
