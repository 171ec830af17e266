"""What `hvd-gradcomp plan` predicts against what exchanges take, between hosts of the lab:

    sudo .venv/bin/python benchmarks/lab/planner.py --rates 100mbit 1gbit --hosts 2 4

Each cell is planned and measured one after the other on the same hosts.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from hosts import Hosts, LabError

HERE = Path(__file__).resolve().parent
METHODS = ("int8", "topk(ratio=0.1) >> int8", "topk(ratio=0.01) >> int8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the planner's predictions with measured exchanges.")
    parser.add_argument("--model", default="resnet50", help="(default: %(default)s)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="of the links (default: %(default)s)")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4], help="numbers of hosts (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="besides dense (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="that are counted (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each half of a cell")
    parser.add_argument("--out", type=Path, default=Path("build/planner"), help="folder (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = ["| hosts, rate | method | predicted | measured | error |", "| --- | --- | ---: | ---: | ---: |"]
    choices = ["| hosts, rate | predicted to be the fastest | measured as the fastest | the former takes longer by |"]
    choices.append("| --- | --- | --- | ---: |")
    for count in arguments.hosts:
        for rate in arguments.rates:
            try:
                found = cell(arguments, count, rate)
            except LabError as error:
                sys.exit(f"lab: {error}")
            lines += [each.row(f"{count} × {rate}") for each in found]
            chosen = min(found, key=lambda each: each.predicted)
            best = min(found, key=lambda each: each.measured)
            lost = chosen.measured / best.measured - 1
            choices.append(f"| {count} × {rate} | `{chosen.method}` | `{best.method}` | {lost:.0%} |")
    text = "\n".join([*lines, "", *choices]) + "\n"
    (arguments.out / "planner.md").write_text(text)
    print(text)


@dataclass(frozen=True)
class Found:
    """Seconds of an exchange by one method."""

    method: str
    predicted: float
    measured: float

    def row(self, where: str) -> str:
        """A line of the table."""
        error = self.predicted / self.measured - 1
        return f"| {where} | `{self.method}` | {self.predicted:.3f} s | {self.measured:.3f} s | {error:+.0%} |"


def cell(arguments: argparse.Namespace, count: int, rate: str) -> list[Found]:
    """What was found of each method with one number of hosts at one rate."""
    plan = (arguments.out / f"plan-{count}-{rate}.json").resolve()
    measured = (arguments.out / f"measured-{count}-{rate}.json").resolve()
    planner = [sys.executable, "-m", "hvd_gradcomp", "plan", "--model", arguments.model]
    planner += ["--methods", *arguments.methods, "--json", "--out", str(plan)]
    exchange = [sys.executable, str(HERE / "exchange.py"), "--model", arguments.model, "--out", str(measured)]
    exchange += ["--steps", str(arguments.steps), "--warm-up", "1", "--methods", "dense", *arguments.methods]
    print(f"lab: {count} hosts, {rate}", flush=True)
    with Hosts(count, rate) as hosts:
        for command in (planner, exchange):
            status = hosts.run(command, limit=arguments.limit)
            if status:
                raise LabError(f"{' '.join(command)} ended with status {status}")
    predicted = {
        each["method"]: each["exchange_s"]
        for each in json.loads(plan.read_text())["methods"]
        if each["collective"] in ("allreduce", "allgather")
    }
    return [
        Found(each["method"], predicted[each["method"]], each["median_seconds"])
        for each in json.loads(measured.read_text())["methods"]
    ]


if __name__ == "__main__":
    main()
