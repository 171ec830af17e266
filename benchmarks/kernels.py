"""How long the hot steps take, as multiples of copying the gradient once: numpy, torch and native code side by side.

    python benchmarks/kernels.py                          a table on the screen
    python benchmarks/kernels.py --write docs/kernels.md --json kernels.json
    python benchmarks/kernels.py --only avx512 --threads 2

Every measurement stands between two copies of the same float32 tensor, and its ratio is taken to those, so that what
else the machine is doing bears on both. One thread, whose processor time counts; the median of the rounds. With more
threads the time that passes counts, and copies still take one. What is not here: whole steps and the network
(benchmarks/lab).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time

import numpy as np
import torch
from documents import replace_part

from hvd_gradcomp.compressors import Context, TopKInt8
from hvd_gradcomp.ops import Array, Ops, native
from hvd_gradcomp.ops.numpy_ops import NumpyOps
from hvd_gradcomp.ops.torch_ops import NativeTorchOps, TorchOps
from hvd_gradcomp.wire.parts import Reader

SIZE = 25_600_000
RATIO = 0.01
WORKERS = 4
#: Step -> the most that native code may take, in copies.
TARGETS = {"correct and select": 1.3, "quantize and code": 0.3, "decode and add": 0.3}


@dataclass
class Measured:
    """One step in one implementation: milliseconds, and the ratio to the copies around it."""

    step: str
    code: str
    milliseconds: float
    ratio: float
    rounds: int


class Steps:
    """The steps on arrays of one backend."""

    def __init__(self, ops: Ops, gradient: np.ndarray, residual: np.ndarray) -> None:
        self.ops = ops
        self.gradient, self.residual = self._array(gradient), self._array(residual)
        self.kept = int(len(gradient) * RATIO)
        self.method = TopKInt8(RATIO)
        self.positions = ops.top_positions(self.gradient, self.kept)
        self.frame, _ = self.method.encode(ops, ops.copy(self.gradient), Context())
        self.out = ops.zeros(len(gradient), "float32", self.gradient)
        self.small = {
            bits: self._array(np.random.default_rng(bits).integers(0, 2**bits, len(gradient) // 16))
            for bits in (1, 2, 4)
        }
        self.packed = {bits: ops.pack_uint(values, bits) for bits, values in self.small.items()}
        self.values = ops.take(self.gradient, self.positions)
        self.scratch = ops.copy(self.gradient)

    def _array(self, x: np.ndarray) -> Array:
        return torch.from_numpy(x.copy()) if self.ops.name == "torch" else x.copy()

    def all(self) -> dict[str, Callable[[], object]]:
        """Each step by name."""
        steps: dict[str, Callable[[], object]] = {
            "correct and select": self.select,
            "quantize and code": self.encode,
            "decode and add": self.decode,
            f"average of {WORKERS} workers": self.average,
            "checksum of the payload": lambda: self.ops.checksum(self.ops.pad(self.frame, 4)),
        }
        for bits in self.small:
            steps[f"pack {bits} bits, 1/16 of the values"] = lambda bits=bits: self.ops.pack_uint(
                self.small[bits], bits
            )
            steps[f"unpack {bits} bits, 1/16 of the values"] = lambda bits=bits: self.ops.unpack_uint(
                self.packed[bits], bits, len(self.small[bits])
            )
        return steps

    def select(self) -> object:
        """Add the residual, look for NaN and infinity, find the positions of the largest."""
        seen = self.ops.correct(self.gradient, self.residual, self.kept)
        return self.ops.top_positions(seen.x, self.kept, seen.candidates)

    def encode(self) -> object:
        """From positions to the frame, and the residual in their place."""
        return self.method.encode(_Selected(self.ops, self.positions), self.scratch, Context())  # type: ignore[arg-type]

    def restore(self) -> None:
        """Put back what `encode` has taken."""
        self.scratch = self.ops.put(self.scratch, self.positions, self.values)

    def decode(self) -> object:
        """One worker's frame, checked and added onto a dense tensor."""
        return self.method.decode_add(self.ops, Reader(self.ops, self.frame), self.out)

    def average(self) -> object:
        """All workers' frames to their mean, as the engine does it."""
        readers = [Reader(self.ops, self.frame) for _ in range(WORKERS)]
        mean = self.method.decode_mean(self.ops, readers, self.out, WORKERS)
        if mean is not None:
            return mean
        out = self.ops.clear(self.out)
        for reader in readers:
            out = self.method.decode_add(self.ops, reader, out)
        return self.ops.divide(out, WORKERS)


class _Selected:
    """Primitives whose selection is done already."""

    def __init__(self, ops: Ops, positions: Array) -> None:
        self._ops, self._positions = ops, positions

    def top_positions(self, x: Array, k: int, candidates: object = None) -> Array:
        return self._positions

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` keeps this thread busy; that it takes, where it may use others."""
    clock = perf_counter if native.available() and native.load().threads() > 1 else thread_time
    start = clock()
    work()
    return clock() - start


def measure(
    name: str,
    code: str,
    work: Callable[[], object],
    copy: Callable[[], object],
    seconds: float,
    prepare: Callable[[], object] = lambda: None,
) -> Measured:
    """`work` between two copies, again and again for about `seconds`, at least three times."""
    work()
    ratios, times = [], []
    end = perf_counter() + seconds
    while len(times) < 3 or (perf_counter() < end and len(times) < 100):
        prepare()
        before, spent, after = timed(copy), timed(work), timed(copy)
        ratios.append(2 * spent / (before + after))
        times.append(spent)
    return Measured(name, code, 1e3 * median(times), median(ratios), len(times))


def implementations(which: str | None) -> dict[str, tuple[Ops, str | None]]:
    """Name -> primitives, and the instruction set to choose for them."""
    found: dict[str, tuple[Ops, str | None]] = {"numpy": (NumpyOps(), None), "torch": (TorchOps(), None)}
    if native.available():
        for each in native.load().instruction_sets():
            found[f"native {each}"] = (NativeTorchOps(), each)
    return {name: pair for name, pair in found.items() if which is None or which in name}


def run(size: int, seconds: float, which: str | None) -> list[Measured]:
    """All steps in all implementations."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    gradient = rng.standard_normal(size, dtype=np.float32)
    # Zeros: repeated additions leave the gradient what it is, in the same time.
    residual = np.zeros(size, np.float32)
    source, target = torch.from_numpy(gradient), torch.zeros(size)

    def copy() -> object:
        return target.copy_(source)

    results = [measure("copy", "torch", copy, copy, seconds)]
    for code, (ops, instruction_set) in implementations(which).items():
        if instruction_set:
            native.load().use_instruction_set(instruction_set)
        steps = Steps(ops, gradient, residual)
        for name, work in steps.all().items():
            results.append(measure(name, code, work, copy, seconds, steps.restore))
            print(f"{code:16} {name:36} {results[-1].milliseconds:9.2f} ms {results[-1].ratio:8.2f} copies", flush=True)
    return results


def table(results: list[Measured], size: int) -> str:
    """The results in Markdown, steps down, implementations across."""
    codes = list(dict.fromkeys(each.code for each in results if each.step != "copy"))
    cells = {(each.step, each.code): each for each in results}
    copies = next(each for each in results if each.step == "copy")
    lines = [
        f"{platform.machine()}, {_processor()}, {os.cpu_count()} cores, one thread used; Python "
        f"{platform.python_version()}, torch {torch.__version__.split('+')[0]}, numpy {np.__version__}. "
        f"{size:,} float32 values; copying them takes {copies.milliseconds:.1f} ms (median).",
        "",
        "| step | " + " | ".join(codes) + " | target |",
        "| --- |" + " ---: |" * (len(codes) + 1),
    ]
    for step in dict.fromkeys(each.step for each in results if each.step != "copy"):
        ratios = [f"{cells[step, code].ratio:.2f}" if (step, code) in cells else "" for code in codes]
        target = f"at most {TARGETS[step]}" if step in TARGETS else ""
        lines.append(f"| {step} | " + " | ".join(ratios) + f" | {target} |")
    return "\n".join(lines)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=SIZE, help="values of the gradient")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement, about")
    parser.add_argument("--only", help="implementations whose name contains this")
    parser.add_argument("--threads", type=int, default=1, help="for native code (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--write", type=Path, help="put the table between the marks of this Markdown file")
    options = parser.parse_args()
    if native.available():
        native.load().use_threads(options.threads)
    print(native.status())
    results = run(options.size, options.seconds, options.only)
    text = table(results, options.size)
    print(f"\n{text}")
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    if options.write:
        replace_part(options.write, "measured", text)


if __name__ == "__main__":
    main()
