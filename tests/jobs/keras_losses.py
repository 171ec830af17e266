"""One job of two workers that trains a small model: with Keras 3 and this package's door, or with legacy Keras.

    horovodrun -np 2 python keras_losses.py keras3|legacy OUTPUT

Legacy Keras has Horovod's own module, unpatched; its optimizer takes this package's compressors. It trains without
compression and with, and the workers' losses go to OUTPUT as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = str(int(sys.argv[1] == "legacy"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

from hvd_gradcomp.tensorflow import compression_from_spec

if sys.argv[1] == "legacy":
    import horovod.tensorflow.keras as hvd
else:
    import hvd_gradcomp.tensorflow.keras as hvd

keras = tf.keras


SPECS = ("none", "topk(ratio=0.1) >> int8")


def main() -> None:
    hvd.init()
    results = {spec: train(spec) for spec in SPECS}
    if hvd.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


def train(spec: str) -> dict[str, Any]:
    """The losses of each worker at each epoch, and whether all ended with the same weights."""
    random = np.random.default_rng(hvd.rank())
    x = random.standard_normal((64, 20)).astype(np.float32)
    y = x[:, :4].argmax(axis=1)
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(80, activation="relu"), keras.layers.Dense(40), keras.layers.Dense(4)]
    )
    drawn = np.random.default_rng(7)
    model.set_weights([0.2 * drawn.standard_normal(w.shape) for w in model.get_weights()])
    compression = hvd.Compression.none if spec == "none" else compression_from_spec(spec)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    history = model.fit(x, y, batch_size=16, epochs=6, shuffle=False, verbose=0, callbacks=[broadcast])
    losses = horovod.allgather_object([float(loss) for loss in history.history["loss"]])
    weights = horovod.allgather_object([w.tobytes() for w in model.get_weights()])
    return {"losses": losses, "same weights": all(each == weights[0] for each in weights)}


if __name__ == "__main__":
    main()
