"""The two tables of docs/methods-measured.md from what benchmarks/methods.py has measured, each between its marks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from documents import replace_part

#: Results of a method on gradients: name of the training -> what was measured.
OnGradients = dict[str, dict[str, float]]
#: spec|seed|epochs -> accuracy and bytes.
InTraining = dict[str, dict[str, float]]


def write(page: Path, gradients: dict[str, OnGradients], training: InTraining, notes: dict[str, str]) -> None:
    """Put the two tables into `page`, where there is something to put; what stands around their marks stays.

    Args:
        notes: spec -> a remark, for the methods to list, in order.
    """
    if gradients:
        replace_part(page, "gradients", "\n".join(gradient_table(gradients, notes)))
    if training:
        replace_part(page, "training", "\n".join(training_table(training, notes)))


def gradient_table(found: dict[str, OnGradients], specs: Sequence[str] | dict[str, str]) -> list[str]:
    """Bits, error, cosine and time of each method."""
    lines = [
        "| method | bits | error | cosine | ms | bits | error | cosine | ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for spec in (each for each in specs if each in found):
        cells = [
            f"{each['bits']:.3g} | {each['error']:.3f} | {each['cosine']:.3f} | {each['ms']:.1f}"
            for each in found[spec].values()
        ]
        lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    sizes = {name: f"{each['values']:,.0f} values" for both in found.values() for name, each in both.items()}
    left_and_right = " and ".join(f"{name} ({size})" for name, size in sizes.items())
    return [*lines, "", f"The four columns on the left and on the right: {left_and_right}."]


def training_table(found: InTraining, notes: dict[str, str]) -> list[str]:
    """The accuracies of each method beside those without compression, of the same seeds."""
    lines = [
        "| epochs | method | seeds | accuracy, mean | lowest | against none | sent | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for epochs in sorted({int(key.rsplit("|", 1)[1]) for key in found}):
        dense = _of("none", epochs, found)
        for spec, note in notes.items():
            results = _of(spec, epochs, found)
            if not results:
                continue
            accuracies = [100 * each["accuracy"] for each in results.values()]
            mean = statistics.mean(accuracies)
            same = [100 * dense[seed]["accuracy"] for seed in results if seed in dense]
            against = f"{mean - statistics.mean(same):+.2f}" if len(same) == len(results) else "–"
            sent = next(iter(results.values()))["sent"]
            lines.append(
                f"| {epochs} | `{spec}` | {len(results)} | {mean:.2f} | {min(accuracies):.2f} | {against} | "
                f"{sent:.2%} | {note} |"
            )
    return lines


def _of(spec: str, epochs: int, found: InTraining) -> dict[str, dict[str, float]]:
    """Seed -> result."""
    keys = (key.rsplit("|", 2) for key in found)
    return {seed: found[f"{spec}|{seed}|{epochs}"] for name, seed, each in keys if (name, int(each)) == (spec, epochs)}
