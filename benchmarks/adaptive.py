"""Ratios that adapt, beside ratios that stay: quality and bytes on two trainings, and how a factor is found.

    python benchmarks/adaptive.py                # everything (about an hour and a half of one core)
    python benchmarks/adaptive.py --plot-only    # one training with a hard phase, and its picture

Writes the tables of docs/adaptive.md (between its marks) and docs/adaptive.png: factor, gain and loss over the steps of
a training in whose middle the gradients become hard to compress for a while. Needs matplotlib for the picture. What is
trained is in `adaptive_training`. It times nothing, so GraVAC counts bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from adaptive_training import EPOCH, WORKERS, Task, Training, characters, digits, train
from documents import replace_part

from hvd_gradcomp.compressors import compression_from_spec

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "adaptive.md"
PICTURE = ROOT / "docs" / "adaptive.png"
GRAVAC = "gravac(topk >> int8, theta_max=1000, epsilon=0.1, window=10, growth=4, throughput=bytes)"
# From 2.5 % on: for trainings that are too short to pay for a search from 10 %.
GRAVAC_FROM_40 = GRAVAC.replace("theta_max=1000, epsilon=0.1", "theta_min=40, theta_max=160, epsilon=0.08")
STATIC = ["none", "topk(ratio=0.1) >> int8", "topk(ratio=0.01) >> int8", "topk(ratio=0.001) >> int8"]
# Characters are 400 steps, about as many as 19 epochs of the digits.
_TEXT_STEPS = 400


@dataclass(frozen=True)
class Comparison:
    """One task of one length, and the methods that are compared on it.

    Attributes:
        name: in the table, and of results on disk.
        task: from the seed.
        show: how a quality is written, and a difference of two.
    """

    name: str
    task: Callable[[int], Task]
    specs: list[str]
    show: Callable[[float], str] = "{:.2%}".format
    differ: Callable[[float], str] = lambda each: f"{100 * each:+.2f}"


COMPARISONS = [
    Comparison(
        "digits, 10 epochs",
        lambda seed: digits(seed, 10),
        [*STATIC, GRAVAC, GRAVAC_FROM_40, f"accordion(topk >> int8, low=0.1, high=0.01, window={EPOCH})"],
    ),
    Comparison(
        "digits, 25 epochs",
        lambda seed: digits(seed, 25),
        [*STATIC, GRAVAC_FROM_40],
    ),
    Comparison(
        f"characters, {_TEXT_STEPS} steps",
        lambda seed: characters(seed, _TEXT_STEPS),
        [
            *STATIC,
            "topk(ratio=0.25) >> int8",
            GRAVAC,
            "gravac(topk >> int8, theta_min=2, theta_max=100, epsilon=0.6, window=10, throughput=bytes)",
            "accordion(topk >> int8, low=0.1, high=0.01, window=20)",
        ],
        "{:.3f}".format,
        "{:+.3f}".format,
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot-only", action="store_true", help="no table")
    parser.add_argument("--only", default="", help="trainings in whose name this occurs, such as characters")
    parser.add_argument("--seeds", type=int, default=3, help="of each training (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "adaptive.json", help="what was measured so far"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if not args.plot_only:
        found = json.loads(args.results.read_text()) if args.results.exists() else {}
        for comparison, seed in itertools.product(COMPARISONS, range(args.seeds)):
            if args.only not in comparison.name:
                continue
            for spec in comparison.specs:
                key = f"{comparison.name}|{spec}|{seed}"
                if key not in found:
                    result = train(spec, comparison.task(seed))
                    found[key] = {"quality": result.quality, "sent": result.sent, "factor": result.factors[-1]}
                    print(key, found[key], flush=True)
                    args.results.write_text(json.dumps(found))
                    write_table(found)
    hard = range(5 * EPOCH, 7 * EPOCH)
    draw(train(GRAVAC, digits(0, 10), hard), hard)


def write_table(found: dict[str, dict[str, float]]) -> None:
    """Put the table between the marks of the document."""
    lines = [
        f"{WORKERS} workers. Accuracy on the 450 test images of the digits ({EPOCH} steps an epoch), of which one is",
        "0.22 points; perplexity of a character on held-out text, where less is better. `sent` is relative to float32",
        "gradients of the tensors that are compressed; the last column is the factor at the end, for each seed.",
        "",
        "| training | method | seeds | mean | worst | against none | sent | factor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for comparison in COMPARISONS:
        rows = {
            spec: {key: each for key, each in found.items() if key.startswith(f"{comparison.name}|{spec}|")}
            for spec in comparison.specs
        }
        for spec, of_seeds in rows.items():
            results = list(of_seeds.values())
            # The same seeds without compression.
            without = [found.get(key.replace(f"|{spec}|", "|none|")) for key in of_seeds]
            if not results or None in without:
                continue
            dense, mean = (statistics.mean(each["quality"] for each in which) for which in (without, results))
            # Perplexities are above 1, accuracies below.
            worst = (max if dense > 1 else min)(each["quality"] for each in results)
            factors = ", ".join(f"{each['factor']:.0f}" for each in results) if "(topk >>" in spec else ""
            cells = [comparison.show(mean), comparison.show(worst), comparison.differ(mean - dense)]
            sent = statistics.mean(each["sent"] for each in results)
            cells += [f"{sent:.2%}", factors]
            lines.append(f"| {comparison.name} | `{spec}` | {len(results)} | {' | '.join(cells)} |")
    replace_part(DOCUMENT, "measured", "\n" + "\n".join(lines) + "\n")


def draw(result: Training, hard: range) -> None:
    """Factor, gain and loss, one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(8, 7), constrained_layout=True)
    figure.suptitle("GraVAC on the digits, 4 workers; grey: noise added to the gradients")
    for axis, values, label in zip(
        axes, (result.factors, result.gains, result.losses), ("factor (1: dense)", "smoothed gain", "loss"), strict=True
    ):
        axis.axvspan(hard.start, hard.stop, color="0.88")
        axis.plot(values, drawstyle="steps-post" if label.startswith("factor") else "default")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[1].axhline(compression_from_spec(GRAVAC).adapts.epsilon, color="tab:red", linestyle="--", label="epsilon")
    axes[1].set_ylim(0, 1)
    axes[1].legend()
    axes[2].set_xlabel("step")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
