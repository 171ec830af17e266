"""Finds the compiled kernels once, tells them how many threads to use, and tells people when they are missing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from hvd_gradcomp.errors import ConfigurationError

SWITCH = "HVD_GRADCOMP_NATIVE"
THREADS = "HVD_GRADCOMP_THREADS"
_OPENMP_THREADS = "OMP_NUM_THREADS"


@cache
def load() -> Any:
    """The extension module, or None where it is turned off or was not built (then it warns, once)."""
    if _turned_off():
        return None
    try:
        kernels = import_module("hvd_gradcomp.ops.native._kernels")
    except ImportError as error:
        warnings.warn(
            f"hvd_gradcomp runs without its native kernels ({error}): results are the same, compressing takes several "
            "times longer. Install the package again where a C++17 compiler is found (pip shows its errors with -v), "
            f"or set {SWITCH}=0 to silence this",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    kernels.use_threads(threads_allowed(os.environ, _processors()))
    return kernels


def available() -> bool:
    """Whether the native kernels are in use."""
    return load() is not None


def status() -> str:
    """One line for people: which kernels are in use, and if none, why."""
    kernels = load()
    if kernels is not None:
        threads = f", up to {kernels.threads()} threads" if kernels.threads() > 1 else ""
        return f"native kernels for {kernels.instruction_set()}{threads}"
    if _turned_off():
        return f"no native kernels: turned off by {SWITCH}={os.environ[SWITCH]}"
    return "no native kernels: not built (no C++17 compiler at installation?)"


def threads_allowed(environment: Mapping[str, str], processors: int) -> int:
    """How many threads one call may use.

    Workers share a machine, and nothing tells one how many there are. So it is one, unless the user has said how many a
    process may use, for these kernels or, with OMP_NUM_THREADS, for all; and never more than there are processors.

    Args:
        environment: of the process.
        processors: how many of them the process may run on.

    Raises:
        ConfigurationError: HVD_GRADCOMP_THREADS is no positive number.
    """
    own = environment.get(THREADS)
    if own is not None:
        if not own.strip().isdecimal() or int(own) < 1:
            raise ConfigurationError(f"{THREADS}='{own}', expected how many threads a worker may use, at least 1")
        return min(int(own), processors)
    # May be a list, for nested loops.
    first = environment.get(_OPENMP_THREADS, "1").split(",")[0].strip()
    return min(int(first), processors) if first.isdecimal() and int(first) else 1


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _turned_off() -> bool:
    return os.environ.get(SWITCH, "1").lower() in ("0", "off", "no", "false")
