"""Jobs of TensorFlow that cannot work end soon, with a word why on every worker; one that loses a worker goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STOCK = Path(__file__).with_name("stock_tape.py")
ELASTIC = Path(__file__).with_name("elastic_keras.py")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("stock", "over"), [(0, []), (1, ["--gloo"])], ids=["0", "1-gloo"])
def test_a_tape_that_does_not_compress_is_an_error_on_every_worker(stock: int, over: list[str], tmp_path: Path) -> None:
    finished = launch([*over, "-np", "2"], STOCK, tmp_path, stock)
    # How a worker with exchanges under way ends is Horovod's affair; both have to have heard of the error.
    written = [tmp_path / f"{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in written), finished.stdout
    outcomes = [json.loads(path.read_text()) for path in written]
    ours, other = outcomes[1 - stock], outcomes[stock]
    assert ours["error"] == "ConfigurationError", outcomes
    assert "without hvd_gradcomp" in ours["message"]
    # Horovod's own words, on the worker that knows nothing of this package.
    assert "Mismatched data types" in other["message"]


@pytest.mark.skipif(
    not os.environ.get("HVD_GRADCOMP_TEST_ELASTIC"),
    reason="takes a minute, and Horovod's elastic launcher hangs now and then: HVD_GRADCOMP_TEST_ELASTIC=1 runs it",
)
@pytest.mark.timeout(400)
def test_keras_goes_on_when_a_worker_dies(tmp_path: Path) -> None:
    """From the last commit, with the workers that are left: weights, optimizer, residuals and counts."""
    hosts = tmp_path / "hosts.sh"
    # Two names of this machine: Horovod gives up the whole host of a worker that died.
    hosts.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    elastic = ["--gloo", "-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(hosts)]
    finished = launch(elastic, ELASTIC, tmp_path)
    assert finished.returncode == 0, finished.stdout
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for outcome in outcomes:
        assert outcome["sizes"] == [3, 3, 2, 2, 2]
        assert (outcome["epoch"], outcome["batch"]) == (5, 0)
        # Two epochs of four batches, two batches of the third that were committed, and three epochs after that.
        assert outcome["steps"] == 22
        assert outcome["residual"]
    assert outcomes[0]["weights"] == outcomes[1]["weights"]


def launch(options: list[str], script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script with horovodrun to its end; stdout holds its errors as well."""
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return subprocess.run(
        [horovodrun, *options, sys.executable, str(script), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Workers that wait for each other would do so for ever.
        timeout=180,
        check=False,
    )
