"""Train a small network on handwritten digits with Horovod and Keras 3, exchanging compressed gradients.

    horovodrun -np 8 python examples/train_keras.py                  # sends 1 % of the gradient's values, in 8 bits
    horovodrun -np 8 python examples/train_keras.py --compression "topk(ratio=0.001) >> int8"
    horovodrun -np 8 python examples/train_keras.py --compare        # also without compression, side by side
    horovodrun -np 8 python examples/train_keras.py --local-steps 8  # workers meet every 8 steps only
    python examples/train_keras.py                                   # one worker

The twin of train.py: the same data, network, options and output, with `model.fit` instead of a loop. An ordinary Keras
script, to copy from: what is particular to Horovod is the optimizer, the callback, and each worker's part of the data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as horovod
import keras
import numpy as np
import tensorflow as tf
from options import natural_number, positive_integer, positive_number, spec, unwritable
from progress import Progress
from results import Result, print_side_by_side
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.tensorflow import Compressor, NoCompression, counters


def main() -> None:
    hvd.init()
    # Workers on one machine share its cores; more threads each would only get in each other's way.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    use_own_gpu()
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
    (images, labels), test_set = load_data()
    batches = Batches(images, labels, args.batch_size, args.seed)

    keras.utils.set_random_seed(args.seed)
    # The weights are drawn alike; dropout is to be drawn differently on each worker.
    model = make_model(dropout_seed=args.seed * hvd.size() + hvd.rank())
    # A step averages over the batches of all workers, so it may be that many times longer.
    schedule = WarmUpAndDecay(args.lr * hvd.size(), args.epochs * len(batches))
    optimizer = keras.optimizers.SGD(learning_rate=schedule, momentum=0.9)
    local = None if args.local_steps is None else make_local(compression, args)
    if local is None:
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    # On a GPU Keras would compile the step with XLA, in which no worker can wait for another.
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)

    progress = Progress(args.epochs, len(batches), label=str(compression), shown=hvd.rank() == 0)
    callbacks = [local or hvd.callbacks.BroadcastGlobalVariablesCallback(0), Steps(progress)]
    start = time.perf_counter()
    model.fit(batches, epochs=args.epochs, callbacks=callbacks, verbose=0, shuffle=False)
    seconds = time.perf_counter() - start

    require_equal_weights(model)
    if local is None:
        sent = counters(optimizer).total
        dense_bytes = sum_over_workers(sent.dense_bytes)
    else:
        sent = local.counters.total
        a_step = 4 * model.count_params() if hvd.size() > 1 else 0
        dense_bytes = sum_over_workers(local.steps * a_step)
    sent_bytes = sum_over_workers(sent.sent_bytes)
    return Result(
        compression=str(compression),
        workers=hvd.size(),
        epochs=args.epochs,
        seed=args.seed,
        test_accuracy=measure_accuracy(model, *test_set),
        dense_bytes=dense_bytes,
        sent_bytes=sent_bytes,
        sent_ratio=sent_bytes / dense_bytes if dense_bytes else None,
        seconds=round(seconds, 2),
        counters=asdict(sent),
    )


def make_local(compression: Compressor, args: argparse.Namespace) -> hvd.LocalSGD:
    """The callback by which workers average their weights every few steps, in place of gradients at every step."""
    if args.diloco:
        # The usual 0.9 suits hundreds of meetings of AdamW; here are 70, of steps as long as SGD can make them.
        return hvd.DiLoCo(args.local_steps, outer_momentum=0.5, compression=compression)
    return hvd.LocalSGD(args.local_steps, compression=compression)


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """1797 images of 8 x 8 pixels for training and testing, parted the same way on every worker and for every seed."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, digits.target, test_size=0.25, stratify=digits.target, random_state=0
    )
    return (train_images, train_labels), (test_images, test_labels)


class Batches(keras.utils.PyDataset):
    """This worker's part of the training set, in another order in every epoch.

    Every worker gets equally many samples, some of them twice if need be: a worker with a step less would stop the
    others.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, batch_size: int, seed: int) -> None:
        super().__init__()
        self._images = images
        self._labels = labels
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self.on_epoch_end()

    def __len__(self) -> int:
        return math.ceil(len(self._order) / self._batch_size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        return self._images[chosen], self._labels[chosen]

    def on_epoch_end(self) -> None:
        self._epoch += 1
        order = np.random.default_rng([self._seed, self._epoch]).permutation(len(self._images))
        missing = -len(order) % hvd.size()
        self._order = np.concatenate([order, order[:missing]])[hvd.rank() :: hvd.size()]


def make_model(dropout_seed: int) -> keras.Model:
    """A network of 226,570 parameters; all but 778 of them lie in tensors large enough to be compressed."""
    # Weights that suit layers with ReLU: with Keras's own the network would idle for its first epochs.
    relu = {"activation": "relu", "kernel_initializer": "he_normal"}
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", **relu),
            keras.layers.Conv2D(64, 3, padding="same", **relu),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(128, 3, padding="same", **relu),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3, seed=dropout_seed),
            keras.layers.Dense(256, **relu),
            keras.layers.Dense(10, kernel_initializer="he_normal"),
        ]
    )


class WarmUpAndDecay(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate at each step: up in a straight line for a tenth of all steps, down to zero on a cosine."""

    def __init__(self, learning_rate: float, steps: int) -> None:
        self.learning_rate = learning_rate
        self.steps = steps

    def __call__(self, step: Any) -> Any:
        step = keras.ops.cast(step, "float32")
        warm_up = keras.ops.minimum(1.0, 10 * (step + 1) / self.steps)
        return self.learning_rate * warm_up * (1 + keras.ops.cos(math.pi * step / self.steps)) / 2

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "steps": self.steps}


class Steps(keras.callbacks.Callback):
    """Shows the steps of `model.fit`."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._total = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._total = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        # Keras tells the mean over the epoch so far.
        total = float(logs["loss"]) * (batch + 1)
        self._progress.step(total - self._total)
        self._total = total


def use_own_gpu() -> None:
    """A GPU for each worker of this machine where there are enough, else the CPU."""
    gpus = tf.config.list_physical_devices("GPU")
    own = gpus[hvd.local_rank()] if len(gpus) >= hvd.local_size() else []
    tf.config.set_visible_devices(own, "GPU")


def measure_accuracy(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """The fraction of the test set that is recognized; each worker looks at a part of it."""
    mine = slice(hvd.rank(), None, hvd.size())
    found = np.asarray(model(images[mine], training=False)).argmax(axis=1)
    return sum_over_workers(int((found == labels[mine]).sum())) / len(labels)


def sum_over_workers(count: int) -> int:
    return int(hvd.allreduce(tf.constant(count, tf.int64), op=hvd.Sum))


def require_equal_weights(model: keras.Model) -> None:
    """Stop if the workers' models have drifted apart: what is averaged on each must be the same to the last bit."""
    digest = hashlib.sha256()
    for weight in model.weights:
        digest.update(np.asarray(weight).tobytes())
    if len(set(horovod.allgather_object(digest.hexdigest()))) > 1:
        sys.exit("the workers ended with different weights, expected equal ones: please report this as a bug")


class Parser(argparse.ArgumentParser):
    """Lets rank 0 alone speak, and the others wait for it: a worker that exits first takes rank 0 down unheard."""

    def error(self, message: str) -> NoReturn:
        if hvd.rank() == 0:
            print(f"{self.format_usage()}{self.prog}: error: {message}", file=sys.stderr, flush=True)
        sum_over_workers(1)
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
        help="none, fp16, topk-int8 or a spec such as 'topk(ratio=0.001) >> int8' (default: %(default)s)",
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
    problem = horovod.broadcast_object(problem, root_rank=0, name="problem")
    if problem:
        parser.error(f"argument --json: {problem}")
    return args


if __name__ == "__main__":
    main()
