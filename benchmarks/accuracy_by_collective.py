"""What accuracy the example reaches with eight workers by each collective, against dense: horovodrun, several seeds.

    python benchmarks/accuracy_by_collective.py --results build/accuracy.json --write docs/scaling.md

Each training is a job of its own, at the defaults of examples/train.py, with the workers as two nodes of equal size.
What a job gave is in the results before the next one begins, and what is there is not trained again, so this may be
stopped at any time. It times nothing: it may run beside other work, on fewer cores than workers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from documents import replace_part

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train.py"
METHODS = {
    "dense": "none",
    **{
        collective: f"topk(ratio=0.01, collective={collective}) >> int8"
        for collective in ("allgather", "scatter_reduce", "hierarchical", "auto")
    },
}
#: For `auto`, so that what it chooses does not depend on what else this machine does: links of 100 Mbit between nodes
#: and of 10 Gbit within, in seconds of latency and bytes a second.
NETWORK = "5e-5,1.25e7,1e-5,1.25e9"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="file for what each training gave")
    parser.add_argument("--workers", type=int, default=8, help="an even number (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-most", type=int, default=10**6, metavar="N", help="stop after N trainings")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a training (default: %(default)s)")
    parser.add_argument("--write", type=Path, help="document whose part 'accuracy by collective' is replaced")
    arguments = parser.parse_args()

    results: dict[str, dict[str, Any]] = {}
    if arguments.results.exists():
        results = json.loads(arguments.results.read_text())
    wanted = [(method, seed) for seed in arguments.seeds for method in METHODS]
    missing = [each for each in wanted if key(*each, arguments.workers) not in results]
    for method, seed in missing[: arguments.at_most]:
        result = train(METHODS[method], seed, arguments.workers, arguments.limit)
        results[key(method, seed, arguments.workers)] = result
        draft = arguments.results.with_suffix(".new")
        draft.write_text(json.dumps(results, indent=1) + "\n")
        draft.rename(arguments.results)
        print(f"{method}, seed {seed}: {result['test_accuracy']:.2%} after {result['seconds']:.0f} s", flush=True)
    left = len(missing) - arguments.at_most
    if left > 0:
        print(f"{left} of {len(wanted)} trainings are left")
        return
    text = table({m: [results[key(m, seed, arguments.workers)] for seed in arguments.seeds] for m in METHODS})
    print(text)
    if arguments.write:
        replace_part(arguments.write, "accuracy by collective", text)


def key(method: str, seed: int, workers: int) -> str:
    return f"{method} {workers} {seed}"


def train(compression: str, seed: int, workers: int, limit: float) -> dict[str, Any]:
    """The example's own report of one training.

    Raises:
        SystemExit: the job failed, or took longer than `limit` seconds.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        **os.environ,
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HVD_GRADCOMP_NODES": f"{workers // 2},{workers // 2}",
        "HVD_GRADCOMP_NETWORK": NETWORK,
    }
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "result.json"
        horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "--mpi", "-np", str(workers), sys.executable]
        options = ["--compression", compression, "--seed", str(seed), "--json", str(written)]
        try:
            subprocess.run([*horovodrun, str(EXAMPLE), *options], env=environment, check=True, timeout=limit)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            sys.exit(f"{compression}, seed {seed}: {error}")
        found: dict[str, Any] = json.loads(written.read_text())
        return found


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """One line for each method, in Markdown."""
    dense = fmean(each["test_accuracy"] for each in results["dense"])
    lines = [
        "| | test accuracy, mean | to dense, points | each seed, % | sent | of it between nodes | received |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for method, runs in results.items():
        accuracies = [each["test_accuracy"] for each in runs]
        counted = [each["counters"] for each in runs]
        sent, within, received, whole = (
            fmean(each[f"{name}_bytes"] for each in counted) for name in ("sent", "node", "received", "dense")
        )
        shares = " | ".join(f"{part / whole:.2%}" for part in (sent, sent - within, received))
        seeds = ", ".join(f"{each:.2%}".rstrip("%") for each in accuracies)
        difference = 100 * (fmean(accuracies) - dense)
        lines.append(f"| {method} | {fmean(accuracies):.2%} | {difference:+.2f} | {seeds} | {shares} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
