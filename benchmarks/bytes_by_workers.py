"""Bytes that one worker sends in a step, by the number of workers, counted from what the engine hands to collectives.

    python -m benchmarks.bytes_by_workers --out FOLDER        # a table, and a plot where matplotlib is installed

One engine runs with a transport that stands for any number of workers, all of which send what this one sends. Sizes do
not depend on that: each sends as many values as any other. Counted is what leaves a worker: of an alltoall all parts
but its own, of an allgather the N - 1 payloads that a ring lets each worker pass on, of an allreduce 2 (N - 1) / N of
the vector. For the hierarchical exchange it is what leaves the node for each of its workers, and apart from it what
stays on the node: gradients on their way to their owners, and as many bytes of sums on the way back. Nothing is timed.
That workers count the same on real exchanges is tested for 2, 4 and 8 of them (tests/unit/test_collectives.py).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hvd_gradcomp.collectives import Allgather, Allreduce, Confirm, Request
from hvd_gradcomp.compressors import Compressor, compression_from_spec
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.policy.models import MODELS, Shape

COLLECTIVES = ("dense", "allgather", "scatter_reduce", "hierarchical")


@dataclass
class Mirror:
    """The transport of a worker among `workers` that all send what it sends.

    Attributes:
        workers: how many.
        local: on each node.
        place: what the bytes are counted under: "all", "node" or "across".
        sent: bytes that left this worker.
    """

    workers: int
    local: int = 1
    place: str = "all"
    sent: Counter[str] = field(default_factory=Counter)

    rank = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.workers))

    def adds(self, kind: str) -> bool:
        return kind != "bfloat16"

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(start, start + self.local)) for start in range(0, self.workers, self.local))

    def part(self, groups: Sequence[Sequence[int]]) -> Mirror:
        # The first call is for the nodes, the second for the owners of a share.
        place = "across" if len(groups[0]) == self.workers // self.local and groups[0][1] != 1 else "node"
        return Mirror(len(groups[0]), 1, place, self.sent)

    def start(self, request: Request, name: str) -> np.ndarray:
        others = self.workers - 1
        if name.endswith(".settings"):
            return np.tile(request.payload, self.workers)  # type: ignore[union-attr]
        if isinstance(request, Allreduce):
            self.sent[self.place] += round(2 * others / self.workers * 4 * len(request.values))
            return np.asarray(request.values) * np.float32(self.workers)
        if isinstance(request, Allgather):
            if request.label == "node":
                return request.payload
            self.sent[self.place] += others * len(request.payload)
            return np.tile(request.payload, self.workers)
        own = request.payload[: request.splits[0]]
        self.sent[self.place] += len(request.payload) - len(own)
        return np.tile(own, self.workers)

    def wait(self, handle: np.ndarray) -> np.ndarray:
        return handle


def count(compressor: Compressor, shapes: Sequence[Shape], mirror: Mirror, bucket_bytes: int) -> dict[str, int]:
    """Bytes that left a worker in one step."""
    parameters = [Parameter(f"p{place}", prod(shape), "float32", shape) for place, shape in enumerate(shapes)]
    compressed = [each for each in parameters if compressor.takes(each.size)]
    engine = Engine(compressor, compressed, mirror, bucket_bytes=bucket_bytes)
    engine.begin_agreement(np.zeros(1, np.float32))
    engine.conclude_agreement()
    rng = np.random.default_rng(0)
    for bucket in engine.buckets:
        gradients = {each.name: rng.standard_normal(each.size, np.float32) for each in bucket.parameters}
        exchange = engine._exchange(bucket, gradients)
        request = next(exchange)
        while not isinstance(request, Confirm):
            among = request.among or mirror
            received = among.start(request, bucket.name)
            # The last round is not decoded: owners whose shares are not of one size do not send the same.
            if isinstance(request, Allgather) and among is mirror:
                break
            if request.label == "node":
                break
            request = exchange.send(received)
    return dict(mirror.sent)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Megabytes in markdown, a line for each number of workers."""
    lines = [f"| workers | {' | '.join(COLLECTIVES)} |", "| --- |" + " --- |" * len(COLLECTIVES)]
    lines += [
        f"| {row['workers']} | " + " | ".join(f"{row[each] / 1e6:.3f}" for each in COLLECTIVES) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """The same as lines."""
    try:
        import matplotlib
    except ImportError:
        print("no plot, because matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for each in COLLECTIVES:
        axes.plot([row["workers"] for row in rows], [row[each] / 1e6 for row in rows], marker="o", label=each)
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="MB a worker sends in a step", title=title)
    axes.set_xticks([row["workers"] for row in rows], [str(row["workers"]) for row in rows], rotation=45)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", default="topk(ratio=0.01) >> int8")
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--workers", type=int, nargs="+", default=[2**power for power in range(1, 11)])
    parser.add_argument("--local", type=int, default=8, help="workers on each node, for hierarchical (default: 8)")
    parser.add_argument("--bucket-mb", type=float, default=16.0, help="MiB of gradient in a bucket (default: 16)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    shapes = MODELS[arguments.model]()
    base = compression_from_spec(arguments.spec)
    values = sum(prod(shape) for shape in shapes if base.takes(prod(shape)))
    rows = []
    for workers in arguments.workers:
        row: dict[str, Any] = {"workers": workers, "dense": round(2 * (workers - 1) / workers * 4 * values)}
        for collective in COLLECTIVES[1:]:
            local = min(arguments.local, workers) if collective == "hierarchical" else 1
            if local == workers:
                # On one node nothing leaves it.
                row[collective] = 0
                continue
            head, _, code = arguments.spec.partition(" >> ")
            head = (
                head[:-1] + f", collective={collective})" if head.endswith(")") else f"{head}(collective={collective})"
            )
            compressor = compression_from_spec(head + (f" >> {code}" if code else ""))
            sent = count(compressor, shapes, Mirror(workers, local), int(arguments.bucket_mb * 2**20))
            row[collective] = sent.get("across" if collective == "hierarchical" else "all", 0)
            row[f"{collective} on the node"] = 2 * sent.get("node", 0)
        rows.append(row)
        print(json.dumps(row), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    payload = rows[0]["allgather"] / (rows[0]["workers"] - 1)
    (arguments.out / "bytes.json").write_text(json.dumps({"payload": payload, "rows": rows}, indent=1))
    (arguments.out / "bytes.md").write_text(table(rows))
    print(table(rows))
    print(f"a payload has {payload:,.0f} bytes")
    plot(rows, arguments.out / "bytes.png", f"{arguments.model}, {arguments.spec}")


if __name__ == "__main__":
    main()
