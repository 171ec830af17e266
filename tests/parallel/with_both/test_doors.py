"""The same gradients through the door of PyTorch and through that of TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as tensorflow_hvd
import horovod.torch as torch_hvd
import numpy as np
import pytest
import tensorflow as tf
import torch
from horovod.common import process_sets
from horovod.tensorflow import mpi_ops as tensorflow_ops
from horovod.torch import mpi_ops as torch_ops
from known_gradients import backward, gradients, parameters

from hvd_gradcomp.collectives import Allreduce
from hvd_gradcomp.tensorflow import (
    BF16,
    DGC,
    FP16,
    QSGD,
    Int8,
    RandomK,
    TopK,
    TopKInt8,
    residuals,
)
from hvd_gradcomp.tensorflow.transport import HorovodTransport as TensorFlowTransport
from hvd_gradcomp.torch.optimizer import exchange_of
from hvd_gradcomp.torch.transport import HorovodTransport as TorchTransport

CASES: list[tuple[Any, int]] = [
    (TopKInt8(ratio=0.05), 20),
    *((each, 2) for each in (Int8(), FP16(), BF16(), TopK(ratio=0.1) >> BF16())),
    *((each, 3) for each in (DGC(), RandomK(ratio=0.1), QSGD(), TopK(ratio=0.1, granularity="model"))),
]


@dataclass
class Seen:
    """What a door did with the gradients of `gradients`, in one step after the other."""

    sent: list[list[bytes]] = field(default_factory=list)  # all that was handed to the collectives
    results: list[dict[str, np.ndarray]] = field(default_factory=list)
    kept: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  # after the last step


@pytest.fixture(scope="module")
def with_torch() -> Iterator[dict[str, Seen]]:
    """What the door of PyTorch did in each case; its core has ended, and that of TensorFlow runs."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        # Horovod's core ends MPI when it had begun it, and there is no second time.
        from mpi4py import MPI

        assert MPI.Is_initialized()
    process_sets._setup(torch_ops._basics)
    torch_hvd.init()
    found = {str(compression): through_torch(compression, steps) for compression, steps in CASES}
    torch_hvd.shutdown()
    process_sets._setup(tensorflow_ops._basics)
    tensorflow_hvd.init()
    yield found
    tensorflow_hvd.shutdown()


def recorded(monkeypatch: pytest.MonkeyPatch, transport: Any) -> list[bytes]:
    """All that is handed to the collectives of a transport from now on."""
    sent: list[bytes] = []
    original = transport.start

    def start(self: Any, request: Any, name: str) -> Any:
        array = request.values if isinstance(request, Allreduce) else request.payload
        data = np.asarray(array).tobytes()
        # What the workers tell each other before the first step is not a gradient.
        if name != "presence" and b'"compression"' not in data:
            sent.append(data)
        return original(self, request, name)

    monkeypatch.setattr(transport, "start", start)
    return sent


def through_torch(compression: Any, steps: int) -> Seen:
    seen = Seen()
    params = parameters()
    optimizer = torch_hvd.DistributedOptimizer(
        torch.optim.SGD(params.values(), lr=1.0), named_parameters=params.items(), compression=compression
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = recorded(monkeypatch, TorchTransport)
        for number in range(steps):
            optimizer.zero_grad()
            backward(params, gradients(number, torch_hvd.rank()))
            optimizer.synchronize()
            seen.sent.append(list(sent))
            sent.clear()
            seen.results.append({name: p.grad.numpy().copy() for name, p in params.items() if p.grad is not None})
            with optimizer.skip_synchronize():
                optimizer.step()
    for name, parts in exchange_of(optimizer).engine.state.items():
        seen.kept[name] = {part: value.numpy().copy() for part, value in parts.items()}
    return seen


@pytest.mark.parametrize(("compression", "steps"), CASES, ids=lambda each: str(each))
def test_both_doors_send_the_same_bytes(with_torch, monkeypatch, compression, steps):
    """Payloads byte by byte, results and residuals bit by bit, in a tf.function."""
    expected = with_torch[str(compression)]
    own = {name: tf.Variable(tf.zeros(p.shape), name=name) for name, p in parameters().items()}
    compressed = [name for name, v in own.items() if compression.takes(int(np.prod(v.shape)))]

    @tf.function(autograph=False)
    def step(given: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(own[name] * g) for name, g in given.items()])
        tape = tensorflow_hvd.DistributedGradientTape(tape, compression=compression)
        return dict(zip(own, tape.gradient(loss, list(own.values())), strict=True))

    sent = recorded(monkeypatch, TensorFlowTransport)
    for number in range(steps):
        mine = gradients(number, tensorflow_hvd.rank())
        found = step({name: tf.constant(g) for name, g in mine.items()})
        assert sent == expected.sent[number], "the doors sent different bytes"
        assert sent
        sent.clear()
        for name, result in found.items():
            wanted = expected.results[number][name]
            if name in compressed:
                assert result.numpy().tobytes() == wanted.tobytes()
            else:
                np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-5, atol=1e-6)
    kept = residuals([own[name] for name in compressed]).by_path
    for name in compressed:
        for part, value in expected.kept.get(name, {}).items():
            assert kept[name].parts[part].numpy().tobytes() == value.tobytes()
    assert step.experimental_get_tracing_count() == 1
