"""The kinds of values that the examples' options take, each with an error that says what was expected."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from hvd_gradcomp.compressors import Compressor, compression_from_spec
from hvd_gradcomp.errors import ConfigurationError


def spec(text: str) -> Compressor:
    try:
        return compression_from_spec(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def natural_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or above, got {text!r}")
    return int(text)


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def unwritable(path: Path) -> str | None:
    """Why `path` cannot be written, found before the training and not after it."""
    if path.is_dir():
        return f"{str(path)!r} is a folder, expected the name of a file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"cannot write {str(path)!r}: give a file in a folder that exists and is writable"
    return None
