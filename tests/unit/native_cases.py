"""Writes inputs and what the numpy reference makes of them to a file, for `native_cases.cpp` on any processor.

    python tests/unit/native_cases.py FILE

`scripts/cross_check.sh` runs both. What this is not: the comparison on this machine, which `test_native_kernels.py` is.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
from arrays import KINDS, gradient
from native import REFERENCE, SIZES

from hvd_gradcomp.compressors import Context, Int8, TopK
from hvd_gradcomp.wire.parts import Reader

#: Large enough for three threads.
LARGE = 3 * 2**18 + 4097
WORKERS = 3
#: (ratio, block of the int8 code)
METHODS = ((0.01, 512), (0.2, 512), (1.0, 512), (0.05, 4096))


def case(kind: str, size: int, ratio: float, block: int) -> bytes:
    """One input with all results: see the driver's `Case`."""
    method = TopK(ratio) >> Int8(block=block)
    x, residual = gradient(kind, (size,), size), gradient("normal", (size,), 1)
    k = method.wanted(size) or size
    corrected = REFERENCE.correct(x.copy(), residual, k).x
    positions = REFERENCE.top_positions(corrected, k)
    frame, left = method.encode(REFERENCE, corrected.copy(), Context())
    start = np.linspace(-1, 1, size, dtype=np.float32)
    added = method.decode_add(REFERENCE, Reader(REFERENCE, frame), start.copy())
    total = np.zeros(size, np.float32)
    for _ in range(WORKERS):
        total = method.decode_add(REFERENCE, Reader(REFERENCE, frame), total)
    mean = REFERENCE.divide(total, WORKERS)
    words = REFERENCE.pad(frame, 4)
    numbers = (size, k, block.bit_length() - 1, len(positions), len(frame), REFERENCE.checksum(words), WORKERS)
    arrays = (x, residual, corrected, positions, frame, left, start, added, mean)
    return struct.pack("<7Q", *numbers) + b"".join(array.tobytes() for array in arrays)


def main() -> None:
    cases = [case(kind, size, *method) for kind in sorted(KINDS) for size in SIZES for method in METHODS]
    cases += [case("normal", LARGE, *method) for method in METHODS]
    Path(sys.argv[1]).write_bytes(struct.pack("<Q", len(cases)) + b"".join(cases))
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
