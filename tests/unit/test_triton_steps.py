"""Training steps with the Triton kernels: results, residuals and payloads of the engine are those of the reference.

One worker only: Triton's interpreter cannot run in two threads at once.
"""

from __future__ import annotations

import numpy as np
import pytest
from arrays import as_numpy, bits_of, gradient
from on_gpu import OnGpu, needs_triton, on_device
from simulated_cluster import Cluster
from steps import engines_of, parameters_of

from hvd_gradcomp.compressors import Compressor, TopK, TopKInt8
from hvd_gradcomp.engine import Engine, engine, passage
from hvd_gradcomp.feedback import MomentumCorrection
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.ops.numpy_ops import NumpyOps

pytestmark = needs_triton

SHAPES = ((40, 30), (2000,))


def trained(ops: Ops, compressor: Compressor, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bytes], Engine]:
    """The bytes of all results and payloads of some steps, of which one has a value that is not finite."""
    monkeypatch.setattr(passage, "ops_for", lambda _: ops)
    monkeypatch.setattr(engine, "ops_for", lambda _: ops)
    cluster = Cluster(1)
    (worker,) = engines_of(cluster, compressor, parameters_of(SHAPES))

    def work(_: object) -> list[Array]:
        found = []
        for step in range(4):
            for index, shape in enumerate(SHAPES):
                x = gradient("normal", shape, (step, index))
                if (step, index) == (2, 0):
                    x[3, 3] = np.inf
                worker.submit(f"p{index}", x if ops.name == "numpy" else on_device(x))
            found += worker.finish().values()
        return found

    (results,) = cluster.run(work)
    payloads = [each.request.payload for each in cluster.sent[0]]
    return [bits_of(each) for each in [*results, *payloads]], worker


@pytest.mark.parametrize(
    "compressor",
    [TopKInt8(0.05), TopK(0.1), TopKInt8(0.05, granularity="bucket"), TopKInt8(0.05, memory=MomentumCorrection())],
    ids=str,
)
def test_steps_are_those_of_the_reference(compressor: Compressor, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, reference = trained(NumpyOps(), compressor, monkeypatch)
    found, worker = trained(OnGpu(), compressor, monkeypatch)
    assert found == expected
    for name, parts in reference.state.items():
        for part, vector in parts.items():
            assert np.array_equal(as_numpy(worker.state[name][part]), vector)
    assert worker.counters.total.non_finite == reference.counters.total.non_finite > 0
