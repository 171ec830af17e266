"""Finds the compiled kernels once, and tells when they are missing."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from typing import Any

SWITCH = "HVD_GRADCOMP_NATIVE"


@cache
def load() -> Any:
    """The extension module, or None where it is turned off or was not built (then it warns, once)."""
    if _turned_off():
        return None
    try:
        return import_module("hvd_gradcomp.ops.native._kernels")
    except ImportError as error:
        warnings.warn(
            f"hvd_gradcomp runs without its native kernels ({error}): results are the same, compressing takes several "
            "times longer. Install the package again where a C++17 compiler is found (pip shows its errors with -v), "
            f"or set {SWITCH}=0 to silence this",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def available() -> bool:
    """Whether the native kernels are in use."""
    return load() is not None


def status() -> str:
    """One line for people: which kernels are in use, and if none, why."""
    kernels = load()
    if kernels is not None:
        return f"native kernels for {kernels.instruction_set()}"
    if _turned_off():
        return f"no native kernels: turned off by {SWITCH}={os.environ[SWITCH]}"
    return "no native kernels: not built (no C++17 compiler at installation?)"


def _turned_off() -> bool:
    return os.environ.get(SWITCH, "1").lower() in ("0", "off", "no", "false")
