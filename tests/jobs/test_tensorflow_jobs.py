"""A job of TensorFlow that cannot work ends soon, with a word why on every worker. Launches jobs of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("stock_tape.py")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("stock", "over"), [(0, []), (1, ["--gloo"])], ids=["0", "1-gloo"])
def test_a_tape_that_does_not_compress_is_an_error_on_every_worker(stock: int, over: list[str], tmp_path: Path) -> None:
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    finished = subprocess.run(
        [horovodrun, *over, "-np", "2", sys.executable, str(JOB), str(tmp_path), str(stock)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Workers that wait for each other would do so for ever.
        timeout=150,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    ours, other = outcomes[1 - stock], outcomes[stock]
    assert ours["error"] == "ConfigurationError", outcomes
    assert "without hvd_gradcomp" in ours["message"]
    # Horovod's own words, on the worker that knows nothing of this package.
    assert "Mismatched data types" in other["message"]
