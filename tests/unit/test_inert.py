"""Invariant 5, inert, as far as it shows without Horovod: nothing is imported or registered that was not asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ["horovod", "torch", "tensorflow", "keras", "triton"]


@pytest.mark.parametrize(
    "module", ["hvd_gradcomp", "hvd_gradcomp.engine", "hvd_gradcomp.compressors", "hvd_gradcomp.telemetry"]
)
def test_no_framework_is_imported_unasked(module):
    """In a process of its own, compressing a numpy array at the end."""
    code = f"""
import sys
import {module}, numpy
from hvd_gradcomp.compressors import TopKInt8
payload, ctx = TopKInt8.compress(numpy.ones(2000, numpy.float32))
TopKInt8.decompress(payload, ctx)
print([name for name in {FRAMEWORKS} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("[]", "", 0)
