"""The engine on numpy arrays over MPI, with no deep-learning framework: jobs of 2 and 4 workers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        find_spec("mpi4py") is None or which("mpirun") is None, reason="mpi4py or Open MPI is not installed"
    ),
]
ROOT = Path(__file__).parents[2]


def mpirun(workers: int, *command: str) -> str:
    """The output of a job that ends well."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = subprocess.run(
        ["mpirun", "-np", str(workers), sys.executable, "-m", "mpi4py", *command],
        cwd=ROOT,
        env={**defaults, **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("workers", [2, 4])
def test_the_engine_on_numpy_arrays(workers: int) -> None:
    assert f"all is well with {workers} workers" in mpirun(workers, "tests/jobs/mpi_arrays.py")


def test_the_example_learns_digits() -> None:
    output = mpirun(2, "examples/train_numpy.py", "--epochs", "6")
    accuracy = float(output.split("test accuracy")[1].split()[0])
    assert accuracy > 0.85


def test_without_mpi4py_the_error_says_what_to_install() -> None:
    script = "import sys; sys.modules['mpi4py'] = None; import hvd_gradcomp.mpi"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert "pip install 'hvd_gradcomp[mpi]'" in done.stderr
