"""The Keras example as its users run it: the figures that train.py prints and writes, and accuracy worth its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The first import of TensorFlow alone may take a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_keras.py"
HOROVODRUN = Path(sys.executable).parent / "horovodrun"


def run(*options: str, workers: int | None) -> subprocess.CompletedProcess[str]:
    """Run the example to its end, without horovodrun if `workers` is None; stdout holds its errors as well."""
    launcher = [] if workers is None else [str(HOROVODRUN), "-np", str(workers)]
    return subprocess.run(
        [*launcher, sys.executable, str(EXAMPLE), *options],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=290,
        check=False,
    )


def test_compare_keeps_accuracy_and_sends_two_percent(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    finished = run("--epochs", "6", "--compare", "--json", str(path), workers=2)
    assert finished.returncode == 0, finished.stdout
    written = json.loads(path.read_text())
    dense = written["dense"]
    assert (written["compression"], dense["compression"]) == ("topk >> int8", "none")
    assert (written["workers"], written["epochs"], written["seed"]) == (2, 6, 0)
    assert dense["test_accuracy"] > 0.93
    assert written["test_accuracy"] > 0.9
    assert written["sent_ratio"] == written["sent_bytes"] / written["dense_bytes"] < 0.02
    # 1347 images do not divide by two: both workers have 674, which is 43 batches of at most 16.
    assert dense["sent_bytes"] == dense["dense_bytes"] == written["dense_bytes"] == 2 * 6 * 43 * 226_570 * 4
    for figure in ("test accuracy", "bytes a dense run sends", "bytes sent", "ratio", "seconds"):
        assert figure in finished.stdout
    assert finished.stdout.count("epoch 6/6") == 2, "only rank 0 speaks, once an epoch and training"


@pytest.mark.parametrize("options", [(), ("--diloco",)], ids=["local_sgd", "diloco"])
def test_local_steps(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "result.json"
    command = ("--epochs", "4", "--compression", "none", "--local-steps", "8", *options, "--json", str(path))
    finished = run(*command, workers=2)
    assert finished.returncode == 0, finished.stdout
    written = json.loads(path.read_text())
    assert written["test_accuracy"] > 0.7
    # 4 epochs of 43 steps are 21 meetings and one at the end.
    assert written["sent_ratio"] == 22 / (4 * 43)


def test_one_worker_without_horovodrun(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    finished = run("--epochs", "3", "--json", str(path), workers=None)
    assert finished.returncode == 0, finished.stdout
    written = json.loads(path.read_text())
    assert written["workers"] == 1
    assert written["test_accuracy"] > 0.7
    # Alone there is nobody to send to.
    assert (written["dense_bytes"], written["sent_bytes"], written["sent_ratio"]) == (0, 0, None)


@pytest.mark.parametrize(
    ("options", "expected"), [(("--compression", "zip"), "'zip'"), (("--diloco",), "--local-steps H")]
)
def test_a_bad_option_is_one_clear_error_and_ends_all(options: tuple[str, ...], expected: str) -> None:
    finished = run(*options, workers=2)
    assert finished.returncode != 0
    errors = [line for line in finished.stdout.splitlines() if "error: argument" in line]
    assert len(errors) == 1, finished.stdout
    assert options[0] in errors[0]
    assert expected in errors[0]
    assert "Traceback" not in finished.stdout
