"""Real training in the lab: the time until a compressed run is as good as a dense run has become at its end.

    sudo .venv/bin/python benchmarks/lab/training.py --rate 100mbit --hosts 4 --write docs/targets.md

Two trainings: the network of examples/train.py on the digits, with SGD, and a transformer of 0.8 million parameters on
the text of Python's standard library, with Adam. Each method begins with the same weights and batches, and its clock
stands still while the model is tested. Where compressing costs steps, `--stretch` gives compressed runs more of them,
with the schedule of the learning rate stretched as well. A test is an epoch away from the next one and an image of the
digits is 0.22 points, so one seed says little: the table shows medians. What was measured is kept in `--out` and is
not measured again, so that seeds can be run one at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent, HERE.parents[1] / "examples"):
    sys.path.insert(0, str(folder))


@dataclass
class Curve:
    """What one training came to.

    Attributes:
        quality: accuracy on test images, or minus the loss in nats a character on held-out text: higher is better.
    """

    training: str
    method: str
    seed: int
    seconds: list[float] = field(default_factory=list)
    quality: list[float] = field(default_factory=list)
    sent_bytes: int = 0

    def reached(self, quality: float) -> float:
        """Seconds until a test first gave at least `quality`; infinity where none did."""
        found = zip(self.seconds, self.quality, strict=True)
        return next((seconds for seconds, each in found if each >= quality), math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit", help="of the links (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--methods", nargs="+", default=["none", "topk-int8"], help="the first one is the measure")
    parser.add_argument("--stretch", type=float, default=1, help="all but the first take so many times its steps")
    parser.add_argument("--trainings", nargs="+", default=["digits", "characters"], choices=sorted(TRAININGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(default: 0)")
    parser.add_argument("--out", type=Path, help="results (default: build/lab/training-RATE-HOSTS-STRETCH.json)")
    parser.add_argument("--write", type=Path, help="document whose part between the marks 'training' is replaced")
    arguments = parser.parse_args()
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        train_all(arguments)
        return

    from documents import replace_part
    from hosts import Hosts, LabError

    name = f"training-{arguments.rate}-{arguments.hosts}-{arguments.stretch:g}.json"
    out = (arguments.out or Path("build/lab") / name).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--out", str(out), "--methods", *arguments.methods]
    command += ["--stretch", str(arguments.stretch), "--seeds", *map(str, arguments.seeds)]
    if missing(arguments, known(out)):
        try:
            with Hosts(arguments.hosts, arguments.rate) as hosts:
                status = hosts.run([*command, "--trainings", *arguments.trainings], limit=3600)
        except LabError as error:
            sys.exit(f"lab: {error}")
        if status:
            sys.exit(f"lab: training ended with status {status}")
    text = table(known(out), arguments)
    longer = f"; all but `{arguments.methods[0]}` take {arguments.stretch:g} times the steps"
    longer = longer if arguments.stretch != 1 else ""
    text = f"{arguments.hosts} hosts with one worker each, links of {arguments.rate}{longer}:\n\n{text}"
    print(text)
    if arguments.write:
        replace_part(arguments.write, "training", text)


def known(out: Path) -> list[Curve]:
    """What has been measured so far."""
    return [Curve(**each) for each in json.loads(out.read_text())] if out.exists() else []


def missing(arguments: argparse.Namespace, curves: list[Curve]) -> list[tuple[str, int, str]]:
    """Training, seed and method of what is asked for and has not been measured."""
    done = {(each.training, each.seed, each.method) for each in curves}
    wanted = itertools.product(arguments.trainings, arguments.seeds, arguments.methods)
    return [each for each in wanted if each not in done]


def table(curves: list[Curve], arguments: argparse.Namespace) -> str:
    """For each training and method: time to the final quality of the first method, and what all of it took and gave."""
    lines = [
        "| training | method | final | seconds in all | to dense's final | of each seed | bytes sent a worker |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    by_key = {(each.training, each.method, each.seed): each for each in curves}
    for training, method in itertools.product(arguments.trainings, arguments.methods):
        runs = [by_key[training, method, seed] for seed in arguments.seeds]
        dense = [by_key[training, arguments.methods[0], seed] for seed in arguments.seeds]
        times = [run.reached(of.quality[-1]) for run, of in zip(runs, dense, strict=True)]
        middle = statistics.median_high(times)
        final = statistics.mean(run.quality[-1] for run in runs)
        cells = [
            training,
            f"`{method}`",
            f"{final:.2%}" if training == "digits" else f"{-final:.4f} nats",
            f"{statistics.median(run.seconds[-1] for run in runs):.1f}",
            f"{middle:.1f} s" if math.isfinite(middle) else "not reached",
            ", ".join(f"{each:.1f}" if math.isfinite(each) else "never" for each in times),
            f"{round(statistics.mean(run.sent_bytes for run in runs)):,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# -- on the workers ---------------------------------------------------------------------------------------------------


def train_all(arguments: argparse.Namespace) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    curves = known(arguments.out)
    wanted = missing(arguments, curves)
    hvd.allreduce(torch.zeros(1), name="all have read what is known")
    for training, seed, method in wanted:
        curves.append(train(training, method, seed, 1 if method == arguments.methods[0] else arguments.stretch))
        if hvd.rank() == 0:
            last = curves[-1]
            print(f"{training:<12}{seed:<4}{method:<40}{last.quality[-1]:>9.4f}{last.seconds[-1]:>9.1f} s", flush=True)
            arguments.out.write_text(json.dumps([asdict(each) for each in curves]) + "\n")


def train(training: str, method: str, seed: int, stretch: float) -> Curve:
    import horovod.torch as hvd
    import torch

    from hvd_gradcomp.torch import compression_from_spec, counters

    curve = Curve(training, method, seed)
    torch.manual_seed(seed)
    model, optimizer, schedule_of, steps, losses, test = TRAININGS[training](seed, stretch)
    named = [(f"{training}.{seed}.{method}.{name}", p) for name, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression_from_spec(method))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_of(steps))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(seed * hvd.size() + hvd.rank())
    passed, tested = 0.0, max(1, steps // 25)
    hvd.allreduce(torch.zeros(1), name="start")
    started = time.perf_counter()
    for step, loss in enumerate(losses(), start=1):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()
        if step % tested == 0 or step == steps:
            hvd.allreduce(torch.zeros(1), name="before the test")
            passed += time.perf_counter() - started
            curve.seconds.append(round(passed, 2))
            curve.quality.append(test())
            hvd.allreduce(torch.zeros(1), name="after the test")
            started = time.perf_counter()
        if step == steps:
            break
    curve.sent_bytes = counters(optimizer).total.sent_bytes
    return curve


def digits(seed: int, stretch: float) -> tuple:
    """What examples/train.py does."""
    import horovod.torch as hvd
    import torch
    import torch.nn.functional as F
    from train import load_data, make_model, measure_accuracy, warm_up_and_decay

    train_set, test_set = load_data()
    images, labels = train_set.tensors
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
    batch, epochs = 16, round(25 * stretch)
    in_epoch = len(images) // (batch * hvd.size())

    def losses() -> Iterator[Callable[[], torch.Tensor]]:
        order = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            mine = torch.randperm(len(images), generator=order)[hvd.rank() :: hvd.size()]
            for start in range(0, in_epoch * batch, batch):
                chosen = mine[start : start + batch]
                yield lambda chosen=chosen: F.cross_entropy(model(images[chosen]), labels[chosen])

    def test() -> float:
        accuracy = measure_accuracy(model, test_set, torch.device("cpu"))
        model.train()
        return accuracy

    return model, optimizer, warm_up_and_decay, epochs * in_epoch, losses, test


def characters(seed: int, stretch: float) -> tuple:
    """Next-character prediction; a twentieth of the text is held out."""
    import horovod.torch as hvd
    import torch
    import torch.nn.functional as F
    from characters import Characters, standard_library_text
    from train import warm_up_and_decay

    codes = standard_library_text(1_000_000)
    seen, held_out = codes[:950_000], codes[950_000:]
    model = Characters()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss_of(text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        pieces = torch.stack([text[place : place + 65] for place in places.tolist()])
        return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())

    def losses() -> Iterator[Callable[[], torch.Tensor]]:
        chance = torch.Generator().manual_seed(seed * hvd.size() + hvd.rank())
        while True:
            chosen = torch.randint(len(seen) - 65, (8,), generator=chance)
            yield lambda chosen=chosen: loss_of(seen, chosen)

    @torch.no_grad()
    def test() -> float:
        places = torch.arange(hvd.rank(), 128, hvd.size()) * ((len(held_out) - 65) // 128)
        loss = loss_of(held_out, places)
        return -float(hvd.allreduce(loss, name="test loss"))

    return model, optimizer, warm_up_and_decay, round(400 * stretch), losses, test


TRAININGS: dict[str, Callable[[int, float], tuple]] = {"digits": digits, "characters": characters}

if __name__ == "__main__":
    main()
