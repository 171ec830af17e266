"""What the compiler makes of the Triton kernels keeps IEEE's rounding: seen in the code for GPUs, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_gpu import needs_triton

from hvd_gradcomp.ops import triton

pytestmark = needs_triton

_COMPILES = Path(__file__).with_name("triton_code.py")
# Rounded to nearest, nothing flushed; and conversions that are exact for what they are given.
_EXACT = {
    *(f"{operation}.rn.f32" for operation in ("add", "sub", "mul", "div")),
    *("cvt.f32.f16", "cvt.rn.f32.s8", "cvt.rn.f32.s16", "cvt.rn.f32.s32", "cvt.rzi.s32.f32"),
}


@pytest.mark.parametrize("capability", ["80", "90"])
def test_no_kernel_rounds_otherwise_than_the_reference(capability: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(triton.__file__).parents[3])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(_COMPILES), capability], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert {name: set(found) - _EXACT for name, found in report.items() if set(found) - _EXACT} == {}
    # A look at nothing would find nothing wrong.
    assert any("div.rn.f32" in instructions for instructions in report.values())
    assert any("mul.rn.f32" in instructions for name, instructions in report.items() if name.startswith("_add"))
