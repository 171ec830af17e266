"""The same gradients through the door of PyTorch and through that of TensorFlow, each in a job of its own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import environment
from one_door import CASES

pytestmark = pytest.mark.timeout(300)
JOB_LIMIT = 140


def seen(door: str, over: str, workers: int, folder: Path) -> list[dict[str, dict[str, Any]]]:
    """What each worker of a job saw."""
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), f"--{over}", "-np", str(workers)]
    script = Path(__file__).with_name("one_door.py")
    done = subprocess.run(
        [*horovodrun, sys.executable, str(script), door, str(folder)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=JOB_LIMIT,
        text=True,
    )
    # What counts is what the workers wrote down, their last act: Horovod's core may end with an error when the core of
    # another worker has ended before it (seen over Gloo).
    written = [folder / f"{door}-{rank}.pickle" for rank in range(workers)]
    assert all(path.exists() for path in written), done.stdout
    return [pickle.loads(path.read_bytes()) for path in written]


@pytest.mark.parametrize(("workers", "over"), [(2, "mpi"), (4, "gloo")])
def test_both_doors_send_the_same_bytes(workers, over, tmp_path):
    """Payloads byte by byte; results and all that is kept bit by bit, where TensorFlow is in a tf.function."""
    if over == "mpi":
        import horovod.torch as hvd

        if not hvd.mpi_built():
            over = "gloo"
    of_torch = seen("torch", over, workers, tmp_path)
    of_tensorflow = seen("tensorflow", over, workers, tmp_path)
    for here, there in zip(of_torch, of_tensorflow, strict=True):
        for spec in CASES:
            assert_same(here[spec], there[spec], spec)


def assert_same(here: dict[str, Any], there: dict[str, Any], spec: str) -> None:
    assert any(here["sent"]), spec
    assert here["sent"] == there["sent"], f"{spec}: the doors sent different bytes"
    assert here["kept"].keys() <= there["kept"].keys(), spec
    for name, parts in here["kept"].items():
        for part, values in parts.items():
            assert values.tobytes() == there["kept"][name][part].tobytes(), f"{spec}: {part} of {name}"
    for mine, other in zip(here["results"], there["results"], strict=True):
        for name, values in mine.items():
            if values.size >= 1024 and spec not in ("fp16", "bf16"):
                assert values.tobytes() == other[name].tobytes(), f"{spec}: result of {name}"
            else:
                # Horovod adds in an order of its own.
                np.testing.assert_allclose(values, other[name], rtol=1e-2 if "16" in spec else 1e-5, atol=1e-4)
    assert there["traces"] == 1, spec
