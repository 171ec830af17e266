"""Invariant 1, conservation: gradient + old residual = sent + new residual, for each worker and each step.

What was sent is decoded from the bytes that the worker handed to its collectives. Sums over the workers are compared
with the results as well, so that what is sent is also what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from arrays import COMPRESSORS, array_of, gradient, kinds, seeds, shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cluster import Cluster
from steps import decode_sent, engines_of, parameters_of, residuals_of, step

from hvd_gradcomp.compressors import Compressor, Int8, NoCompression, TopK, TopKInt8
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.feedback import NoMemory, mean_residuals, residuals_from
from hvd_gradcomp.ops import Ops

#: Half the distance of neighbouring values of a format, relative and at the bottom of its range.
ROUNDING = {"float32": (2.0**-24, 2.0**-149), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


@dataclass
class Training:
    """A job whose every step is checked, while settings, buckets and workers change between the steps."""

    ops: Ops
    compressor: Compressor
    shapes: Sequence[tuple[int, ...]]
    workers: int
    kind: str = "float32"
    bucket_bytes: int = 800
    adds: Sequence[str] = ("float32", "float16")
    seed: int = 0
    steps: int = 0
    parameters: list[Parameter] = field(init=False)
    engines: list[Engine] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = parameters_of(self.shapes, self.kind)
        self.start_over(self.workers)

    def start_over(self, workers: int) -> None:
        """New engines without residuals, as after a restart."""
        self.workers = workers
        self.cluster = Cluster(workers, adds=self.adds)
        self.engines = engines_of(self.cluster, self.compressor, self.parameters, bucket_bytes=self.bucket_bytes)

    def change_compressor(self, compressor: Compressor) -> None:
        self.compressor = compressor
        for engine in self.engines:
            engine.compressor = compressor

    def change_buckets(self, bucket_bytes: int) -> None:
        """New engines with the old residuals."""
        self.bucket_bytes = bucket_bytes
        old = [engine.state for engine in self.engines]
        self.start_over(self.workers)
        for engine, state in zip(self.engines, old, strict=True):
            engine.load_state(state)

    def save_and_restore(self, workers: int) -> None:
        """Through a checkpoint, to another number of workers; the average of what is owed must stay."""
        owed = self._owed()
        ops = self.ops
        totals = {name: {"residual": array_of(ops, sum(part[name] for part in owed))} for name in owed[0]}
        saved = mean_residuals(ops, totals, self.workers)
        self.start_over(workers)
        for engine in self.engines:
            mean, _ = residuals_from(saved, {each.name: each.size for each in self.parameters})
            engine.load_state({name: {"residual": ops.copy(parts["residual"])} for name, parts in mean.items()})
        for name in owed[0]:
            before = [part[name] for part in owed]
            now = [part[name] for part in self._owed()]
            assert_close(np.mean(now, 0), np.mean(before, 0), np.abs(before).sum(0) / len(before), "float32", 8)

    def run(self, kind: str, steps: int = 1) -> None:
        """Steps with gradients of a kind of `arrays.KINDS`."""
        for _ in range(steps):
            self.steps += 1
            self.one(
                [
                    {
                        each.name: gradient(kind, shape, (self.seed, self.steps, rank, place))
                        for place, (each, shape) in enumerate(zip(self.parameters, self.shapes, strict=True))
                    }
                    for rank in range(self.workers)
                ]
            )

    def one(self, gradients: list[dict[str, np.ndarray]]) -> None:
        """A step, and every check of it."""
        before = self._owed()
        for sent in self.cluster.sent:
            sent.clear()
        results = step(self.cluster, self.engines, self.ops, gradients)
        after = self._owed()
        sent = [
            decode_sent(engine, self.ops, requests)
            for engine, requests in zip(self.engines, self.cluster.sent, strict=True)
        ]
        for each in self.parameters:
            # float64, in which the sums of a few float32 values are exact enough.
            rows = [
                [part[each.name].reshape(-1).astype(np.float64) for part in parts]
                for parts in (gradients, before, sent, after)
            ]
            for g, old, went, new in zip(*rows, strict=True):
                sizes = np.abs(g) + np.abs(old) + np.abs(went) + np.abs(new)
                assert_close(g + old, went + new, sizes, "float32", 3)
            went = np.array(rows[2])
            # Every partial sum may be rounded in the format of the sum.
            assert_close(results[0][each.name], went.mean(0), np.abs(went).sum(0), self._sum_format(), 2 * self.workers)

    def _owed(self) -> list[dict[str, np.ndarray]]:
        return [residuals_of(engine) for engine in self.engines]

    def _sum_format(self) -> str:
        if self.compressor.meets == "sum":
            return self.compressor.sum_kind
        return self.kind if self.kind in ROUNDING else "float32"


def assert_close(x: np.ndarray, y: np.ndarray, sizes: np.ndarray, kind: str, roundings: int) -> None:
    """x = y but for `roundings` roundings of values up to `sizes` in the format `kind`."""
    relative, absolute = ROUNDING[kind]
    excess = np.abs(np.asarray(x, np.float64) - y) - roundings * (relative * sizes + absolute)
    assert not (excess > 0).any(), f"off by {excess.max()} more than {roundings} roundings in {kind}"


each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)


@each_compressor
@settings(max_examples=10)
@given(
    shapes=st.lists(shapes, min_size=1, max_size=3),
    workers=st.integers(1, 3),
    seed=seeds,
    plan=st.lists(kinds, min_size=4, max_size=4),
)
def test_conservation_in_200_random_steps(compressor, ops, shapes, workers, seed, plan):
    training = Training(ops, compressor, shapes, workers, seed=seed)
    for kind in plan:
        training.run(kind, steps=5)
    assert training.steps == 20  # in each of 10 examples


#: What may happen between two steps; each says how.
CHANGES = {
    "another ratio": lambda training: training.change_compressor(TopKInt8(ratio=0.3)),
    "whole tensors": lambda training: training.change_compressor(TopK(ratio=1)),
    "no more compression": lambda training: training.change_compressor(NoCompression()),
    "smaller buckets": lambda training: training.change_buckets(4),
    "one bucket": lambda training: training.change_buckets(2**20),
    "fewer workers": lambda training: training.save_and_restore(max(1, training.workers - 1)),
    "more workers": lambda training: training.save_and_restore(training.workers + 1),
    "as many workers": lambda training: training.save_and_restore(training.workers),
}


@each_compressor
@settings(max_examples=6)
@given(shapes=st.lists(shapes, min_size=1, max_size=3), seed=seeds, changes=st.permutations(sorted(CHANGES)))
def test_conservation_over_changes_between_steps(compressor, ops, shapes, seed, changes):
    training = Training(ops, compressor, shapes, workers=2, seed=seed)
    for change in changes:
        training.change_compressor(compressor)
        training.run("normal", steps=2)
        CHANGES[change](training)
        training.run("wild")


@pytest.mark.parametrize(
    ("compressor", "workers", "kind", "adds"),
    [
        (Int8(block=64), 8, "float32", ("float32",)),
        (TopK(ratio=0.9), 3, "float32", ("float32",)),
        (TopK(ratio=0.9), 5, "float64", ("float32",)),
        (TopK(ratio=0.5), 4, "float16", ("float32", "float16")),
        (TopK(ratio=0.5), 4, "bfloat16", ("float32", "float16")),
        (Int8(block=64), 4, "bfloat16", ("float32", "float16", "bfloat16")),
    ],
    ids=str,
)
def test_conservation_over_dense_fallback(ops, compressor, workers, kind, adds):
    """Compression that would cost more than it saves is left out, and brings old residuals to zero."""
    sparse = TopKInt8(ratio=0.02)
    training = Training(ops, sparse, [(70,), (), (3, 5)], workers, kind=kind, adds=adds)
    for _ in range(3):
        training.change_compressor(sparse)
        training.run("normal", steps=2)
        assert all(engine.residuals for engine in training.engines)
        before = [engine.counters.total.fallbacks for engine in training.engines]
        training.change_compressor(compressor)
        training.run("normal")
        after = [engine.counters.total.fallbacks for engine in training.engines]
        assert after == [count + len(training.engines[0].buckets) for count in before]
    if kind in ("float32", "float64"):
        assert not any(engine.residuals for engine in training.engines)


@each_compressor
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("adds", [("float32",), ("float32", "float16", "bfloat16")], ids=["two rounds", "one round"])
def test_conservation_over_skipped_steps(ops, compressor, poison, adds):
    """One bad value at one worker: every worker sees NaN in every bucket, since the step is skipped as a whole, and no
    residual changes: what the other buckets had sent would be lost."""
    training = Training(ops, compressor, [(40,), (10,), (), (200,)], workers=3, bucket_bytes=300, adds=adds)
    training.run("normal", steps=3)
    before = [residuals_of(engine) for engine in training.engines]
    gradients = [{each.name: np.ones(each.size, np.float32) for each in training.parameters} for _ in range(3)]
    gradients[1]["p1"][7] = poison
    results = step(training.cluster, training.engines, ops, gradients)
    for engine, old, result in zip(training.engines, before, results, strict=True):
        new = residuals_of(engine)
        for each in training.parameters:
            assert np.isnan(result[each.name]).all()
            assert np.array_equal(old[each.name], new[each.name])
        assert len(engine.buckets) > 1
        assert [bucket.non_finite for bucket in engine.counters.buckets.values()] == [1] * len(engine.buckets)
    training.run("normal", steps=3)


@each_compressor
@pytest.mark.parametrize("adds", [("float32",), ("float32", "float16", "bfloat16")], ids=["two rounds", "one round"])
def test_conservation_over_abandoned_steps(ops, compressor, adds):
    """A step that all workers give up half way, with one bucket on its way: residuals stay, and training goes on."""
    training = Training(ops, compressor, [(40,), (10,), (200,)], workers=2, bucket_bytes=300, adds=adds)
    training.run("normal", steps=2)
    before = [residuals_of(engine) for engine in training.engines]

    def give_up(transport):
        engine = training.engines[transport.rank]
        for name in ("p2", "p1"):
            engine.submit(name, array_of(ops, np.ones(engine.parameters[int(name[1])].size, np.float32)))
        engine.abandon()
        assert engine.finish() == {}

    training.cluster.run(give_up)
    for engine, old in zip(training.engines, before, strict=True):
        new = residuals_of(engine)
        assert {name: x.tobytes() for name, x in new.items()} == {name: x.tobytes() for name, x in old.items()}
    training.run("normal", steps=2)


@pytest.mark.parametrize("compressor", [TopKInt8(ratio=0.1, memory=NoMemory()), Int8(memory=NoMemory())], ids=str)
def test_conservation_is_given_up_without_memory(ops, compressor):
    """What the other tests see is the residual's work: without one nothing is kept, and the sums do not agree."""
    training = Training(ops, compressor, [(50,)], workers=2)
    with pytest.raises(AssertionError, match="roundings"):
        training.run("normal")
    assert not any(engine.residuals for engine in training.engines)
