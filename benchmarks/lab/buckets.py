"""The size of buckets: steps of a model with a backward pass to hide behind, and without, for each size, in the lab.

    sudo .venv/bin/python benchmarks/lab/buckets.py --write docs/targets.md

The backward pass is imitated: gradients become ready one after another while the processor is free (methods.py). What
is compared is the time from the first gradient to the last result.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from documents import replace_part  # noqa: E402
from hosts import Hosts, LabError  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="(default: %(default)s)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="of the links (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--backward-ms", nargs="+", type=float, default=[0, 200], help="(default: %(default)s)")
    parser.add_argument("--mib", nargs="+", type=float, default=[1, 4, 16, 64], help="sizes (default: %(default)s)")
    parser.add_argument("--method", default="topk-int8", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=9, help="that are counted (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/buckets"), help="folder (default: %(default)s)")
    parser.add_argument("--write", type=Path, help="document whose part between the marks 'buckets' is replaced")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sizes = [f"{mib:g} MiB" for mib in arguments.mib]
    lines = ["| link | backward | " + " | ".join(sizes) + " |", "| --- | ---: |" + " ---: |" * len(sizes)]
    try:
        for rate in arguments.rates:
            with Hosts(arguments.hosts, rate) as hosts:
                for backward in arguments.backward_ms:
                    cells = [f"{1000 * seconds(arguments, hosts, backward, mib):.0f} ms" for mib in arguments.mib]
                    lines.append(f"| {rate} | {backward:g} ms | " + " | ".join(cells) + " |")
                    print(lines[-1], flush=True)
    except LabError as error:
        sys.exit(f"lab: {error}")
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        replace_part(arguments.write, "buckets", text)


def seconds(arguments: argparse.Namespace, hosts: Hosts, backward: float, mib: float) -> float:
    """The median step with buckets of that size."""
    path = (arguments.out / "step.json").resolve()
    command = [sys.executable, str(HERE / "exchange.py"), "--model", arguments.model, "--out", str(path)]
    command += ["--methods", arguments.method, "--steps", str(arguments.steps), "--backward-ms", str(backward)]
    status = hosts.run(command, environment={"HVD_GRADCOMP_BUCKET_BYTES": str(int(mib * 2**20))})
    if status:
        raise LabError(f"{' '.join(command)} ended with status {status}")
    found: float = json.loads(path.read_text())["methods"][0]["median_seconds"]
    return found


if __name__ == "__main__":
    main()
