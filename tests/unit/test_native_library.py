"""The kernels are there where they should be, can be turned off, and are missed aloud."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from hvd_gradcomp.ops import backend, native
from hvd_gradcomp.ops.native.library import SWITCH


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )


@pytest.mark.skipif(os.environ.get(SWITCH) == "0", reason="turned off")
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no compiler")
def test_kernels_are_built_where_there_is_a_compiler() -> None:
    assert native.available(), "build them: pip install -e . (or python setup.py build_ext --inplace)"
    assert native.status() == f"native kernels for {native.load().instruction_set()}"
    assert type(backend("numpy")).__name__ == "NativeNumpyOps"


def test_an_environment_variable_turns_them_off() -> None:
    code = (
        "from hvd_gradcomp.ops import backend, native; print(native.status()); print(type(backend('numpy')).__name__)"
    )
    done = _python(code, HVD_GRADCOMP_NATIVE="0")
    assert done.stdout.splitlines() == [f"no native kernels: turned off by {SWITCH}=0", "NumpyOps"]
    assert not done.stderr


def test_missing_kernels_are_told_once_and_not_needed() -> None:
    code = (
        "import sys; sys.modules['hvd_gradcomp.ops.native._kernels'] = None\n"
        "from hvd_gradcomp.ops import backend, native\n"
        "print(type(backend('numpy')).__name__, type(backend('torch')).__name__, native.status())"
    )
    done = _python(code, HVD_GRADCOMP_NATIVE="1")
    assert done.stdout.startswith("NumpyOps TorchOps no native kernels: not built")
    assert done.stderr.count("runs without its native kernels") == 1


def test_an_unknown_instruction_set_is_refused() -> None:
    if not native.available():
        pytest.skip("no native kernels here")
    with pytest.raises(ValueError, match="abacus"):
        native.load().use_instruction_set("abacus")
