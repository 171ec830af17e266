"""Two workers, of which one reduces the gradients of its tape with stock Horovod: `stock_tape.py FOLDER WHICH`.

Each writes to FOLDER how that ended, since launchers cut output short.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_gradcomp.tensorflow import TopKInt8


def step() -> None:
    weights = [tf.Variable(tf.zeros(shape)) for shape in ((50, 40), (40,), (40, 30))]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(((tf.ones((3, 50)) @ weights[0] + weights[1]) @ weights[2]) ** 2)
    compression = hvd.Compression.none if hvd.rank() == int(sys.argv[2]) else TopKInt8
    hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, weights)


def main() -> None:
    hvd.init()
    error = message = ""
    try:
        step()
    except Exception as raised:
        error, message = type(raised).__name__, str(raised)
    outcome = {"error": error, "message": message}
    folder = Path(sys.argv[1])
    draft = folder / f"{hvd.rank()}.new"
    draft.write_text(json.dumps(outcome))
    draft.rename(folder / f"{hvd.rank()}.json")
    # The launcher ends both workers when one ends with an error: let the other one write too.
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and len(list(folder.glob("*.json"))) < hvd.size():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
