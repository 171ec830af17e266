"""Keras 3 trains through this package's door as legacy Keras does through Horovod's, with and without compression."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("keras_losses.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="legacy Keras (tf-keras) is not installed"
)


def train(which: str, folder: Path) -> dict[str, Any]:
    """What keras_losses.py writes."""
    output = folder / which
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
    }
    finished = subprocess.run(
        [horovodrun, "-np", "2", sys.executable, str(JOB), which, str(output)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=190,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.timeout(400)
def test_the_loss_curves_are_those_of_legacy_keras(tmp_path: Path) -> None:
    new, legacy = (train(which, tmp_path) for which in ("keras3", "legacy"))
    assert new.keys() == legacy.keys()
    for spec, expected in legacy.items():
        assert new[spec]["same weights"]
        assert expected["same weights"]
        assert expected["losses"][0][-1] < 0.6 * expected["losses"][0][0]
        np.testing.assert_allclose(new[spec]["losses"], expected["losses"], rtol=2e-3)
