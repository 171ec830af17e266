"""The gradients of two real trainings, and what one worker sends of them: the first table of benchmarks/methods.py.

Of the network of examples/train.py on handwritten digits, and of a small transformer that predicts the next character
of the text of Python's own standard library. No training with compression, see methods.py for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from characters import Characters, standard_library_text
from in_process import Workers
from torch import nn
from train import load_data, make_model

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine import Engine, Parameter

Gradients = dict[str, torch.Tensor]


def capture_digits() -> list[Gradients]:
    """Gradients of three steps in a row, of one worker's batches, after 100 steps on the digits."""
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


def measure(compressor: Compressor, captured: list[Gradients]) -> dict[str, float]:
    """One worker alone: what it sends of each gradient, without memory, and how long that takes there and back.

    Gradients in a row, so that what a method keeps (the factors of PowerSGD) is warm. The last one is measured; the
    time is the processor's, and the shortest of all: other programs may disturb some.
    """
    # Past any warm-up.
    compressor = compressor.at(10**6).without_memory()
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
