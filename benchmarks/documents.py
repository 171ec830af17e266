"""Measured parts of documents: what stands between two marks is replaced by the command that measures it."""

from __future__ import annotations

from pathlib import Path


def replace_part(path: Path, part: str, text: str) -> None:
    """Put `text` between the marks `<!-- part: begin -->` and `<!-- part: end -->` of a document.

    Raises:
        ValueError: the document has no such marks.
    """
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    document = path.read_text()
    before, found, rest = document.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{path} has no part {part!r}: expected the lines {begin!r} and {end!r} in it")
    path.write_text(f"{before}{begin}\n{text.rstrip()}\n{end}{after}")
