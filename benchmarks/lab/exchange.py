"""One rank of the exchange benchmark: times all methods on one model's shapes in turn; rank 0 writes the figures.

Started by matrix.py on the hosts of the lab; runs under horovodrun as well:

    horovodrun -np 4 python benchmarks/lab/exchange.py --model resnet50 --methods dense topk-int8 --out /tmp/x.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from methods import Step, make

from hvd_gradcomp.policy.models import MODELS, values


def main() -> None:
    parser = argparse.ArgumentParser(description="Time exchanges of a model's gradients.")
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet50")
    parser.add_argument("--methods", nargs="+", default=["dense", "fp16", "textbook-topk", "dgc", "topk-int8"])
    parser.add_argument("--ratio", type=float, default=0.01, help="of values kept, for textbook-topk and dgc")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backward-ms", type=float, default=0, help="in which gradients become ready one by one")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before, not counted")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    shapes = MODELS[arguments.model]()
    source = Gradients(values(shapes))
    report = []
    for method in arguments.methods:
        # Each method begins with parameters of its own: optimizers leave hooks and state behind.
        parameters = {
            f"{method}.{number}": torch.nn.Parameter(torch.zeros(shape)) for number, shape in enumerate(shapes)
        }
        exchange = make(method, parameters, arguments.ratio, arguments.backward_ms / 1000)
        seconds, steps = [], []
        for step in range(arguments.warm_up + arguments.steps):
            source.fill(parameters, step)
            hvd.allreduce(torch.zeros(1), name="start")
            started = time.perf_counter()
            done = exchange()
            passed = time.perf_counter() - started
            # The slowest worker is the one that a training waits for.
            slowest = float(hvd.allreduce(torch.tensor(passed), name="slowest", op=hvd.Max))
            if step >= arguments.warm_up:
                seconds.append(slowest)
                steps.append(done)
        report.append(summary(method, seconds, steps))
        if hvd.rank() == 0:
            last = report[-1]
            ways = " ".join(f"{name}:{count}" for name, count in last["ways"].items())
            print(f"{method:<48}{last['median_seconds']:>9.3f} s{last['sent_bytes']:>14,} bytes  {ways}", flush=True)
        del exchange, parameters
    if hvd.rank() == 0:
        result = {"model": arguments.model, "workers": hvd.size(), "values": source.size, "methods": report}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def summary(method: str, seconds: list[float], steps: list[Step]) -> dict[str, Any]:
    """The figures of one method, as rank 0 saw them."""
    return {
        "method": method,
        "median_seconds": statistics.median(seconds),
        "seconds": [round(each, 4) for each in seconds],
        "sent_bytes": round(statistics.mean(step.sent_bytes for step in steps)),
        "compressed_bytes": sum(step.compressed_bytes for step in steps),
        "kept": sum(step.kept for step in steps),
        "ways": {name: count for name, count in steps[-1].ways.items() if count},
        "phases": {name: statistics.median(step.phases[name] for step in steps) for name in steps[0].phases},
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


class Gradients:
    """Heavy-tailed gradients, partly the same on all workers, other ones each step.

    Two pools of random numbers, one shared by all workers and one of this worker's own, are added at offsets that
    change with the step. The logarithm of a value's magnitude is itself normal, so few values hold most of the norm.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.shared = self._pool(0)
        self.own = self._pool(1 + hvd.rank())

    def _pool(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randn(1_299_709, generator=generator)
        return pool * torch.exp(torch.randn(len(pool), generator=generator))

    @torch.no_grad()
    def fill(self, parameters: dict[str, torch.nn.Parameter], step: int) -> None:
        """Give every parameter a gradient."""
        for number, p in enumerate(parameters.values()):
            # In the shape of `p` from the start, as a backward pass leaves it: not a view of something else's memory.
            gradient = torch.empty_like(p)
            self._copy(self.shared, gradient.view(-1), 7919 * step + 104_729 * number)
            addend = torch.empty_like(p)
            self._copy(self.own, addend.view(-1), 15_485_863 * step + 32_452_843 * number)
            p.grad = gradient.add_(addend)

    @staticmethod
    def _copy(pool: torch.Tensor, out: torch.Tensor, offset: int) -> None:
        filled = 0
        while filled < len(out):
            start = (offset + filled) % len(pool)
            count = min(len(out) - filled, len(pool) - start)
            out[filled : filled + count] = pool[start : start + count]
            filled += count


if __name__ == "__main__":
    main()
