"""Trainings whose compression may adapt: four workers in one process, on digits or on characters.

The workers hold the same weights, so that one model serves all; see `in_process`. What is compared and written is in
`adaptive`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from characters import Characters, standard_library_text
from in_process import Workers

from hvd_gradcomp.compressors import compression_from_spec
from hvd_gradcomp.engine import Engine, Parameter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train import load_data, make_model, warm_up_and_decay

WORKERS = 4
BATCH = 16
#: Steps of an epoch of the digits: 1347 images in batches of 4 * 16.
EPOCH = 21
# Pieces of text in a worker's batch, and characters in each.
_PIECES, _LENGTH = 8, 64


@dataclass
class Training:
    """What one training gave.

    Attributes:
        quality: accuracy on test images, or perplexity on held-out text.
        sent: bytes in units of the float32 gradients of the tensors that are compressed.
    """

    quality: float = 0.0
    sent: float = 1.0
    losses: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)


@dataclass
class Task:
    """What is trained.

    Attributes:
        losses: from the step to the loss of each worker on its batch, to be called one after another.
        test: the quality, at the end.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    losses: Callable[[int], list[Callable[[], torch.Tensor]]]
    test: Callable[[], float]


def digits(seed: int, epochs: int) -> Task:
    """What examples/train.py trains."""
    train_set, (test_images, test_labels) = load_data()[0], load_data()[1].tensors
    images, labels = train_set.tensors
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * WORKERS, momentum=0.9)
    order = torch.zeros(0, dtype=torch.int64)

    def losses(step: int) -> list[Callable[[], torch.Tensor]]:
        nonlocal order
        if step % EPOCH == 0:
            order = torch.randperm(len(images))
        start = step % EPOCH * BATCH * WORKERS
        batches = order[start : start + BATCH * WORKERS].view(WORKERS, -1)
        return [lambda mine=mine: F.cross_entropy(model(images[mine]), labels[mine]) for mine in batches]

    def test() -> float:
        return float((model(test_images).argmax(1) == test_labels).double().mean())

    return Task(model, optimizer, epochs * EPOCH, losses, test)


def characters(seed: int, steps: int) -> Task:
    """The next character of the text of Python's standard library, of which a twentieth is held out; with Adam."""
    codes = standard_library_text(1_000_000)
    seen, held_out = codes[:950_000], codes[950_000:]
    torch.manual_seed(seed)
    model = Characters()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss_of(text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        pieces = torch.stack([text[place : place + _LENGTH + 1] for place in places.tolist()])
        return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())

    def losses(step: int) -> list[Callable[[], torch.Tensor]]:
        places = torch.randint(len(seen) - _LENGTH - 1, (WORKERS, _PIECES))
        return [lambda mine=mine: loss_of(seen, mine) for mine in places]

    def test() -> float:
        count = 256
        places = torch.arange(count) * ((len(held_out) - _LENGTH - 1) // count)
        return math.exp(float(loss_of(held_out, places)))

    return Task(model, optimizer, steps, losses, test)


def train(spec: str, task: Task, hard: range = range(0)) -> Training:
    """Train with four workers.

    Args:
        spec: of the compression.
        hard: steps in which noise of three times the gradient's own size is added to each worker's gradient, so that no
            few values carry most of it.
    """
    compressor = compression_from_spec(spec)
    schedule = torch.optim.lr_scheduler.LambdaLR(task.optimizer, warm_up_and_decay(task.steps))
    named = dict(task.model.named_parameters())
    parameters = [
        Parameter(name, p.numel(), "float32", tuple(p.shape))
        for name, p in named.items()
        if compressor.of(name, tuple(p.shape)).takes(p.numel())
    ]
    workers = Workers(WORKERS)
    engines = [Engine(compressor, parameters, transport) for transport in workers.transports]
    result = Training()
    for step in range(task.steps):
        gradients, losses = [], []
        for loss_of_mine in task.losses(step):
            task.optimizer.zero_grad()
            loss = loss_of_mine()
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
        task.optimizer.step()
        schedule.step()
        report = engines[0].adaptation.report(engines[0].step)
        result.losses.append(sum(losses) / WORKERS)
        result.factors.append(1 / report.get("ratio", 1.0))
        result.gains.append(report.get("gain", math.nan))
    task.model.eval()
    with torch.no_grad():
        result.quality = task.test()
    if parameters:
        total = engines[0].counters.total
        result.sent = total.sent_bytes / total.dense_bytes
    return result


def exchange(engine: Engine, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One step of one worker."""
    for parameter in engine.parameters:
        engine.submit(parameter.name, gradients[parameter.name].reshape(-1).clone())
    return engine.finish()
