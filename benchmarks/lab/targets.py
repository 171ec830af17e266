"""The targets for speed, bytes and memory, measured by one command and put into docs/targets.md:

    sudo .venv/bin/python benchmarks/lab/targets.py --write docs/targets.md

Exchanges of a ResNet-50's gradients between 4 hosts at 1 Gbit and 100 Mbit and on the loopback of one host, the kernels
against a copy, the bytes for each kept value, and the peak memory of a process that does nothing else than exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from documents import replace_part  # noqa: E402
from hosts import Hosts, LabError  # noqa: E402

OURS = "topk-int8"
RIVALS = {"dense": "dense Horovod", "fp16": "fp16", "textbook-topk": "textbook top-k", "dgc": "DGC"}
#: Rate -> rival -> how many times faster than it, at least.
FASTER = {
    "1gbit": {"dense": 16.0, "fp16": 7.0, "textbook-topk": 10.0, "dgc": 3.5},
    "100mbit": {"dense": 80.0, "fp16": 40.0, "textbook-topk": 8.0, "dgc": 3.0},
}
LOOPBACK = 2.0
BYTES = 2.03
MEMORY = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="(default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="that are counted (default: %(default)s)")
    parser.add_argument("--rates", nargs="+", default=list(FASTER), choices=list(FASTER))
    parser.add_argument("--out", type=Path, default=Path("build/targets"), help="folder (default: %(default)s)")
    parser.add_argument("--write", type=Path, help="document whose part between the marks 'targets' is replaced")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        rows = list(measured(arguments))
    except LabError as error:
        sys.exit(f"lab: {error}")
    lines = ["| | target | measured | |", "| --- | ---: | ---: | --- |"]
    lines += [f"| {what} | {target} | {found} | {'met' if met else 'missed'} |" for what, target, found, met in rows]
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        replace_part(arguments.write, "targets", text)


def measured(arguments: argparse.Namespace) -> Iterable[tuple[str, str, str, bool]]:
    """What was measured, its target, what was found, and whether it is met."""
    methods = [*RIVALS, OURS]
    for rate in arguments.rates:
        report = exchange(arguments, rate, methods)
        seconds = {each["method"]: each["median_seconds"] for each in report["methods"]}
        spread = {each["method"]: max(each["seconds"]) / min(each["seconds"]) for each in report["methods"]}
        for rival, least in FASTER[rate].items():
            times = seconds[rival] / seconds[OURS]
            figures = f"{times:.1f}× ({seconds[rival]:.3f} s, ours {seconds[OURS]:.3f} s)"
            yield f"{rate}: faster than {RIVALS[rival]}", f"{least:g}×", figures, times >= least
        print(f"largest step by smallest: {spread}", flush=True)
    seconds = {each["method"]: each["median_seconds"] for each in exchange(arguments, None, ["dense", OURS])["methods"]}
    times = seconds["dense"] / seconds[OURS]
    figures = f"{times:.1f}× ({seconds['dense']:.3f} s, ours {seconds[OURS]:.3f} s)"
    yield "loopback of one host, 4 workers: faster than dense Horovod", f"{LOOPBACK:g}×", figures, times >= LOOPBACK
    yield from kernels(arguments)

    # A process of its own for each: peaks do not come down again.
    dense = exchange(arguments, None, ["dense"])
    ours = exchange(arguments, None, [OURS])
    gradient = 4 * ours["values"]
    more = (ours["methods"][0]["peak_memory_bytes"] - dense["methods"][0]["peak_memory_bytes"]) / gradient
    yield "peak memory over dense Horovod, in gradients", f"{MEMORY:g}", f"{more:.2f}", more <= MEMORY
    sent = ours["methods"][0]
    each = sent["compressed_bytes"] / sent["kept"]
    yield f"bytes for each kept value, {arguments.model} by layers", f"{BYTES:g}", f"{each:.3f}", each <= BYTES


def exchange(arguments: argparse.Namespace, rate: str | None, methods: list[str]) -> dict:
    """One run of exchange.py: in the lab at `rate`, or on this machine's loopback."""
    path = (arguments.out / f"{rate or 'loopback'}-{'-'.join(methods)}.json").resolve()
    command = [sys.executable, str(HERE / "exchange.py"), "--model", arguments.model, "--out", str(path)]
    command += ["--steps", str(arguments.steps), "--methods", *methods]
    print(f"targets: {rate or 'loopback'}, {', '.join(methods)}", flush=True)
    if rate:
        with Hosts(arguments.hosts, rate) as hosts:
            status = hosts.run(command, limit=1800)
    else:
        run = [str(Path(sys.executable).with_name("horovodrun")), "--mpi", "-np", str(arguments.hosts), *command]
        quiet = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMP_NUM_THREADS": "1"}
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, **quiet, **root, "PATH": search}
        status = subprocess.run(run, env=environment, stdin=subprocess.DEVNULL, timeout=1800).returncode
    if status:
        raise LabError(f"{' '.join(command)} ended with status {status}")
    found: dict = json.loads(path.read_text())
    return found


def kernels(arguments: argparse.Namespace) -> Iterable[tuple[str, str, str, bool]]:
    """The native kernels of this machine's best instruction set, in copies of the gradient."""
    from kernels import TARGETS

    path = arguments.out / "kernels.json"
    command = [sys.executable, str(HERE.parent / "kernels.py"), "--only", "native", "--json", str(path)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    found = json.loads(path.read_text())
    for step, most in TARGETS.items():
        best = min((each for each in found if each["step"] == step), key=lambda each: each["ratio"])
        figures = f"{best['ratio']:.2f} ({best['code']})"
        yield f"kernel: {step}, in copies of the gradient", f"{most:g}", figures, best["ratio"] <= most


if __name__ == "__main__":
    main()
