"""The transport of the benchmarks serves every collective as the simulated cluster of the tests does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from arrays import gradient
from simulated_cluster import Cluster

from hvd_gradcomp.collectives import Transport
from hvd_gradcomp.compressors import compression_from_spec
from hvd_gradcomp.engine import Engine, Parameter

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from in_process import Workers

NODES = (2, 1, 3)
SIZES = {"a": 900, "b": 41}


def train(transport: Transport, place: int, collective: str) -> list[bytes]:
    """The results of three steps of the worker at `place`."""
    compressor = compression_from_spec(f"topk(ratio=0.1, dense_below=0, collective={collective}) >> int8")
    engine = Engine(compressor, [Parameter(name, size, "float32", (size,)) for name, size in SIZES.items()], transport)
    found = []
    for step in range(3):
        for name, size in SIZES.items():
            engine.submit(name, torch.from_numpy(gradient("normal", (size,), (step, place))))
        found += [x.numpy().tobytes() for _, x in sorted(engine.finish().items())]
    return found


@pytest.mark.parametrize("collective", ["allgather", "scatter_reduce", "hierarchical"])
def test_every_collective_gives_what_it_gives_in_the_simulated_cluster(collective: str) -> None:
    workers = Workers(sum(NODES), NODES)
    expected = Cluster(sum(NODES), nodes=NODES).run(lambda each: train(each, each.rank, collective))
    assert workers.run(lambda rank: train(workers.transports[rank], rank, collective)) == expected


def test_nodes_of_another_number_of_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 in all; got \(2, 1\)"):
        Workers(4, (2, 1))
