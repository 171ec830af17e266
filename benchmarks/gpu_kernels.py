"""How long the hot steps take on a GPU, as multiples of copying the gradient there once: torch and Triton side by side.

    python benchmarks/gpu_kernels.py                      on a GPU, a table in Markdown
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --size 5000 --rounds 1     without one: that it runs, no more

Wall time from one idle device to the next, so what the host does between kernels counts as well. What is not here:
the same on CPUs (benchmarks/kernels.py), whole steps and the network (benchmarks/lab).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
import triton
from kernels import RATIO, SIZE, Steps

from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.ops.torch_ops import TorchOps
from hvd_gradcomp.ops.triton.kernels import TritonKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _Kernels(TritonKernels, TorchOps):
    """The kernels wherever the tensor is: on a CPU only the interpreter can run them."""

    def on_device(self, x: Array) -> bool:
        return True


class _Steps(Steps):
    """The steps on tensors of the GPU."""

    def _array(self, x: np.ndarray) -> Array:
        return torch.from_numpy(x.copy()).to(DEVICE)


def seconds(work: Callable[[], object], rounds: int, prepare: Callable[[], object] = lambda: None) -> float:
    """The median time of `work`, after one call that compiles."""
    work()
    times = []
    for _ in range(rounds):
        prepare()
        _wait()
        start = perf_counter()
        work()
        _wait()
        times.append(perf_counter() - start)
    return median(times)


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", type=int, default=SIZE, help="elements of the gradient")
    options.add_argument("--rounds", type=int, default=20)
    chosen = options.parse_args()
    gradient = np.random.default_rng(0).standard_normal(chosen.size, dtype=np.float32)
    source = torch.from_numpy(gradient).to(DEVICE)
    target = torch.zeros_like(source)
    copy = seconds(lambda: target.copy_(source), chosen.rounds)
    codes: dict[str, Ops] = {"torch": TorchOps(), "triton": _Kernels()}
    steps = {name: _Steps(ops, gradient, np.zeros(chosen.size, np.float32)) for name, ops in codes.items()}
    frames = {name: bytes(each.frame.cpu().numpy()) for name, each in steps.items()}
    assert frames["torch"] == frames["triton"], "the two give different bytes"
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU: times of the interpreter mean nothing"
    print(
        f"{where}; torch {torch.__version__}, Triton {triton.__version__}. {chosen.size:,} float32 values, "
        f"{RATIO:.0%} kept; copying them takes {1e3 * copy:.3f} ms.\n"
    )
    print("| step | torch, ms | torch, copies | triton, ms | triton, copies |\n| --- | ---: | ---: | ---: | ---: |")
    for step in steps["torch"].all():
        times = [seconds(each.all()[step], chosen.rounds, each.restore) for each in steps.values()]
        print(f"| {step} | " + " | ".join(f"{1e3 * each:.3f} | {each / copy:.2f}" for each in times) + " |", flush=True)


if __name__ == "__main__":
    main()
