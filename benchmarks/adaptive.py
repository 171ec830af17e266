"""Ratios that adapt, beside ratios that stay: accuracy and bytes on the digits, and how a factor is found.

    python benchmarks/adaptive.py                # everything (about 40 minutes of one core)
    python benchmarks/adaptive.py --plot-only    # one training with a hard phase, and its picture

Writes the tables of docs/adaptive.md (between its marks) and docs/adaptive.png: factor, gain and loss over the steps of
a training in whose middle the gradients become hard to compress for a while. Needs matplotlib for the picture. The
digits of examples/train.py, four workers, in one process; see `in_process`. It times nothing, so GraVAC counts bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from in_process import Workers

from hvd_gradcomp.compressors import compression_from_spec
from hvd_gradcomp.engine import Engine, Parameter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
DOCUMENT = ROOT / "docs" / "adaptive.md"
PICTURE = ROOT / "docs" / "adaptive.png"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
WORKERS = 4
BATCH = 16
#: Steps of an epoch: 1347 images in batches of 4 * 16.
EPOCH = 21
GRAVAC = "gravac(topk >> int8, theta_max=1000, epsilon=0.1, window=10, growth=4, throughput=bytes)"
#: Epochs -> what is trained for so long, over three seeds.
TRAININGS = {
    10: [
        "none",
        GRAVAC,
        "topk(ratio=0.1) >> int8",
        "topk(ratio=0.01) >> int8",
        "topk(ratio=0.001) >> int8",
        f"accordion(topk >> int8, low=0.1, high=0.01, window={EPOCH})",
    ],
    # A long training pays less for its search.
    25: [
        "none",
        "gravac(topk >> int8, theta_min=40, theta_max=160, epsilon=0.08, window=10, growth=4, throughput=bytes)",
        "topk(ratio=0.01) >> int8",
        "topk(ratio=0.001) >> int8",
    ],
}


@dataclass
class Training:
    """What one training gave."""

    accuracy: float = 0.0
    sent: float = 1.0
    losses: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot-only", action="store_true", help="no table")
    parser.add_argument("--seeds", type=int, default=3, help="of each training (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "adaptive.json", help="what was measured so far"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if not args.plot_only:
        found = json.loads(args.results.read_text()) if args.results.exists() else {}
        for epochs, seed in itertools.product(TRAININGS, range(args.seeds)):
            for spec in TRAININGS[epochs]:
                key = f"{spec}|{seed}|{epochs}"
                if key not in found:
                    result = train(spec, seed, epochs)
                    found[key] = {"accuracy": result.accuracy, "sent": result.sent, "factor": result.factors[-1]}
                    print(key, found[key], flush=True)
                    args.results.write_text(json.dumps(found))
                    write_table(found)
    hard = range(5 * EPOCH, 7 * EPOCH)
    draw(train(GRAVAC, 0, 10, hard), hard)


def train(spec: str, seed: int, epochs: int, hard: range = range(0)) -> Training:
    """The digits with four workers, which hold the same weights, so that one model serves all.

    Args:
        spec: of the compression.
        hard: steps in which noise of three times the gradient's own size is added to each worker's gradient, so that no
            few values carry most of it.
    """
    from train import load_data, make_model, warm_up_and_decay

    train_set, (test_images, test_labels) = load_data()[0], load_data()[1].tensors
    images, labels = train_set.tensors
    compressor = compression_from_spec(spec)
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * WORKERS, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay(epochs * EPOCH))
    named = dict(model.named_parameters())
    parameters = [
        Parameter(name, p.numel(), "float32", tuple(p.shape))
        for name, p in named.items()
        if compressor.of(name, tuple(p.shape)).takes(p.numel())
    ]
    workers = Workers(WORKERS)
    engines = [Engine(compressor, parameters, transport) for transport in workers.transports]
    result = Training()
    for step in range(epochs * EPOCH):
        if step % EPOCH == 0:
            order = torch.randperm(len(images))
        start = step % EPOCH * BATCH * WORKERS
        gradients, losses = [], []
        for mine in order[start : start + BATCH * WORKERS].view(WORKERS, -1):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: p.grad.clone() for name, p in named.items()})
            if step in hard:
                for g in gradients[-1].values():
                    g += torch.randn_like(g) * (3 * g.norm() / math.sqrt(g.numel()))
        results = workers.run(lambda rank: exchange(engines[rank], gradients[rank])) if parameters else [{}]  # noqa: B023
        for name, p in named.items():
            whole = torch.stack([each[name] for each in gradients]).mean(0)
            p.grad = results[0][name].view_as(p) if name in results[0] else whole
        optimizer.step()
        schedule.step()
        report = engines[0].adaptation.report(engines[0].step)
        result.losses.append(sum(losses) / WORKERS)
        result.factors.append(1 / report.get("ratio", 1.0))
        result.gains.append(report.get("gain", math.nan))
    model.eval()
    with torch.no_grad():
        result.accuracy = float((model(test_images).argmax(1) == test_labels).double().mean())
    if parameters:
        total = engines[0].counters.total
        result.sent = total.sent_bytes / total.dense_bytes
    return result


def exchange(engine: Engine, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One step of one worker."""
    for parameter in engine.parameters:
        engine.submit(parameter.name, gradients[parameter.name].reshape(-1).clone())
    return engine.finish()


def write_table(found: dict[str, dict[str, float]]) -> None:
    """Put the table between the marks of the document."""
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    for key, result in found.items():
        spec, _, epochs = key.rsplit("|", 2)
        rows.setdefault((int(epochs), spec), []).append(result)
    lines = [
        BEGIN,
        "",
        f"{WORKERS} workers, {EPOCH} steps an epoch. Accuracy on the 450 test images, of which one is 0.22 points;",
        "`sent` is relative to float32 gradients of the tensors that are compressed; the last column is the factor at",
        "the end, for each seed.",
        "",
        "| epochs | method | seeds | accuracy, mean | lowest | against none | sent | factor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (epochs, spec), results in sorted(rows.items(), key=lambda row: row[0][0]):
        dense = statistics.mean(each["accuracy"] for each in rows[epochs, "none"])
        accuracies = [each["accuracy"] for each in results]
        mean = statistics.mean(accuracies)
        factors = ", ".join(f"{each['factor']:.0f}" for each in results) if "(topk >>" in spec else ""
        sent = statistics.mean(each["sent"] for each in results)
        against = f"{100 * (mean - dense):+.2f}"
        lines.append(
            f"| {epochs} | `{spec}` | {len(results)} | {mean:.2%} | {min(accuracies):.2%} | {against} | {sent:.2%} "
            f"| {factors} |"
        )
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text[: text.index(BEGIN)] + "\n".join([*lines, "", END]) + text[text.index(END) + len(END) :])


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
