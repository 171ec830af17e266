"""Elastic training with Keras 3 in which the last of the workers dies: `elastic_keras.py FOLDER`.

Those who are left write to FOLDER what they ended with.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.tensorflow import TopKInt8

EPOCHS = 5


class Die(keras.callbacks.Callback):
    """In the middle of the third epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.state.epoch == 2 and batch == 1 and hvd.size() > 2 and hvd.rank() == hvd.size() - 1:
            os._exit(1)


def main() -> None:
    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(80, activation="relu"), keras.layers.Dense(4)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=TopKInt8(ratio=0.1))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    state = hvd.elastic.KerasState(model, epoch=0, batch=0, sizes=[])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < EPOCHS:
            random = np.random.default_rng([hvd.rank(), state.epoch])
            x = random.standard_normal((32, 20)).astype(np.float32)
            callbacks = [
                hvd.elastic.UpdateBatchStateCallback(state),
                Die(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            ]
            model.fit(x, x[:, :4].argmax(axis=1), batch_size=8, verbose=0, callbacks=callbacks)
            state.sizes = [*state.sizes, hvd.size()]

    train(state)
    digests = [np.asarray(each).astype(np.float64).tolist() for each in model.weights]
    outcome = {
        "sizes": state.sizes,
        "epoch": state.epoch,
        "batch": state.batch,
        "steps": int(optimizer.iterations.numpy()),
        "residual": any(each.owes for each in optimizer.hvd_gradcomp_residuals.by_path.values()),
        "weights": digests,
    }
    (Path(sys.argv[1]) / f"{hvd.rank()}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
