"""What the workers of a job do, for tests of what goes wrong: `horovodrun ... python scenarios.py FOLDER NAME...`.

Each worker writes to FOLDER how each scenario ended and how many seconds that took, because launchers cut output short.
Horovod itself survives most errors, so one job can go through many scenarios; each has parameter names of its own,
because what some workers have sent for nothing waits in Horovod under its name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvd_gradcomp.collectives import Request
from hvd_gradcomp.torch import FP16, NoCompression, TopK, TopKInt8
from hvd_gradcomp.torch.optimizer import exchange_of

#: Two tensors above the threshold, the later one near it, and two below.
SHAPES = {"a": (10,), "b": (90, 40), "c": (60, 25), "d": (7,)}

scenario = ""


def optimizer_for(compression: Any, shapes: dict[str, tuple[int, ...]] = SHAPES, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    params = {f"{scenario}.{name}": torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    sgd = torch.optim.SGD(params.values(), lr=0.1)
    return params, hvd.DistributedOptimizer(sgd, params.items(), compression=compression, **options)


def train(params: Any, optimizer: Any, steps: int) -> None:
    torch.manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        sum((p * torch.randn(p.shape)).sum() for p in params.values()).backward()  # type: ignore[union-attr]
        optimizer.step()


def on_last(value: Any, otherwise: Any) -> Any:
    """One value for the last worker and another for the rest."""
    return value if hvd.rank() == hvd.size() - 1 else otherwise


def ratios_differ() -> None:
    train(*optimizer_for(TopKInt8(ratio=on_last(0.02, 0.01))), 3)


def one_is_stock() -> None:
    train(*optimizer_for(on_last(hvd.Compression.none, TopKInt8)), 3)


def all_but_one_are_stock() -> None:
    train(*optimizer_for(on_last(TopKInt8, hvd.Compression.none)), 3)


def one_sends_all() -> None:
    train(*optimizer_for(on_last(NoCompression, TopKInt8)), 3)


def one_adds() -> None:
    train(*optimizer_for(on_last(FP16, TopK)), 3)


def thresholds_differ() -> None:
    train(*optimizer_for(TopKInt8(dense_below=on_last(2000, 1000))), 3)


def one_threshold_is_above_everything() -> None:
    train(*optimizer_for(TopKInt8(dense_below=on_last(10**6, 1000))), 3)


def operations_differ() -> None:
    train(*optimizer_for(TopKInt8, op=on_last(hvd.Sum, hvd.Average)), 3)


def groups_differ() -> None:
    train(*optimizer_for(TopKInt8, groups=on_last(2, 1)), 3)


def shapes_differ() -> None:
    train(*optimizer_for(TopKInt8, shapes={**SHAPES, "c": on_last((60, 26), (60, 25))}), 3)


def one_lacks_a_parameter() -> None:
    train(*optimizer_for(TopKInt8, on_last({"a": (10,), "b": (90, 40)}, SHAPES)), 3)


def all_is_well() -> None:
    train(*optimizer_for(TopKInt8), 3)


def layouts_differ() -> None:
    table = torch.nn.Embedding(300, 8, sparse=bool(on_last(True, False)))
    sgd = torch.optim.SGD(table.parameters(), lr=0.1)
    named = [(f"{scenario}.table", table.weight)]
    optimizer = hvd.DistributedOptimizer(sgd, named, compression=TopKInt8)
    table(torch.arange(4)).sum().backward()
    optimizer.step()


def corrupt_payload() -> None:
    """Rank 1's network turns a bit over in the third step."""
    params, optimizer = optimizer_for(TopKInt8)
    train(params, optimizer, 2)
    transport = exchange_of(optimizer).engine.transport
    start = transport.start

    def turn_a_bit_over(request: Any, name: str) -> Any:
        request.payload[len(request.payload) // 2] ^= 16
        return start(request, name)

    if hvd.rank() == 1:
        transport.start = turn_a_bit_over  # type: ignore[method-assign]
    train(params, optimizer, 1)


def short_payload() -> None:
    """Rank 1 sends a few bytes less than it says."""
    params, optimizer = optimizer_for(TopKInt8)
    train(params, optimizer, 2)
    transport = exchange_of(optimizer).engine.transport
    start = transport.start
    if hvd.rank() == 1:
        transport.start = lambda request, name: start(type(request)(request.payload[:-8]), name)  # type: ignore
    train(params, optimizer, 1)


def killed() -> None:
    params, optimizer = optimizer_for(TopKInt8)
    train(params, optimizer, 2)
    sum((p * 2).sum() for p in params.values()).backward()  # type: ignore[union-attr]
    if on_last(True, False):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    train(params, optimizer, 1000)


def killed_between_rounds(collective: str) -> None:
    """The last worker dies when the first round of an exchange is over and the second would begin."""
    params, optimizer = optimizer_for(TopK(ratio=0.01, collective=collective))
    train(params, optimizer, 2)
    engine = exchange_of(optimizer).engine
    start = engine._start

    def die_at_the_second(bucket: Any, request: Request, rounds: int) -> Any:
        if rounds == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(bucket, request, rounds)

    if on_last(True, False):
        engine._start = die_at_the_second  # type: ignore[method-assign]
    train(params, optimizer, 1000)


def killed_scatter_reduce() -> None:
    killed_between_rounds("scatter_reduce")


def killed_hierarchical() -> None:
    killed_between_rounds("hierarchical")


def left() -> None:
    params, optimizer = optimizer_for(TopKInt8)
    train(params, optimizer, 2)
    if on_last(True, False):
        os._exit(3)
    train(params, optimizer, 1000)


def join(compression: Any) -> None:
    """The last worker has fewer batches and joins (see `run`); the others go on."""
    params, optimizer = optimizer_for(compression)
    train(params, optimizer, on_last(2, 5))


def join_gather() -> None:
    join(TopKInt8)
    on_last(hvd.join, int)()


def join_fp16() -> None:
    join(FP16)


def join_none() -> None:
    join(NoCompression)


def join_before_allreduce() -> None:
    """A worker that has joined takes no part in the tokens either."""
    if on_last(False, True):
        hvd.allreduce(torch.ones(5000), name=scenario, compression=TopKInt8)


def run(name: str, folder: Path) -> None:
    started = time.monotonic()
    outcome: dict[str, object] = {"error": "", "message": ""}
    try:
        globals()[name]()
    except Exception as error:
        outcome = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    outcome["seconds"] = time.monotonic() - started
    path = folder / f"{name}-{hvd.rank()}"
    path.with_suffix(".new").write_text(json.dumps(outcome))
    path.with_suffix(".new").rename(path.with_suffix(".json"))
    if name == "join_gather":
        # As a script ends that does not expect the error: with it.
        sys.exit(outcome["error"] != "")
    if name.startswith("join_"):
        # The last worker goes from here into its join, and those that were refused join as well to let it go on.
        hvd.join()


def main() -> None:
    global scenario
    hvd.init()
    # The first backward pass and step import much of torch: do that before time is taken.
    scenario = "warm"
    train(*optimizer_for(hvd.Compression.none), 1)
    for scenario in sys.argv[2:]:
        hvd.barrier()
        run(scenario, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
