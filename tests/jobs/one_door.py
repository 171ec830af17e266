"""One worker that takes known gradients through one door and writes down what it saw; see test_doors.py.

horovodrun -np 2 python one_door.py torch FOLDER        (or: tensorflow)
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvd_gradcomp.collectives import Allreduce

#: Spec -> steps. "model" makes one vector of all tensors; the others have one for each.
CASES = {
    "topk(ratio=0.05) >> int8": 20,
    "int8": 2,
    "fp16": 2,
    "bf16": 2,
    "topk(ratio=0.1) >> bf16": 2,
    "dgc": 3,
    "randomk(ratio=0.1)": 3,
    "qsgd": 3,
    "topk(ratio=0.1, granularity=model)": 3,
}
SHAPES = {"a.weight": (96, 40), "a.bias": (96,), "b.weight": (40, 50), "b.bias": (40,), "c": (5000,)}


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    found = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        random = np.random.default_rng([step, rank, index])
        values = random.standard_normal(shape) * np.exp(random.standard_normal(shape))
        found[name] = values.astype(np.float32)
    return found


class Recorder:
    """Notes all that is handed to the collectives of a transport."""

    def __init__(self, transport: Any) -> None:
        self.sent: list[bytes] = []
        original = transport.start

        def start(transport: Any, request: Any, name: str) -> Any:
            array = request.values if isinstance(request, Allreduce) else request.payload
            data = np.asarray(array).tobytes()
            # What the workers tell each other before the first step is not a gradient.
            if name != "presence" and b'"compression"' not in data:
                self.sent.append(data)
            return original(transport, request, name)

        transport.start = start

    def taken(self) -> list[bytes]:
        """What was noted since the last call."""
        sent, self.sent = self.sent, []
        return sent


def through_torch(spec: str, steps: int, recorder: Recorder) -> dict[str, Any]:
    import horovod.torch as hvd
    import torch

    from hvd_gradcomp.torch import compression_from_spec
    from hvd_gradcomp.torch.optimizer import exchange_of

    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params.values(), lr=1.0),
        named_parameters=params.items(),
        compression=compression_from_spec(spec),
    )
    sent, results = [], []
    for number in range(steps):
        optimizer.zero_grad()
        mine = gradients(number, hvd.rank())
        torch.stack([(params[name] * torch.as_tensor(g)).sum().double() for name, g in mine.items()]).sum().backward()
        optimizer.synchronize()
        sent.append(recorder.taken())
        results.append({name: p.grad.numpy().copy() for name, p in params.items()})
        with optimizer.skip_synchronize():
            optimizer.step()
    state = exchange_of(optimizer).engine.state
    kept = {name: {part: v.numpy().copy() for part, v in parts.items()} for name, parts in state.items()}
    return {"sent": sent, "results": results, "kept": kept}


def through_tensorflow(spec: str, steps: int, recorder: Recorder) -> dict[str, Any]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_gradcomp.tensorflow import compression_from_spec, residuals

    compression = compression_from_spec(spec)
    own = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()}

    @tf.function(autograph=False)
    def step(given: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(own[name] * g) for name, g in given.items()])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return dict(zip(own, tape.gradient(loss, list(own.values())), strict=True))

    sent, results = [], []
    for number in range(steps):
        found = step({name: tf.constant(g) for name, g in gradients(number, hvd.rank()).items()})
        sent.append(recorder.taken())
        results.append({name: result.numpy() for name, result in found.items()})
    compressed = [v for v in own.values() if compression.takes(int(np.prod(v.shape)))]
    state = residuals(compressed).by_path
    kept = {name: {part: v.numpy() for part, v in each.parts.items()} for name, each in state.items()}
    return {"sent": sent, "results": results, "kept": kept, "traces": step.experimental_get_tracing_count()}


def a_zero(door: str) -> Any:
    if door == "torch":
        import torch

        return torch.zeros(1)
    import tensorflow as tf

    return tf.zeros(1)


def main(door: str, folder: Path) -> None:
    if door == "torch":
        import horovod.torch as hvd

        from hvd_gradcomp.torch.transport import HorovodTransport
    else:
        import horovod.tensorflow as hvd

        from hvd_gradcomp.tensorflow.transport import HorovodTransport

    hvd.init()
    recorder = Recorder(HorovodTransport)
    through = through_torch if door == "torch" else through_tensorflow
    seen = {spec: through(spec, steps, recorder) for spec, steps in CASES.items()}
    # Under its name only when it is whole: the launcher ends all workers when one ends with an error.
    draft = folder / f"{door}-{hvd.rank()}.new"
    draft.write_bytes(pickle.dumps(seen))
    draft.rename(folder / f"{door}-{hvd.rank()}.pickle")
    # None leaves before all have written.
    hvd.allreduce(a_zero(door), name="written")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
