"""All methods side by side: on real gradients, and in training. Writes the tables of docs/methods-measured.md.

    python benchmarks/methods.py                       # everything, about an hour of one core
    python benchmarks/methods.py --only gradients      # the first table (a few minutes)
    python benchmarks/methods.py --only training --methods topk,powersgd --seeds 1

What was measured is kept (`--results`) and not measured again, so that a run may be stopped, or made in pieces;
`--again` measures the chosen methods anew. The first table is that of method_gradients.py. The second trains the digits
of examples/train.py with four workers (threads of this process, one engine each) at the example's defaults. Methods and
the memory that is recommended for each are in METHODS.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from in_process import Workers

from hvd_gradcomp.compressors import Compressor, compression_from_spec
from hvd_gradcomp.engine import Engine, Parameter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import method_page  # noqa: E402
from method_gradients import Gradients, capture_characters, capture_digits, measure  # noqa: E402
from train import load_data, make_model, warm_up_and_decay  # noqa: E402

DOCUMENT = ROOT / "docs" / "methods-measured.md"
WORKERS = 4
# Those of examples/train.py.
BATCH = 16
LEARNING_RATE = 0.02


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
    Method("bf16"),
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
    Method("sign(memory=momentum)", lr=0.01, note="Signum: learning rate × 0.01"),
    Method("topk(ratio=0.01)"),
    Method("topk(ratio=0.01) >> int8"),
    Method("topk(ratio=0.01) >> linear(bits=4)", trains=False),
    Method("topk(ratio=0.001) >> int8"),
    Method("topk(ratio=0.01, granularity=model) >> int8"),
    Method("topk(ratio=0.01, memory=ef(decay=0.9)) >> int8", trains=False),
    Method("dgc(ratio=0.01, warmup_steps=88) >> fp16"),
    Method("dgc(ratio=0.001, warmup_steps=88) >> fp16"),
    Method("threshold(value=0.01) >> int8"),
    Method("randomk(ratio=0.1)"),
    Method("randomk(ratio=0.01) >> fp16", trains=False),
    Method("randomk(ratio=0.25, unbiased=True, memory=none)", lr=0.25, note="learning rate × 0.25, for its variance"),
    Method("powersgd(rank=4)"),
    Method("powersgd(rank=1)", trains=False),
    Method("sketch(ratio=0.01)"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("gradients", "training"), help="one of the two tables")
    parser.add_argument("--methods", help="names of methods, separated by commas: those whose spec begins so")
    parser.add_argument("--seeds", type=int, default=3, help="of each training (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=25, help="of each training (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure again what was measured already")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "methods.json", help="what was measured so far"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [each for each in METHODS if args.methods is None or each.spec.startswith(tuple(args.methods.split(",")))]
    if not chosen:
        parser.error(f"no method begins with one of {args.methods!r}: {', '.join(each.spec for each in METHODS)}")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(args.results.read_text()) if args.results.exists() else {"gradients": {}, "training": {}}

    def keep(table: str, key: str, result: dict) -> None:
        found[table][key] = result
        print(key, result, flush=True)
        args.results.write_text(json.dumps(found, indent=1))

    missing = [each for each in chosen if args.again or each.spec not in found["gradients"]]
    if args.only != "training" and missing:
        captured = {"digits": capture_digits(), "characters": capture_characters()}
        for method in missing:
            measured = {name: measure(method.compressor, each) for name, each in captured.items()}
            keep("gradients", method.spec, measured)
    if args.only != "gradients":
        for seed in range(args.seeds):
            for method in (each for each in chosen if each.trains):
                key = f"{method.spec}|{seed}|{args.epochs}"
                if args.again or key not in found["training"]:
                    keep("training", key, train(method, seed, args.epochs))
    notes = {method.spec: method.note for method in METHODS}
    method_page.write(DOCUMENT, found["gradients"], found["training"], notes)


def train(method: Method, seed: int, epochs: int) -> dict[str, float]:
    """The digits with four workers: what examples/train.py does, with the workers' exchange in this process.

    All workers hold the same weights after each step, so one model serves all: it makes each worker's gradient of its
    own batch, and takes the first worker's result, which is the same at all of them.
    """
    (images, labels), (test_images, test_labels) = (part.tensors for part in load_data())
    compressor = method.compressor
    torch.manual_seed(seed)
    model = make_model()
    momentum = 0.0 if compressor.memory.is_momentum else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * WORKERS * method.lr, momentum=momentum)
    # Each worker has equally many samples, some of them twice.
    share = -(-len(images) // WORKERS)
    steps = -(-share // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay(epochs * steps))
    named = dict(model.named_parameters())
    taken = {name: p for name, p in named.items() if compressor.takes(p.numel())}
    parameters = [Parameter(name, p.numel(), "float32", tuple(p.shape)) for name, p in taken.items()]
    workers = Workers(WORKERS)
    engines = [Engine(compressor, parameters, transport) for transport in workers.transports]
    for _ in range(epochs):
        order = torch.randperm(len(images))
        shares = torch.cat([order, order[: share * WORKERS - len(order)]]).view(share, WORKERS).T
        for step in range(steps):
            gradients = []
            for mine in shares[:, step * BATCH : (step + 1) * BATCH]:
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


if __name__ == "__main__":
    main()
