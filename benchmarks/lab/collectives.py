"""A picture of collectives in the lab, from what matrix.py wrote with --collectives: seconds of an exchange, by cell.

    python benchmarks/lab/collectives.py build/a/matrix.json build/b/matrix.json --out docs/collectives.png

Says for each cell, too, by how much `auto` is slower than the best collective that was chosen by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WAYS = ("dense", "allgather", "scatter_reduce", "hierarchical", "auto")
_SPEC = re.compile(r"topk\(ratio=(?P<ratio>[^,]+), collective=(?P<way>\w+)\)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for file in arguments.files:
        for cell in json.loads(file.read_text()):
            where = f"{cell['hosts']} × {cell['per_host']}, {cell['rate']}"
            for each in cell["methods"]:
                spec = _SPEC.match(each["method"])
                if spec:
                    name = f"{where}\n{float(spec['ratio']):.0%}"
                    found.setdefault(name, {"dense": cell["methods"][0]["median_seconds"]})
                    found[name][spec["way"]] = each["median_seconds"]
    for name, seconds in found.items():
        best = min(value for way, value in seconds.items() if way != "auto")
        print(f"{name!r}: auto {seconds['auto']:.3f} s, best {best:.3f} s, {seconds['auto'] / best - 1:+.0%}")
    figure, axes = plt.subplots(figsize=(1.6 * len(found) + 2, 4))
    for place, way in enumerate(WAYS):
        x = [index + 0.12 * (place - 2) for index, seconds in enumerate(found.values()) if way in seconds]
        y = [seconds[way] for seconds in found.values() if way in seconds]
        axes.plot(x, y, linestyle="", marker="*" if way == "auto" else "o", label=way)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(yscale="log", ylabel="seconds an exchange")
    axes.grid(alpha=0.3, which="both", axis="y")
    axes.legend()
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
