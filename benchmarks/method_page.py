"""docs/methods-measured.md from what benchmarks/methods.py has measured. What is written between marks is the command's
own; the notes around it are written by hand and stay.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

BEGIN = "<!-- from here to the end mark: written by benchmarks/methods.py -->"
END = "<!-- end of what is written by benchmarks/methods.py -->"

#: Results of a method on gradients: name of the training -> what was measured.
OnGradients = dict[str, dict[str, float]]
#: spec|seed|epochs -> accuracy and bytes.
InTraining = dict[str, dict[str, float]]


def write(page: Path, gradients: dict[str, OnGradients], training: InTraining, notes: dict[str, str]) -> None:
    """Put the two tables between the marks of `page`.

    Args:
        notes: spec -> a remark, for the methods to list, in order.
    """
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    lines = [BEGIN, "", *gradient_table(gradients, notes), "", *training_table(training, notes), "", END]
    page.write_text(before + "\n".join(lines) + after)


def gradient_table(found: dict[str, OnGradients], specs: Sequence[str] | dict[str, str]) -> list[str]:
    """Bits, error, cosine and time of each method."""
    lines = [
        "## On real gradients",
        "",
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
        "## In training",
        "",
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
