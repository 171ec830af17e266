"""Compiles every Triton kernel for GPUs, which needs none, and prints the instructions on float32 that could round.

`python tests/unit/triton_code.py` (without TRITON_INTERPRET); what may be in it is for test_triton_code.py to say.
Prints JSON: kernel and constants -> sorted instructions of the PTX that calculate with or convert floats.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hvd_gradcomp.ops.triton import bits, frames, positions, select, values
from hvd_gradcomp.ops.triton.launch import options

_X = {"x": "*fp32", "size": "i32"}
_FOUND = {**_X, "state": "*i32", "found": "*i32", "blocks": "i32"}
_VALUES = {"x": "*fp32", "where": "*i64", "largest": "*i32", "count": "i32", "block_log2": "i32"}
_QUANTIZE = {**_VALUES, "steps": "*fp32", "levels": "*i8", "decoded": "*fp32", "blocks": "i32"}
_ADD = {"start": "*u8", "values": "*u8", "where": "*i64", "out": "*fp32", "count": "i32", "size": "i32"}
_POSITIONS = {"positions": "*i64", "count": "i32", "size": "i32"}
_MARKS = {"data": "*u8", "found": "*i32", "length": "i64"}
_LOOK = {**_X, "addend": "*fp32", "marks": "*i32", "counts": "*i32"}

#: Kernel, the types of its arguments, its constants.
KERNELS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    *(
        (select._look, _LOOK, {"ADD": add, "COUNT": count, "BINS": 4096, "SHIFT": 19, "BLOCK": 4096})
        for add, count in ((True, True), (True, False), (False, True), (False, False))
    ),
    *(
        (
            select._narrow,
            {**_X, "state": "*i32", "counts": "*i32"},
            {"ABOVE": above, "SHIFT": shift, "BINS": bins, "BLOCK": 4096},
        )
        for above, shift, bins in ((19, 9, 1024), (9, 0, 512))
    ),
    *(
        (select._pick, {"counts": "*i32", "state": "*i32", "k": "i32"}, {"FIRST": first, "BINS": bins})
        for first, bins in ((True, 4096), (False, 1024))
    ),
    (select._count, _FOUND, {"BLOCK": 4096}),
    (select._write, {**_FOUND, "reached": "*i64", "positions": "*i64"}, {"BLOCK": 4096}),
    *(
        (bits._pack, {"values": kind, "out": "*u8", "count": "i32", "octets": "i32"}, {"WIDTH": width, "BLOCK": 256})
        for kind, width in (("*u8", 1), ("*i64", 1), ("*i64", 2), ("*i64", 4), ("*i64", 7), ("*i64", 32))
    ),
    *(
        (bits._unpack, {"data": "*u8", "out": kind, "count": "i32"}, {"WIDTH": width, "BLOCK": 1024})
        for kind, width in (("*u8", 1), ("*i64", 1), ("*i64", 2), ("*i64", 4), ("*i64", 7), ("*i64", 32))
    ),
    (bits._checksum, {"data": "*u8", "total": "*i64", "words": "i32"}, {"BLOCK": 1024}),
    (positions._measure, {**_POSITIONS, "gaps": "*i64", "sums": "*i64"}, {"LOWEST": 4, "BLOCK": 1024}),
    *(
        (positions._mark, {"ends": "*i64", "words": "*i32", "count": "i32"}, {"RICE": rice, "BLOCK": 1024})
        for rice in (True, False)
    ),
    (positions._count_marks, _MARKS, {"BLOCK": 4096}),
    (
        positions._place_marks,
        {**_MARKS, "reached": "*i64", "ends": "*i64", "wrong": "*i32", "count": "i32"},
        {"BLOCK": 4096},
    ),
    (
        positions._join,
        {"ends": "*i64", "sums": "*i64", "wrong": "*i32", "count": "i32", "size": "i32"},
        {"SHIFT": 6, "BLOCK": 1024},
    ),
    (positions._check, {**_POSITIONS, "wrong": "*i32"}, {"BLOCK": 1024}),
    (values._largest, _VALUES, {"GATHER": True, "BLOCK": 1024, "WIDTH": 1024}),
    *(
        (
            values._quantize,
            _QUANTIZE,
            {"WIDE": wide, "RESIDUAL": residual, "GATHER": gather, "BLOCK": 1024, "WIDTH": width},
        )
        for wide, residual, gather, width in (
            (False, True, True, 512),
            (False, False, False, 512),
            (False, True, False, 1),
            (True, True, True, 1024),
        )
    ),
    (values._check_steps, {"steps": "*u8", "wrong": "*i32", "blocks": "i32"}, {"BLOCK": 1024}),
    *(
        (values._add, {**_ADD, "block_log2": "i32"}, {"CODE": code, "GATHER": gather, "BLOCK": 1024})
        for code in range(4)
        for gather in (True, False)
    ),
    (frames._store_words, {"words": "*i32", **dict.fromkeys("abcdef", "i32")}, {"COUNT": 6}),
    (frames._read_code, {"data": "*u8", "table": "*i64"}, {}),
    (frames._read_heads, {"data": "*u8", "table": "*i64", "left": "i32"}, {}),
]

_INSTRUCTION = re.compile(r"^\s*(?:@%?!?\w+\s+)?([a-z][\w.:]+)\s", re.MULTILINE)
# Moving and comparing floats rounds nothing.
_HARMLESS = re.compile(r"^(mov|ld|st|selp|setp|max|min|copysign|abs|neg|atom|red|shfl|redux)\b")


def arithmetic(kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: int) -> list[str]:
    """The instructions of `kernel`, compiled as `launch` asks for it, that calculate with floats."""
    source = ASTSource(
        fn=kernel, signature={**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=dict(constants)
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options(constants))
    found = set(_INSTRUCTION.findall(compiled.asm["ptx"]))
    return sorted(each for each in found if re.search(r"\.(f16|bf16|f32|f64)", each) and not _HARMLESS.match(each))


def main() -> None:
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 80
    report = {}
    for kernel, signature, constants in KERNELS:
        name = f"{kernel.__name__} {' '.join(f'{key}={value}' for key, value in constants.items())}"
        report[name] = arithmetic(kernel, signature, constants, capability)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
