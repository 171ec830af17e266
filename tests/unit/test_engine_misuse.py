"""What a door can do wrong with an engine, and what it is told; and that the engine is as before at the next step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import array_of
from simulated_cluster import Cluster
from steps import engines_of, parameters_of

from hvd_gradcomp.compressors import BF16, TopKInt8
from hvd_gradcomp.engine import Engine
from hvd_gradcomp.errors import ConfigurationError

PARAMETERS = parameters_of([(30,), (20,), (10,)])


@pytest.fixture
def engine() -> Engine:
    """Alone in its cluster; its buckets are p2 with p1, and p0."""
    (alone,) = engines_of(Cluster(1), TopKInt8(ratio=0.1), PARAMETERS, bucket_bytes=150)
    assert [len(bucket.parameters) for bucket in alone.buckets] == [2, 1]
    return alone


def ones(ops: Any, name: str) -> Any:
    return array_of(ops, np.ones(PARAMETERS[int(name[1])].size, np.float32))


def whole_step(engine: Engine, ops: Any) -> set[str]:
    for name in ("p0", "p1", "p2"):
        engine.submit(name, ones(ops, name))
    return set(engine.finish())


def test_an_unknown_name(engine, ops):
    with pytest.raises(ConfigurationError, match="no parameter is called 'bias'"):
        engine.submit("bias", ones(ops, "p0"))
    assert whole_step(engine, ops) == {"p0", "p1", "p2"}


@pytest.mark.parametrize("name", ["p0", "p1"])
def test_a_gradient_handed_in_twice(engine, ops, name):
    """In a bucket that is under way, and in one that still waits for others."""
    engine.submit(name, ones(ops, name))
    with pytest.raises(ConfigurationError, match=f"'{name}' was handed in twice"):
        engine.submit(name, ones(ops, name))


def test_a_step_that_lacks_gradients(engine, ops):
    engine.submit("p0", ones(ops, "p0"))
    engine.submit("p2", ones(ops, "p2"))
    with pytest.raises(ConfigurationError) as caught:
        engine.finish()
    # p0 and p2 were handed in, p0's bucket was even under way.
    assert "['p1']" in str(caught.value)


def test_the_step_after_one_that_lacked_gradients(engine, ops):
    whole_step(engine, ops)
    engine.submit("p2", ones(ops, "p2"))
    with pytest.raises(ConfigurationError, match="'p1'"):
        engine.finish()
    assert whole_step(engine, ops) == {"p0", "p1", "p2"}


def test_a_step_without_any_gradient(engine, ops):
    assert engine.finish() == {}
    for name in ("p0", "p1", "p2"):
        engine.submit(name, None)
    assert engine.finish() == {}
    assert engine.transport.cluster.sent == [[]]
    assert whole_step(engine, ops) == {"p0", "p1", "p2"}


def test_results_are_handed_out_once(engine, ops):
    assert whole_step(engine, ops)
    assert engine.finish() == {}


def test_an_engine_without_parameters():
    (engine,) = engines_of(Cluster(1), TopKInt8(), [])
    assert engine.finish() == {}
    with pytest.raises(ConfigurationError, match="'p0'"):
        engine.submit("p0", np.ones(3, np.float32))


@pytest.mark.parametrize("compressor", [TopKInt8(ratio=1.0), BF16()], ids=str)
def test_a_parameter_without_elements(ops, compressor):
    """Alone in a bucket, and beside others."""
    parameters = parameters_of([(0,), (4,), (3, 0)])
    for bucket_bytes in (1, 1000):
        cluster = Cluster(2)
        engines = engines_of(cluster, compressor, parameters, bucket_bytes=bucket_bytes)

        def work(transport: Any, engines: list[Engine] = engines) -> dict[str, list[float]]:
            engine = engines[transport.rank]
            for _ in range(2):
                engine.submit("p0", array_of(ops, np.zeros(0, np.float32)))
                engine.submit("p1", array_of(ops, np.ones(4, np.float32)))
                engine.submit("p2", array_of(ops, np.zeros((3, 0), np.float32)))
                results = engine.finish()
            return {name: result.tolist() for name, result in results.items()}

        for found in cluster.run(work):
            assert found == {"p0": [], "p1": [1, 1, 1, 1], "p2": []}
