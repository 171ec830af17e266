"""Train a small network on handwritten digits with Horovod, exchanging compressed gradients.

    horovodrun -np 8 python examples/train.py                        # sends 1 % of the gradient's values, in 8 bits
    horovodrun -np 8 python examples/train.py --compression "topk(ratio=0.001) >> int8"
    horovodrun -np 8 python examples/train.py --compare              # also without compression, side by side
    horovodrun -np 8 python examples/train.py --local-steps 8        # workers meet every 8 steps only
    python examples/train.py                                         # one worker

An ordinary Horovod script, to copy from: all that this package adds to the training is the `compression` argument of
`hvd.DistributedOptimizer`. It shows that accuracy is kept and bytes are saved; it is no benchmark of speed, since the
model is so small that on one machine an exchange costs next to nothing. The data comes with scikit-learn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from options import natural_number, positive_integer, positive_number, spec, unwritable
from progress import Progress
from results import Result, print_side_by_side
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_gradcomp.torch import (
    Compressor,
    DiLoCo,
    LocalSGD,
    NoCompression,
    counters,
)


def main() -> None:
    hvd.init()
    # Workers on one machine share its cores; more threads each would only get in each other's way.
    torch.set_num_threads(1)
    args = parse_arguments()
    results = [train(NoCompression(), args)] if args.compare else []
    results.append(train(args.compression, args))
    if hvd.rank() == 0:
        print_side_by_side(results)
        if args.json:
            report = asdict(results[-1]) | ({"dense": asdict(results[0])} if args.compare else {})
            args.json.write_text(json.dumps(report, indent=2) + "\n")


def train(compression: Compressor, args: argparse.Namespace) -> Result:
    """Train and test one model."""
    device = pick_device()
    train_set, test_set = load_data()
    # Deals every worker equally many samples, some twice if need be: a worker with a step less would stop the others.
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = make_model().to(device)
    # A step averages over the batches of all workers, so it may be that many times longer.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = make_distributed(optimizer, model, compression, args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay(args.epochs * len(loader)))
    # The weights were drawn alike; dropout is to be drawn differently on each worker.
    torch.manual_seed(args.seed * hvd.size() + hvd.rank())

    progress = Progress(args.epochs, len(loader), label=str(compression), shown=hvd.rank() == 0)
    start = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.step(loss.item())
    if isinstance(optimizer, LocalSGD):
        # The steps since the workers last met.
        optimizer.synchronize()
    seconds = time.perf_counter() - start

    require_equal_weights(model)
    if isinstance(optimizer, LocalSGD):
        sent = optimizer.counters.total
        a_step = 4 * sum(p.numel() for p in model.parameters()) if hvd.size() > 1 else 0
        dense_bytes = sum_over_workers(optimizer.steps * a_step)
    else:
        sent = counters(optimizer).total
        dense_bytes = sum_over_workers(sent.dense_bytes)
    sent_bytes = sum_over_workers(sent.sent_bytes)
    return Result(
        compression=str(compression),
        workers=hvd.size(),
        epochs=args.epochs,
        seed=args.seed,
        test_accuracy=measure_accuracy(model, test_set, device),
        dense_bytes=dense_bytes,
        sent_bytes=sent_bytes,
        sent_ratio=sent_bytes / dense_bytes if dense_bytes else None,
        seconds=round(seconds, 2),
        counters=asdict(sent),
    )


def make_distributed(
    optimizer: torch.optim.Optimizer, model: nn.Module, compression: Compressor, args: argparse.Namespace
) -> torch.optim.Optimizer:
    """The optimizer for all workers: gradients averaged at every step, or parameters every few steps."""
    if args.local_steps is None:
        return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    options = {"named_parameters": model.named_parameters(), "compression": compression}
    if args.diloco:
        # The usual 0.9 suits hundreds of meetings of AdamW; here are 70, of steps as long as SGD can make them.
        return DiLoCo(optimizer, args.local_steps, outer_momentum=0.5, **options)
    return LocalSGD(optimizer, args.local_steps, **options)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 x 8 pixels for training and testing, parted the same way on every worker and for every seed."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.25, stratify=labels, random_state=0
    )
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def make_model() -> nn.Module:
    """A network of 226,570 parameters; all but 778 of them lie in tensors large enough to be compressed."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            # PyTorch's smaller weights suit networks with normalization; this one would idle for its first epochs.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def pick_device() -> torch.device:
    """A GPU for each worker of this machine where there are enough, else the CPU."""
    if torch.cuda.device_count() < hvd.local_size():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def warm_up_and_decay(steps: int) -> Callable[[int], float]:
    """The factor on the learning rate: up in a straight line for a tenth of all steps, down to zero on a cosine."""

    def factor(step: int) -> float:
        return min(1.0, 10 * (step + 1) / steps) * (1 + math.cos(math.pi * step / steps)) / 2

    return factor


def measure_accuracy(model: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """The fraction of the test set that is recognized; each worker looks at a part of it."""
    images, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in test_set.tensors)
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum().item()
    return sum_over_workers(int(correct)) / len(test_set)


def sum_over_workers(count: int) -> int:
    return int(hvd.allreduce(torch.tensor(count), op=hvd.Sum))


def require_equal_weights(model: nn.Module) -> None:
    """Stop if the workers' models have drifted apart: what is averaged on each must be the same to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    if len(set(hvd.allgather_object(digest.hexdigest()))) > 1:
        sys.exit("the workers ended with different weights, expected equal ones: please report this as a bug")


class Parser(argparse.ArgumentParser):
    """Lets rank 0 alone speak, and the others wait for it: a worker that exits first takes rank 0 down unheard."""

    def error(self, message: str) -> NoReturn:
        if hvd.rank() == 0:
            print(f"{self.format_usage()}{self.prog}: error: {message}", file=sys.stderr, flush=True)
        hvd.barrier()
        sys.exit(2)

    def print_help(self, file: object = None) -> None:
        if hvd.rank() == 0:
            print(self.format_help(), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description="Train a small network on handwritten digits, exchanging compressed gradients.")
    parser.add_argument(
        "--compression",
        type=spec,
        default="topk-int8",
        metavar="SPEC",
        help="none, fp16, topk-int8, gravac or a spec such as 'topk(ratio=0.001) >> int8' (default: %(default)s)",
    )
    parser.add_argument("--local-steps", type=positive_integer, metavar="H", help="local SGD: meet every H steps")
    parser.add_argument("--diloco", action="store_true", help="with --local-steps: Nesterov momentum between meetings")
    parser.add_argument("--epochs", type=positive_integer, default=25, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=positive_integer, default=16, help="per worker (default: %(default)s)")
    parser.add_argument("--lr", type=positive_number, default=0.02, help="for one worker (default: %(default)s)")
    parser.add_argument("--seed", type=natural_number, default=0, help="of weights and order (default: %(default)s)")
    parser.add_argument("--compare", action="store_true", help="train without compression too, print both")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file as well")
    args = parser.parse_args()
    if args.diloco and args.local_steps is None:
        parser.error("argument --diloco: give the number of steps between two meetings as well, --local-steps H")
    # Only rank 0 writes the file, so only it can tell, and all have to hear of it.
    problem = unwritable(args.json) if args.json and hvd.rank() == 0 else None
    # Named, since Horovod would make the name from the type, which is another one on rank 0.
    problem = hvd.broadcast_object(problem, root_rank=0, name="problem")
    if problem:
        parser.error(f"argument --json: {problem}")
    return args


if __name__ == "__main__":
    main()
