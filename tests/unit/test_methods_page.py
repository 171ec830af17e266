"""docs/methods.md names every method that a spec can name, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_gradcomp.compressors import compression_from_spec
from hvd_gradcomp.compressors.spec import _COMPRESSORS, _MEMORIES

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
#: The specs in the first cell of every row of a table.
CELLS = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
ROWS = [spec for cell in CELLS for spec in re.findall(r"`([^`]+)`", cell)]
MEMORIES = [row for row in ROWS if row.split("(")[0] in ("ef", "momentum") or row == "none"]


def test_every_method_and_memory_has_a_row() -> None:
    named = {row.split("(")[0] for row in ROWS}
    # A short form of two others has none; tests that define compressors of their own may have registered them.
    own = {"fixed8", "topk_int8"}
    assert {name for name, made in _COMPRESSORS.items() if made.__module__.startswith("hvd_gradcomp")} - own <= named
    assert _MEMORIES.keys() <= named
    assert named <= _COMPRESSORS.keys() | _MEMORIES.keys()


@pytest.mark.parametrize("spec", [row for row in ROWS if row.split("(")[0] in _COMPRESSORS])
def test_every_row_is_a_spec(spec: str) -> None:
    assert str(compression_from_spec(spec)).split("(")[0] == spec.split("(")[0]


@pytest.mark.parametrize("spec", MEMORIES)
def test_every_memory_is_one(spec: str) -> None:
    assert compression_from_spec(f"int8(memory={spec})").memory.spec_name == spec.split("(")[0]


def test_specs_in_the_text_parse() -> None:
    for spec in re.findall(r"`([a-z0-9_]+(?:\([^`]*\))? >> [^`]+|[a-z0-9_]+\([^`]+\))`", PAGE):
        if spec.split("(")[0].split(" ")[0] in _COMPRESSORS:
            assert compression_from_spec(spec)
