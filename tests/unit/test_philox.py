"""The random generator: published vectors, TensorFlow's words, one stream on every backend, keys that differ."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import array_of, as_numpy, bits_of

from hvd_gradcomp.compressors import Context
from hvd_gradcomp.ops import Ops, backend
from hvd_gradcomp.ops.philox import philox4x32, uniform

# Counter, key and result, lowest words first, as the authors' Random123 library lists them for philox4x32-10.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(ops: Ops, counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (array_of(ops, np.array([word, word])) for word in words(counter))
    low, high = words(key)
    found = philox4x32(ops, (c0, c1, c2, c3), low | high << 32)
    assert [as_numpy(each).tolist() for each in found] == [[word, word] for word in words(expected)]


@pytest.mark.parametrize(("key", "first"), [(0, 0), (2**64 - 1, 2**32 - 3), (0x1234_5678_9ABC_DEF0, 7), (2**63, 2**40)])
def test_words_are_those_of_tensorflow_s_generator(ops: Ops, key: int, first: int) -> None:
    """An implementation that nobody here has written, at any key and past the end of the lowest word of a counter."""
    tf = pytest.importorskip("tensorflow")
    where = {"key": tf.constant([key], tf.uint64), "counter": tf.constant([first, 0], tf.uint64)}
    expected = tf.raw_ops.StatelessRandomUniformFullIntV2(shape=[40], alg=1, dtype=tf.uint32, **where)
    counters = np.arange(first, first + 10)
    low, high, zeros = counters & 0xFFFFFFFF, counters >> 32, np.zeros_like(counters)
    found = philox4x32(ops, tuple(array_of(ops, each) for each in (low, high, zeros, zeros)), key)
    assert np.stack([as_numpy(each) for each in found], 1).reshape(-1).tolist() == expected.numpy().tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1001, 4 * 2**14, 4 * 2**14 + 3])
def test_draws_are_words_in_the_order_of_counters(ops: Ops, count: int) -> None:
    found = uniform(ops, count, 2**63 + 5, array_of(ops, np.zeros(1)))
    counters = np.arange(-(-count // 4))
    zeros = np.zeros_like(counters)
    expected = np.stack(philox4x32(backend("numpy"), (counters, zeros, zeros, zeros), 2**63 + 5), axis=1)
    assert as_numpy(found).dtype == np.float32
    assert as_numpy(found).tolist() == ((expected.reshape(-1)[:count] >> 8) / 2**24).tolist()


def test_draws_are_uniform_and_independent() -> None:
    draws = uniform(backend("numpy"), 1 << 20, Context(name="layer.weight").key(0), np.zeros(1))
    assert 0 <= draws.min() <= draws.max() < 1
    # Chi-squared over 256 equal cells: mean 255, deviation 22.6; 5 deviations leave 1 false alarm in 10^6.
    cells = np.bincount((draws * 256).astype(int), minlength=256)
    assert abs(((cells - 4096) ** 2 / 4096).sum() - 255) < 5 * np.sqrt(2 * 255)
    for lag in (1, 2, 3, 4, 512):
        assert abs(np.corrcoef(draws[:-lag], draws[lag:])[0, 1]) < 5 / np.sqrt(len(draws))


def test_keys_differ_by_seed_name_step_and_rank_and_shared_ones_not_by_rank() -> None:
    contexts = [Context(rank, 4, name, step) for rank in (0, 1) for name in ("a", "b") for step in (0, 1)]
    own = {context.key(seed) for context in contexts for seed in (0, 1)}
    shared = {context.shared_key(seed) for context in contexts for seed in (0, 1)}
    assert len(own) == 16
    assert len(shared) == 8
    assert not own & shared
    assert all(0 <= key < 2**64 for key in own | shared)
    # A fixed number: keys must not change between releases or processes, or workers of one job would disagree.
    assert Context(1, 4, "layer.weight", 3).key(7) == 0xD36588AE73FD3548


@pytest.mark.parametrize("columns", [1, 2, 8, 64])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 63, 64, 65, 1000])
def test_row_sums_are_taken_in_pairs(ops: Ops, count: int, columns: int) -> None:
    x = (np.random.default_rng(count).standard_normal(count) * 1e3).astype(np.float32)
    rows = -(-count // columns)
    matrix = np.zeros((rows, columns), np.float32)
    matrix.reshape(-1)[:count] = x
    while matrix.shape[1] > 1:
        matrix = matrix[:, 0::2] + matrix[:, 1::2]
    assert bits_of(ops.row_sum(array_of(ops, x), columns)) == matrix.tobytes()
