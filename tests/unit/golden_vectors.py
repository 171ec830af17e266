"""Golden vectors: inputs by formula, and the bytes that they gave when format version 1 was made, kept in golden/.

They are there so that a change of the format is noticed: payloads of an older version would no longer be understood. A
change on purpose takes a new VERSION in wire/payload.py, and `python tests/unit/golden_vectors.py` writes new files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from arrays import array_of

from hvd_gradcomp.compressors import Context, compression_from_spec
from hvd_gradcomp.ops import backend
from hvd_gradcomp.wire.payload import write_payload

FOLDER = Path(__file__).parent / "golden"
FINGERPRINT = 0x12345678


def _integers(size: int) -> np.ndarray:
    """Pseudo-random 24-bit integers around 0, by integer arithmetic alone: the same on every machine and version."""
    state, found = 1, []
    for _ in range(size):
        state = (state * 1103515245 + 12345) % 2**31
        found.append((state >> 7) - 2**23)
    return np.array(found, np.float32)


def _cubes(size: int) -> np.ndarray:
    """Values of very different sizes, as gradients have; every step of the arithmetic is exact or rounded by IEEE."""
    x = _integers(size) / np.float32(2**20)
    return x * x * x


#: Name -> float32 tensors of one payload.
INPUTS: dict[str, list[np.ndarray]] = {
    "one-element": [np.array([-2.5], np.float32)],
    "zeros": [np.zeros(40, np.float32)],
    "small": [_cubes(100)],
    "ties": [np.tile(np.array([1, -1, 0.5, -0.0], np.float32), 20)],
    "subnormals": [_integers(64) * np.float32(2.0**-149)],
    "huge": [_integers(64) * np.float32(1e23), np.array([3.4028235e38, -3.4028235e38], np.float32)],
    "two-tensors": [_cubes(70), _integers(33)],
    # Large enough that the selection begins with a sample.
    "sampled": [_cubes(20_000)],
}

SPECS = (
    "topk(ratio=0.1)",
    "topk(ratio=0.02) >> int8",
    "topk(ratio=0.5) >> int8(block=16)",
    "topk(ratio=1.0)",
    "int8",
    "int8(block=8)",
    "fp16",
    "bf16",
    "topk(ratio=0.05) >> fp16",
    "topk(ratio=0.05) >> bf16",
)

#: What is kept: of the large input only what is small.
CASES = [(name, spec) for name in INPUTS for spec in SPECS if name != "sampled" or "0.02" in spec or "0.05" in spec]


def golden() -> dict[tuple[str, str], bytes]:
    """The kept payloads: (input, spec) -> bytes."""
    found = {}
    for name in INPUTS:
        for line in (FOLDER / f"{name}.txt").read_text().splitlines():
            spec, _, digits = line.rpartition(": ")
            found[name, spec] = bytes.fromhex(digits)
    return found


def payload_of(name: str, spec: str, backend_name: str) -> bytes:
    """The payload that the package makes now."""
    ops = backend(backend_name)
    compressor = compression_from_spec(spec)
    frames = [compressor.encode(ops, array_of(ops, x), Context())[0] for x in INPUTS[name]]
    return ops.to_host(write_payload(ops, frames, FINGERPRINT, frames[0]))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in INPUTS:
        lines = [f"{spec}: {payload_of(each, spec, 'numpy').hex()}" for name, spec in CASES if name == each]
        (FOLDER / f"{each}.txt").write_text("\n".join(lines) + "\n")
