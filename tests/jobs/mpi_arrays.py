"""What every MPI worker checks of the engine on numpy arrays; the last line says that all went well."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from hvd_gradcomp.mpi import (
    BF16,
    DGC,
    FP16,
    Compressor,
    ConfigurationError,
    Int8,
    NoCompression,
    PowerSGD,
    Reducer,
    TopK,
    TopKInt8,
)

COMM = MPI.COMM_WORLD
RANK, WORKERS = COMM.Get_rank(), COMM.Get_size()
SHAPES = {"a.weight": (96, 40), "a.bias": (96,), "b": (5000,), "scalar": ()}
METHODS = [TopKInt8(ratio=0.05), TopKInt8(ratio=0.05, granularity="model"), Int8(), FP16(), BF16(), PowerSGD(rank=2)]


def main() -> None:
    for method in [*METHODS, NoCompression()]:
        conserves_and_gives_all_the_same(method)
    meets_in_other_ways()
    remembers_momentum()
    keeps_shapes_and_dtypes()
    passes_on_what_is_not_finite()
    goes_on_from_a_saved_state()
    tells_differences()
    frameworks = {"torch", "tensorflow", "keras", "horovod"} & sys.modules.keys()
    assert not frameworks, frameworks
    COMM.Barrier()
    if RANK == 0:
        print(f"all is well with {WORKERS} workers", flush=True)


def gradients(step: int, rank: int = RANK) -> dict[str, np.ndarray]:
    """Each worker lists them in an order of its own."""
    found = {}
    for index in range(len(SHAPES)):
        place = (index + rank) % len(SHAPES)
        name = list(SHAPES)[place]
        random = np.random.default_rng([step, rank, place])
        found[name] = np.asarray(random.standard_normal(SHAPES[name]), np.float32)
    return found


def sum_of(values: np.ndarray) -> np.ndarray:
    total = np.zeros(values.shape)
    COMM.Allreduce(values.astype(np.float64), total)
    return total


def owed(reducer: Reducer, name: str) -> np.ndarray:
    return reducer.residuals.get(name, np.zeros(int(np.prod(SHAPES[name])), np.float32)).reshape(SHAPES[name]).copy()


def require_same_bits(arrays: dict[str, np.ndarray]) -> None:
    digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
    assert len(set(COMM.allgather(digest))) == 1, "workers hold different bits"


def conserves_and_gives_all_the_same(method: Compressor) -> None:
    reducer = Reducer(method)
    for step in range(3):
        before = {name: owed(reducer, name) for name in SHAPES}
        mine = gradients(step)
        mean = reducer.reduce(mine)
        require_same_bits(mean)
        for name in SHAPES:
            sent = sum_of(mine[name] + before[name] - owed(reducer, name)) / WORKERS
            # FP16 and BF16 round the sum as well.
            loose = 2e-2 if isinstance(method, (FP16, BF16)) else 1e-4
            np.testing.assert_allclose(mean[name], sent, rtol=loose, atol=loose, err_msg=f"{method} {name}")
    total = reducer.counters.total
    assert total.sent_bytes == total.dense_bytes or not isinstance(method, NoCompression)
    assert total.sent_bytes < 0.2 * total.dense_bytes or not isinstance(method, TopKInt8)


def meets_in_other_ways() -> None:
    """With nothing left out, what comes of any way of meeting is the plain mean."""
    os.environ["HVD_GRADCOMP_NODES"] = f"{WORKERS // 2},{WORKERS - WORKERS // 2}"
    for collective in ("scatter_reduce", "hierarchical"):
        reducer = Reducer(TopK(ratio=1.0, collective=collective))
        for step in range(2):
            mean = reducer.reduce(gradients(step))
            require_same_bits(mean)
            for name in SHAPES:
                expected = sum_of(gradients(step)[name]) / WORKERS
                np.testing.assert_allclose(mean[name], expected, rtol=1e-5, atol=1e-5)
    del os.environ["HVD_GRADCOMP_NODES"]


def remembers_momentum() -> None:
    """DGC's memory takes part for small arrays too; at a ratio of 1 it is momentum SGD."""
    reducer = Reducer(DGC(ratio=1.0))
    velocity = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(3):
        mean = reducer.reduce(gradients(step))
        for name in SHAPES:
            velocity[name] = 0.9 * velocity[name] + sum_of(gradients(step)[name]) / WORKERS
    np.testing.assert_allclose(mean["a.bias"], velocity["a.bias"], rtol=1e-4, atol=1e-4)


def keeps_shapes_and_dtypes() -> None:
    reducer = Reducer(TopKInt8(ratio=0.05), average=False)
    arrays = {"double": np.ones((30, 50)), "half": np.ones((40, 40), np.float16), "few": np.ones(3)}
    sums = reducer.reduce(arrays)
    for name, array in arrays.items():
        assert (sums[name].shape, sums[name].dtype) == (array.shape, array.dtype)
        assert (array == 1).all(), "an argument was changed"
    assert (sums["few"] == WORKERS).all()
    assert np.count_nonzero(sums["double"]) == 75


def passes_on_what_is_not_finite() -> None:
    for name in ("b", "a.bias"):
        reducer = Reducer(TopKInt8(ratio=0.05))
        reducer.reduce(gradients(0))
        before = owed(reducer, "b")
        bad = gradients(1)
        if RANK == 1:
            bad[name][0] = np.inf
        assert all(np.isnan(array).all() for array in reducer.reduce(bad).values())
        np.testing.assert_array_equal(owed(reducer, "b"), before)


def goes_on_from_a_saved_state() -> None:
    reducer = Reducer(TopKInt8(ratio=0.05))
    reducer.reduce(gradients(0))
    state = reducer.state_dict()
    resumed = Reducer(TopKInt8(ratio=0.05))
    for each in (reducer, resumed):
        each.load_state_dict(state)
    first, second = reducer.reduce(gradients(1)), resumed.reduce(gradients(1))
    for name in SHAPES:
        np.testing.assert_array_equal(first[name], second[name])
    refused(lambda: resumed.load_state_dict({}), "expected residuals saved")


def tells_differences() -> None:
    last = WORKERS - 1
    reducer = Reducer(TopKInt8(ratio=0.1 if last == RANK else 0.05))
    refused(lambda: reducer.reduce(gradients(0)), f"rank {last} has compression|rank {last} has .*ratio")
    reducer = Reducer(Int8)
    fewer = gradients(0)
    if last == RANK:
        del fewer["b"]
    refused(lambda: reducer.reduce(fewer), "buckets")
    reducer = Reducer(Int8)
    reducer.reduce(gradients(0))
    refused(lambda: reducer.reduce({"b": gradients(0)["b"]}), r"\['a.bias', 'a.weight', 'scalar'\]")
    refused(lambda: Reducer(Int8).reduce({"ids": np.arange(5)}), "int64")
    refused(lambda: Reducer("int8"), "compressor of hvd_gradcomp")  # type: ignore[arg-type]
    # Workers that are at different points.
    one, other = Reducer(Int8), Reducer(Int8)
    one._transport.comm = other._transport.comm = COMM
    arrays = {"b": np.ones(5000)} if last == RANK else {"c": np.ones(5000)}
    refused(lambda: (other if last == RANK else one).reduce(arrays), f"rank {last} ")


def refused(call: Callable[[], object], text: str) -> None:

    with pytest.raises(ConfigurationError, match=text):
        call()
    COMM.Barrier()


if __name__ == "__main__":
    main()
