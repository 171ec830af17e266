"""All methods side by side: on real gradients, and in training. Writes docs/methods-measured.md.

    python benchmarks/methods.py                    # everything (about an hour on two cores)
    python benchmarks/methods.py --only gradients   # the first table (a few minutes)
    python benchmarks/methods.py --only training --methods topk,powersgd --seeds 1

The first table applies each method to gradients that a training made: of the network of examples/train.py on
handwritten digits, and of a small transformer that predicts the next character of the text of Python's own standard
library. The second trains the digits with four workers (threads of this process, one engine each) over three seeds.
Methods and the memory that is recommended for each are in METHODS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from characters import Characters, standard_library_text
from in_process import Workers
from torch import nn

from hvd_gradcomp.compressors import Compressor, compression_from_spec
from hvd_gradcomp.engine import Engine, Parameter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
DOCUMENT = ROOT / "docs" / "methods-measured.md"
WORKERS = 4


@dataclass(frozen=True)
class Method:
    """A spec with the memory that is recommended for it, by what it multiplies the learning rate, and a remark.

    Not each variant is trained (`trains`), to keep the whole within an hour.
    """

    spec: str
    lr: float = 1.0
    note: str = ""
    trains: bool = True

    @property
    def compressor(self) -> Compressor:
        return compression_from_spec(self.spec)


METHODS = [
    Method("none"),
    Method("fp16"),
    Method("bf16", trains=False),
    Method("int8"),
    Method("linear(bits=4)"),
    Method("linear(bits=2)", trains=False),
    Method("dynamic8"),
    Method("natural"),
    Method("qsgd(levels=16)"),
    Method("qsgd(levels=4)", trains=False),
    Method("terngrad"),
    Method("terngrad_shared"),
    Method("scaled_sign"),
    Method("onebit"),
    Method("sign(memory=momentum)", lr=0.01, note="Signum: learning rate of its own"),
    Method("topk(ratio=0.01)"),
    Method("topk(ratio=0.01) >> int8"),
    Method("topk(ratio=0.01) >> linear(bits=4)", trains=False),
    Method("topk(ratio=0.001) >> int8"),
    Method("topk(ratio=0.01, granularity=model) >> int8"),
    Method("topk(ratio=0.01, memory=ef(decay=0.9)) >> int8", trains=False),
    Method("dgc(ratio=0.01, warmup_steps=42) >> fp16"),
    Method("dgc(ratio=0.001, warmup_steps=42) >> fp16"),
    Method("threshold(value=0.01) >> int8"),
    Method("randomk(ratio=0.1)"),
    Method("randomk(ratio=0.01) >> fp16", trains=False),
    Method("randomk(ratio=0.25, unbiased=True, memory=none)"),
    Method("powersgd(rank=4)"),
    Method("powersgd(rank=1)", trains=False),
    Method("sketch(ratio=0.01)"),
]

Gradients = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("gradients", "training"), help="one of the two tables")
    parser.add_argument("--methods", help="names of methods, separated by commas: those whose spec begins so")
    parser.add_argument("--seeds", type=int, default=3, help="of each training (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="of each training (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "methods.json", help="what was measured so far"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [each for each in METHODS if args.methods is None or each.spec.startswith(tuple(args.methods.split(",")))]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(args.results.read_text()) if args.results.exists() else {"gradients": {}, "training": {}}
    if args.only != "training":
        captured = {"digits": capture_digits(), "characters": capture_characters()}
        for method in chosen:
            found["gradients"][method.spec] = {name: measure(method, each) for name, each in captured.items()}
            print(method.spec, found["gradients"][method.spec], flush=True)
            args.results.write_text(json.dumps(found))
    if args.only != "gradients":
        for seed in range(args.seeds):
            for method in (each for each in chosen if each.trains):
                key = f"{method.spec}|{seed}|{args.epochs}"
                if key not in found["training"]:
                    found["training"][key] = train(method, seed, args.epochs)
                    print(key, found["training"][key], flush=True)
                    args.results.write_text(json.dumps(found))
    DOCUMENT.write_text(document(found))


# -- gradients of real trainings --------------------------------------------------------------------------------------


def capture_digits() -> list[Gradients]:
    """Gradients of three steps in a row, of one worker's batches, after two epochs on the digits."""
    from train import load_data, make_model

    torch.manual_seed(0)
    model, (images, labels) = make_model(), load_data()[0].tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(chosen: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images[chosen]), labels[chosen])

    return captured(model, optimizer, loss, len(images))


def capture_characters() -> list[Gradients]:
    """The same of a transformer of 0.8 million parameters on the text of the standard library."""
    codes = standard_library_text(400_000)
    torch.manual_seed(0)
    model = Characters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(chosen: torch.Tensor) -> torch.Tensor:
        pieces = torch.stack([codes[place : place + 65] for place in chosen.tolist()])
        return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())

    return captured(model, optimizer, loss, len(codes) - 65)


def captured(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[torch.Tensor], torch.Tensor], samples: int
) -> list[Gradients]:
    """Train for 100 steps, then keep the gradients of three more."""
    chance = torch.Generator().manual_seed(1)
    kept = []
    for step in range(103):
        optimizer.zero_grad()
        loss(torch.randint(samples, (16,), generator=chance)).backward()
        if step >= 100:
            kept.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return kept


def measure(method: Method, captured: list[Gradients]) -> dict[str, float]:
    """One worker alone: what it sends of each gradient, without memory, and how long that takes there and back.

    Gradients in a row, so that what a method keeps (the factors of PowerSGD) is warm. The last one is measured; the
    time is the processor's, and the shortest of all: other programs may disturb some.
    """
    # Past any warm-up.
    compressor = method.compressor.at(10**6).without_memory()
    parameters = [
        Parameter(name, g.numel(), "float32", tuple(g.shape))
        for name, g in captured[0].items()
        if compressor.takes(g.numel()) or compressor.meets == "dense"
    ]
    workers = Workers(1)
    engine = Engine(compressor, parameters, workers.transports[0])
    seconds = []
    for gradients in 2 * captured:
        engine.counters.reset()
        copies = {parameter.name: gradients[parameter.name].clone().reshape(-1) for parameter in parameters}
        began = time.process_time()
        for name, gradient in copies.items():
            engine.submit(name, gradient)
        results = engine.finish()
        seconds.append(time.process_time() - began)
        total = engine.counters.total
    x = torch.cat([captured[-1][each.name].reshape(-1) for each in parameters]).double()
    sent = torch.cat([results[each.name] for each in parameters]).double()
    return {
        "bits": 8 * total.sent_bytes / len(x),
        "error": float((x - sent).norm() / x.norm()),
        "cosine": float(F.cosine_similarity(x, sent, dim=0)),
        "ms": 1000 * min(seconds),
        "values": len(x),
    }


# -- training ---------------------------------------------------------------------------------------------------------


def train(method: Method, seed: int, epochs: int) -> dict[str, float]:
    """The digits with four workers: what examples/train.py does, with the workers' exchange in this process.

    All workers hold the same weights after each step, so one model serves all: it makes each worker's gradient of its
    own batch, and takes the first worker's result, which is the same at all of them.
    """
    from train import load_data, make_model, warm_up_and_decay

    train_set, (test_images, test_labels) = load_data()[0], load_data()[1].tensors
    images, labels = train_set.tensors
    compressor = method.compressor
    torch.manual_seed(seed)
    model = make_model()
    momentum = 0.0 if compressor.memory.is_momentum else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03 * WORKERS * method.lr, momentum=momentum)
    batch = 16 * WORKERS
    steps = len(images) // batch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay(epochs, steps))
    named = dict(model.named_parameters())
    taken = {name: p for name, p in named.items() if compressor.takes(p.numel())}
    parameters = [Parameter(name, p.numel(), "float32", tuple(p.shape)) for name, p in taken.items()]
    workers = Workers(WORKERS)
    engines = [Engine(compressor, parameters, transport) for transport in workers.transports]
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for step in range(steps):
            chosen = order[step * batch : (step + 1) * batch].view(WORKERS, -1)
            gradients = []
            for mine in chosen:
                optimizer.zero_grad()
                F.cross_entropy(model(images[mine]), labels[mine]).backward()
                gradients.append({name: p.grad.clone() for name, p in named.items()})
            results = workers.run(lambda rank: exchange(engines[rank], gradients[rank])) if parameters else [{}]  # noqa: B023
            for name, p in named.items():
                whole = torch.stack([each[name] for each in gradients]).mean(0)
                p.grad = results[0][name].view_as(p) if name in results[0] else whole
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean()
    total = engines[0].counters.total
    return {"accuracy": float(accuracy), "sent": total.sent_bytes / total.dense_bytes if parameters else 1.0}


def exchange(engine: Engine, gradients: Gradients) -> Gradients:
    """One step of one worker."""
    for parameter in engine.parameters:
        engine.submit(parameter.name, gradients[parameter.name].reshape(-1))
    return engine.finish()


# -- the document -----------------------------------------------------------------------------------------------------


def document(found: dict[str, dict[str, dict]]) -> str:
    """docs/methods-measured.md from what was measured."""
    lines = [
        "# The methods, measured",
        "",
        "Made by `python benchmarks/methods.py`; what each method does is in its docstring. Times are processor time",
        "of one core, with native kernels where there are any, comparable within this table only.",
        "",
        "## On real gradients",
        "",
        "One worker's gradient, without memory: bits sent for each value, all headers included; relative error",
        "‖x − sent‖ / ‖x‖; cosine of the two; milliseconds to compress and decompress. `digits` is the network of",
        "examples/train.py after 100 steps, `characters` a transformer on the text of Python's standard library.",
        "Tensors below 1,024 elements are left out, as they travel uncompressed. A large error does not mean that",
        "training suffers: memory sends later what is missing.",
        "",
        "| method | bits | error | cosine | ms | bits | error | cosine | ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for spec, both in found["gradients"].items():
        cells = [
            f"{each['bits']:.3g} | {each['error']:.3f} | {each['cosine']:.3f} | {each['ms']:.1f}"
            for each in both.values()
        ]
        lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    first = next(iter(found["gradients"].values()), {})
    sizes = [f"{each['values']:,} values" for each in first.values()]
    lines += [
        "",
        f"The four columns on the left are of the digits, on the right of the characters ({' and '.join(sizes)}).",
        "",
        "## In training",
        "",
        *training_table(found["training"]),
    ]
    return "\n".join(lines) + "\n"


def training_table(found: dict[str, dict[str, float]]) -> list[str]:
    """The accuracies of each method beside those without compression."""
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    for key, result in found.items():
        spec, _, epochs = key.rsplit("|", 2)
        rows.setdefault((int(epochs), spec), []).append(result)
    lines = [
        f"The digits of examples/train.py, {WORKERS} workers, batches of 16 each, learning rate and schedule as there,",
        "with the memory in the spec (the method's default where none is named). Momentum 0.9 is the optimizer's, or",
        "the memory's where that carries it. Accuracy on the 450 test images, of which one is 0.22 points; `sent` is",
        "relative to float32 gradients of the tensors that are compressed.",
        "",
        "| epochs | method | seeds | accuracy, mean | lowest | against none | sent | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    notes = {method.spec: method.note for method in METHODS}
    for (epochs, spec), results in sorted(rows.items(), key=lambda row: row[0][0]):
        accuracies = [100 * each["accuracy"] for each in results]
        mean = statistics.mean(accuracies)
        dense = statistics.mean(100 * each["accuracy"] for each in rows.get((epochs, "none"), results))
        lines.append(
            f"| {epochs} | `{spec}` | {len(results)} | {mean:.2f} | {min(accuracies):.2f} | {mean - dense:+.2f} | "
            f"{results[0]['sent']:.2%} | {notes.get(spec, '')} |"
        )
    return lines


if __name__ == "__main__":
    main()
