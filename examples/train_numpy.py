"""Train a small network on handwritten digits with numpy and MPI alone, exchanging compressed gradients.

    mpirun -np 4 python -m mpi4py examples/train_numpy.py
    mpirun -np 4 python -m mpi4py examples/train_numpy.py --compression none
    python examples/train_numpy.py                                              # one worker

No deep-learning framework and no Horovod: the network and its gradients are written out, and `Reducer` averages them.
The data comes with scikit-learn.
"""

from __future__ import annotations

import argparse

import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hvd_gradcomp.mpi import Reducer, compression_from_spec

Arrays = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits with numpy and MPI.")
    parser.add_argument("--compression", default="topk-int8", help="a spec, or none (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="per worker (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="for one worker (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    rank, workers = comm.Get_rank(), comm.Get_size()

    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        (digits.data / 16).astype(np.float32), digits.target, test_size=0.25, stratify=digits.target, random_state=0
    )
    # Drawn alike on all workers, so they begin with the same weights and deal out the samples the same way.
    random = np.random.default_rng(args.seed)
    parameters = draw_parameters(random)
    velocity = {name: np.zeros_like(value) for name, value in parameters.items()}
    reducer = Reducer(compression_from_spec(args.compression))
    steps = len(train_x) // (args.batch_size * workers)
    for epoch in range(args.epochs):
        order = random.permutation(len(train_x))[rank::workers]
        loss = 0.0
        for step in range(steps):
            batch = order[step * args.batch_size : (step + 1) * args.batch_size]
            its_loss, gradients = backward(parameters, train_x[batch], train_y[batch])
            loss += its_loss / steps
            rate = args.lr * workers * min(1.0, (epoch * steps + step + 1) / (2 * steps))
            for name, gradient in reducer.reduce(gradients).items():
                velocity[name] = 0.9 * velocity[name] + gradient
                parameters[name] = parameters[name] - np.float32(rate) * velocity[name]
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}", flush=True)
    if rank == 0:
        accuracy = np.mean(forward(parameters, test_x)[1].argmax(axis=1) == test_y)
        sent = reducer.counters.total
        print(f"test accuracy {accuracy:.4f}")
        print(f"bytes sent {sent.sent_bytes:,} of {sent.dense_bytes:,}", flush=True)


def draw_parameters(random: np.random.Generator) -> Arrays:
    """A network with one hidden layer of 128 values: 9,610 parameters."""
    return {
        "hidden.weight": (random.standard_normal((64, 128)) * np.sqrt(2 / 64)).astype(np.float32),
        "hidden.bias": np.zeros(128, np.float32),
        "output.weight": (random.standard_normal((128, 10)) * np.sqrt(2 / 128)).astype(np.float32),
        "output.bias": np.zeros(10, np.float32),
    }


def forward(parameters: Arrays, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden layer (samples, 128) and the scores (samples, 10)."""
    hidden = np.maximum(x @ parameters["hidden.weight"] + parameters["hidden.bias"], 0)
    return hidden, hidden @ parameters["output.weight"] + parameters["output.bias"]


def backward(parameters: Arrays, x: np.ndarray, y: np.ndarray) -> tuple[float, Arrays]:
    """The mean cross-entropy of a batch, and its gradients."""
    hidden, scores = forward(parameters, x)
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    samples = np.arange(len(y))
    loss = -np.log(likely[samples, y] + 1e-12).mean()
    likely[samples, y] -= 1
    of_scores = likely / len(y)
    of_hidden = (of_scores @ parameters["output.weight"].T) * (hidden > 0)
    return float(loss), {
        "hidden.weight": x.T @ of_hidden,
        "hidden.bias": of_hidden.sum(axis=0),
        "output.weight": hidden.T @ of_scores,
        "output.bias": of_scores.sum(axis=0),
    }


if __name__ == "__main__":
    main()
