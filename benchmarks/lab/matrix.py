"""The benchmark matrix in the lab: methods x rates x numbers of hosts, as a table, JSON and plots.

    sudo .venv/bin/python benchmarks/lab/matrix.py --rates 100mbit 1gbit --hosts 2 4 --out build/lab
    sudo .venv/bin/python benchmarks/lab/matrix.py --rates 1gbit --hosts 4 --per-host 2 --collectives allgather auto

All methods of a cell are timed in one run, so ratios within a cell are comparable; figures of different runs on a
shared machine are less so.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hosts import Hosts, LabError

HERE = Path(__file__).parent
# For collective=hierarchical, which makes process sets.
ENVIRONMENT = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time exchanges of gradients in the lab.")
    parser.add_argument("--model", default="resnet50", help="resnet50, vgg16, bert-base or gpt2 (default: %(default)s)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="of the links (default: %(default)s)")
    parser.add_argument("--hosts", nargs="+", type=int, default=[4], help="numbers of hosts (default: %(default)s)")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", default=["dense", "fp16", "textbook-topk", "dgc", "topk-int8"])
    parser.add_argument(
        "--collectives",
        nargs="+",
        metavar="NAME",
        help="instead of --methods: dense, and topk >> int8 by each of these ways at each of --ratios",
    )
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.01], help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="that are counted (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a cell (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/lab"), help="folder (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    methods = arguments.methods
    if arguments.collectives:
        methods = ["dense"] + [way(ratio, each) for ratio in arguments.ratios for each in arguments.collectives]

    cells = []
    for count in arguments.hosts:
        for rate in arguments.rates:
            print(f"lab: {count} hosts of {arguments.per_host}, {rate}", flush=True)
            path = (arguments.out / f"{arguments.model}-{count}x{arguments.per_host}-{rate}.json").resolve()
            command = [sys.executable, str(HERE / "exchange.py"), "--model", arguments.model, "--out", str(path)]
            command += ["--steps", str(arguments.steps), "--methods", *methods]
            try:
                with Hosts(count, rate) as hosts:
                    status = hosts.run(command, arguments.per_host, arguments.limit, ENVIRONMENT)
            except LabError as error:
                sys.exit(f"lab: {error}")
            if status:
                sys.exit(f"lab: {count} hosts at {rate} ended with status {status}")
            cells.append({"hosts": count, "per_host": arguments.per_host, "rate": rate, **json.loads(path.read_text())})
    (arguments.out / "matrix.json").write_text(json.dumps(cells, indent=2) + "\n")
    text = table(cells)
    (arguments.out / "matrix.md").write_text(text)
    print(text)
    plot(cells, arguments.out)


def way(ratio: float, collective: str) -> str:
    """The spec of top-k with int8 values by that collective."""
    return f"topk(ratio={ratio:g}, collective={collective}) >> int8"


def table(cells: list[dict]) -> str:
    """Seconds of an exchange (median), and in parentheses how many times faster than dense."""
    methods = [each["method"] for each in cells[0]["methods"]]
    lines = ["| hosts, rate | " + " | ".join(methods) + " |", "| --- |" + " --- |" * len(methods)]
    for cell in cells:
        seconds = {each["method"]: each["median_seconds"] for each in cell["methods"]}
        base = seconds.get("dense")
        texts = [f"{seconds[each]:.3f}" + (f" ({base / seconds[each]:.1f}×)" if base else "") for each in methods]
        where = f"{cell['hosts']} × {cell['per_host']}" if cell["per_host"] > 1 else cell["hosts"]
        lines.append(f"| {where} × {cell['rate']} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def plot(cells: list[dict], folder: Path) -> None:
    """Step time against bandwidth for each number of hosts, and against the number of hosts for each rate."""
    try:
        import matplotlib
    except ImportError:
        print("lab: no plots, because matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    for fixed, varied, label in (("hosts", "rate", "link, Mbit/s"), ("rate", "hosts", "hosts")):
        for chosen in sorted({cell[fixed] for cell in cells}, key=str):
            picked = sorted((cell for cell in cells if cell[fixed] == chosen), key=lambda cell: number(cell[varied]))
            if len(picked) < 2:
                continue
            figure, axes = plt.subplots(figsize=(6, 4))
            for index, method in enumerate(each["method"] for each in picked[0]["methods"]):
                x = [number(cell[varied]) for cell in picked]
                y = [cell["methods"][index]["median_seconds"] for cell in picked]
                axes.plot(x, y, marker="o", label=method)
            axes.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds an exchange", title=f"{fixed} {chosen}")
            axes.set_xticks([number(cell[varied]) for cell in picked], [str(cell[varied]) for cell in picked])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.3, which="both")
            axes.legend()
            figure.tight_layout()
            figure.savefig(folder / f"seconds-by-{varied}-{fixed}-{chosen}.png", dpi=120)
            plt.close(figure)


def number(value: int | str) -> float:
    """A rate as tc spells it, in Mbit/s, or a plain number."""
    if isinstance(value, int):
        return value
    for suffix, factor in (("kbit", 1e-3), ("mbit", 1.0), ("gbit", 1e3), ("bit", 1e-6)):
        if value.endswith(suffix):
            return float(value.removesuffix(suffix)) * factor
    raise ValueError(f"no rate: {value!r}")


if __name__ == "__main__":
    main()
