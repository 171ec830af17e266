"""The ways of exchanging gradients that the lab compares, each as a function of a model's gradients.

The rivals are written as their sources describe them: the textbook top-k of many tutorials and of GRACE, and DGC.
Ours and Horovod's own go through `hvd.DistributedOptimizer`, as users have them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import horovod.torch as hvd
import torch

from hvd_gradcomp.torch import compression_from_spec, counters


@dataclass
class Step:
    """What one exchange cost this worker.

    Attributes:
        sent_bytes: that it handed to collectives.
        phases: seconds by phase, where known.
        compressed_bytes: of `sent_bytes`, those of compressed tensors, where known.
        kept: values in these.
        ways: exchanges of buckets by what became of them, where known.
    """

    sent_bytes: int
    phases: dict[str, float]
    compressed_bytes: int = 0
    kept: int = 0
    ways: dict[str, int] = field(default_factory=dict)


Exchange = Callable[[], Step]


def make(method: str, parameters: dict[str, torch.nn.Parameter], ratio: float, backward: float = 0.0) -> Exchange:
    """The exchange called `method` of the gradients in `parameters`; each ends up as the average.

    Args:
        method: "dense", "fp16", "textbook-topk", "dgc", or a spec of this package.
        ratio: of values kept, for the two rivals.
        backward: seconds in which the gradients become ready, from the last parameter to the first, in time with
            their sizes, while the processor is free, as it is when a GPU computes them. With 0 all are ready at once.
            For methods of Horovod's optimizer, so not for the two rivals.
    """
    if method == "textbook-topk":
        return lambda: _sparse(parameters, lambda name, g: _textbook(name, g, ratio))
    if method == "dgc":
        state = DGC(ratio)
        return lambda: _sparse(parameters, state.select)
    compression = {"dense": hvd.Compression.none, "fp16": hvd.Compression.fp16}.get(method)
    if compression is None:
        return _ours(parameters, method, backward)
    optimizer = _optimizer(parameters, compression)
    width = 2 if method == "fp16" else 4

    def stock() -> Step:
        _hand_in(optimizer, parameters, backward)
        optimizer.synchronize()
        return Step(width * sum(p.numel() for p in parameters.values()), {})

    return stock


def _optimizer(parameters: dict[str, torch.nn.Parameter], compression: object) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(parameters.values(), lr=0.1)
    return hvd.DistributedOptimizer(sgd, named_parameters=parameters.items(), compression=compression)


def _hand_in(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], seconds: float) -> None:
    """Call Horovod's hooks one after another within `seconds`, as a backward pass would."""
    if not seconds:
        return
    size = sum(p.numel() for p in parameters.values())
    started, ready = time.perf_counter(), 0
    for p in reversed(parameters.values()):
        ready += p.numel()
        time.sleep(max(0.0, started + seconds * ready / size - time.perf_counter()))
        optimizer._make_hook(p)()


def _ours(parameters: dict[str, torch.nn.Parameter], spec: str, backward: float) -> Exchange:
    optimizer = _optimizer(parameters, compression_from_spec(spec))

    def exchange() -> Step:
        # There is no step() here that would tell the optimizer that these gradients are new.
        optimizer._synchronized = False
        found = counters(optimizer)
        found.reset()
        _hand_in(optimizer, parameters, backward)
        optimizer.synchronize()
        total = found.total
        phases = {phase: getattr(total, f"{phase}_seconds") for phase in ("compress", "exchange", "decompress")}
        dense = found.bucket("dense")
        ways = {"scatter_reduce": total.scattered, "hierarchical": total.nodewise, "dense": total.fallbacks}
        ways["allgather"] = total.exchanges - dense.exchanges - sum(ways.values())
        return Step(total.sent_bytes, phases, total.sent_bytes - dense.sent_bytes, total.kept - dense.kept, ways)

    return exchange


Selection = tuple[torch.Tensor, torch.Tensor]
_DENSE_BELOW = 1024


def _sparse(parameters: dict[str, torch.nn.Parameter], select: Callable[[str, torch.Tensor], Selection]) -> Step:
    """Select values of each tensor, gather values and indices, add them up densely; small tensors by allreduce."""
    waiting = []
    sent = 0
    for name, p in parameters.items():
        if p.numel() < _DENSE_BELOW:
            handle = hvd.allreduce_async_(p.grad, name=name, op=hvd.Average)
            waiting.append((p, None, handle))
            sent += 4 * p.numel()
            continue
        values, indices = select(name, p.grad.view(-1))
        gathered = hvd.allgather_async(values, name=f"{name}.values"), hvd.allgather_async(indices, name=f"{name}.at")
        waiting.append((p, *gathered))
        sent += values.numel() * values.element_size() + indices.numel() * indices.element_size()
    for p, first, second in waiting:
        if first is None:
            hvd.synchronize(second)
            continue
        values, indices = hvd.synchronize(first), hvd.synchronize(second)
        total = torch.zeros(p.numel())
        total.index_add_(0, indices.to(torch.int64), values.to(torch.float32))
        p.grad.copy_(total.div_(hvd.size()).view_as(p.grad))
    return Step(sent, {})


_residuals: dict[str, torch.Tensor] = {}


def _textbook(name: str, gradient: torch.Tensor, ratio: float) -> Selection:
    """`torch.topk` of the magnitudes, float32 values, int64 indices, the rest kept for the next step."""
    corrected = gradient + _residuals[name] if name in _residuals else gradient.clone()
    k = max(1, int(ratio * corrected.numel()))
    indices = torch.topk(corrected.abs(), k, sorted=False).indices
    values = corrected[indices]
    corrected[indices] = 0
    _residuals[name] = corrected
    return values, indices


class DGC:
    """Deep gradient compression (Lin et al., ICLR 2018): momentum correction and masking, a threshold from a sample.

    A sample of 1 % of the magnitudes gives the threshold; where it passes many more values than asked for, the largest
    of them are selected (the paper's hierarchical selection). float16 values and int32 indices.
    """

    def __init__(self, ratio: float, momentum: float = 0.9) -> None:
        self.ratio = ratio
        self.momentum = momentum
        self.velocity: dict[str, torch.Tensor] = {}
        self.accumulated: dict[str, torch.Tensor] = {}

    def select(self, name: str, gradient: torch.Tensor) -> Selection:
        """What to send of one tensor."""
        u = self.velocity.setdefault(name, torch.zeros_like(gradient))
        v = self.accumulated.setdefault(name, torch.zeros_like(gradient))
        v.add_(u.mul_(self.momentum).add_(gradient))
        magnitudes = v.abs()
        size = magnitudes.numel()
        k = max(1, math.ceil(self.ratio * size))
        sample = magnitudes[:: max(1, size // max(size // 100, min(size, 4096)))]
        threshold = torch.topk(sample, max(1, math.ceil(self.ratio * sample.numel())), sorted=False).values.min()
        indices = (magnitudes >= threshold).nonzero().view(-1)
        if indices.numel() > 1.3 * k:
            indices = indices[torch.topk(magnitudes[indices], k, sorted=False).indices]
        values = v[indices]
        u[indices] = 0
        v[indices] = 0
        return values.to(torch.float16), indices.to(torch.int32)
