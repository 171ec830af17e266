"""`hvd-gradcomp plan`: which method to use here, predicted from short measurements on the machines that will train.

    horovodrun -np 4 hvd-gradcomp plan --model resnet50 --step-ms 350
    horovodrun -np 4 hvd-gradcomp plan --model train.py:make_model

What is measured is in `torch/probe.py`, the formulas are in `policy/planner.py`; here are arguments and the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_gradcomp.compressors import compression_from_spec
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.models import MODELS
from hvd_gradcomp.policy.planner import (
    FORWARD_SHARE,
    Compute,
    Machines,
    Prediction,
    advice,
    rank,
)

SUMMARY = "predict which method makes training fastest on these machines"
DESCRIPTION = (
    "Measures the network between the workers and the speed of compressing, and predicts what an exchange and a "
    "training step take with each method. Run it as the training is run: horovodrun -np N hvd-gradcomp plan ..."
)
METHODS = (
    "fp16",
    "int8",
    "topk(ratio=0.1) >> int8",
    "topk(ratio=0.01) >> int8",
    "topk(ratio=0.001) >> int8",
    "powersgd(rank=4)",
)


@dataclass(frozen=True)
class Model:
    """What is to be trained: shapes, and a module with inputs where there is one."""

    shapes: list[tuple[int, ...]]
    module: Any = None
    inputs: tuple[Any, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "--model",
        default="resnet50",
        help=f"{', '.join(MODELS)}, or FILE.py:FUNCTION that returns a torch module, or a module and the tuple of its "
        "inputs for a batch, whose computing time is then measured (default: %(default)s)",
    )
    parser.add_argument(
        "--step-ms",
        type=_milliseconds,
        help="a training step on one worker, without exchange; counts over a measured one",
    )
    parser.add_argument(
        "--methods", nargs="+", metavar="SPEC", default=METHODS, help="besides dense (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to this file, on rank 0, instead of printing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure on all workers, and print on rank 0."""
    try:
        methods = {spec: compression_from_spec(spec) for spec in arguments.methods}
        model = load_model(arguments.model)
    except ConfigurationError as error:
        print(f"hvd-gradcomp plan: {error}", file=sys.stderr)
        return 2
    # To measure within nodes; has to be set before Horovod starts.
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    try:
        from hvd_gradcomp.torch import probe
    except ImportError as error:
        print(f"hvd-gradcomp plan: it measures with PyTorch and horovod.torch, which failed: {error}", file=sys.stderr)
        return 2
    with probe.workers() as first:
        machines = probe.machines()
        found = [probe.dense(model.shapes)]
        for spec, compressor in methods.items():
            where = machines.topology
            found += [probe.method(spec, compressor, model.shapes, where, way) for way in probe.ways(compressor, where)]
        compute = None
        if arguments.step_ms:
            seconds = arguments.step_ms / 1e3
            compute = Compute(FORWARD_SHARE * seconds, (1 - FORWARD_SHARE) * seconds)
        elif model.inputs:
            compute = probe.compute(model.module, model.inputs)
        ranking = rank(found, machines, compute)
        if first:
            show = as_json if arguments.json else as_text
            text = show(arguments.model, machines, compute, ranking)
            if arguments.out:
                arguments.out.write_text(text + "\n")
            else:
                print(text, flush=True)
    return 0


def load_model(text: str) -> Model:
    """The model called `text`, or made by the function that it names.

    Raises:
        ConfigurationError: there is none.
    """
    if text in MODELS:
        return Model(MODELS[text]())
    file, _, function = text.rpartition(":")
    if not file:
        raise ConfigurationError(f"no model is called {text!r}: expected {', '.join(MODELS)}, or FILE.py:FUNCTION")
    path = Path(file)
    if not path.is_file():
        raise ConfigurationError(f"there is no file {file!r}, which --model {text!r} names")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{file!r} is no Python file")
    source = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(source)
    make = getattr(source, function, None)
    if not callable(make):
        raise ConfigurationError(f"{file!r} has no function {function!r}")
    made = make()
    module, inputs = made if isinstance(made, tuple) else (made, ())
    if not hasattr(module, "parameters"):
        raise ConfigurationError(
            f"{function}() in {file!r} returned a {type(module).__name__}: expected a torch module, or a module and "
            "the tuple of its inputs"
        )
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return Model([tuple(p.shape) for p in module.parameters() if p.requires_grad], module, inputs)


def as_text(model: str, machines: Machines, compute: Compute | None, ranking: list[Prediction]) -> str:
    """The table, and what it means."""
    where = machines.topology
    lines = [f"{model} on {where.workers} workers, {where.nodes} node{'s' if where.nodes > 1 else ''}"]
    for kind, links in machines.links.items():
        network = links.between
        rate = "too fast to measure" if math.isinf(network.bytes_per_s) else f"{network.bytes_per_s / 1e6:,.1f} MB/s"
        lines.append(f"  {kind:<10} {1e3 * network.latency_s:7.2f} ms and {rate}")
    lines.append(f"  while workers compute, the network goes on at {machines.overlap:.0%} of its speed")
    if compute:
        lines.append(
            f"  computing  {1e3 * compute.forward_s:7.1f} ms forward, {1e3 * compute.backward_s:.1f} ms backward"
        )
    lines += ["", f"{'method':<28}{'collective':<16}{'bytes':>8}{'compress':>10}{'network':>10}{'exchange':>10}"]
    lines[-1] += f"{'step':>10}{'speed-up':>10}" if compute else f"{'speed-up':>10}"
    for each in ranking:
        way = each.method
        line = f"{way.name:<28}{way.collective:<16}{way.ratio:>8.2%}"
        for seconds in (way.compress_s + way.decompress_s, each.wire_s, each.exchange_s):
            line += f"{1e3 * seconds:>7.1f} ms"
        line += f"{1e3 * each.step_s:>7.1f} ms" if each.step_s is not None else ""
        lines.append(line + f"{each.speed_up:>9.2f}×")
    return "\n".join([*lines, "", advice(ranking, compute)])


def as_json(model: str, machines: Machines, compute: Compute | None, ranking: list[Prediction]) -> str:
    """The same for programs; times in seconds, rates in bytes a second (null where too fast to measure)."""
    networks = {
        kind: {
            "latency_s": links.between.latency_s,
            "bytes_per_s": links.between.bytes_per_s if math.isfinite(links.between.bytes_per_s) else None,
        }
        for kind, links in machines.links.items()
    }
    methods = [
        {
            "method": each.method.name,
            "collective": each.method.collective,
            "ratio": each.method.ratio,
            "compress_s": each.method.compress_s,
            "decompress_s": each.method.decompress_s,
            "network_s": each.wire_s,
            "exchange_s": each.exchange_s,
            "step_s": each.step_s,
            "speed_up": each.speed_up,
        }
        for each in ranking
    ]
    report = {
        "model": model,
        "workers": machines.topology.workers,
        "local_sizes": machines.topology.local_sizes,
        "networks": networks,
        "overlap": machines.overlap,
        "forward_s": compute.forward_s if compute else None,
        "backward_s": compute.backward_s if compute else None,
        "methods": methods,
        "advice": advice(ranking, compute),
    }
    return json.dumps(report, indent=2)


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of milliseconds above 0, got {text!r}")
    return value
