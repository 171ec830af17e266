"""Mutated frames: each must be refused or decode to a tensor of the right size, in memory bounded by the tensor's.

`python tests/unit/fuzzing.py 100000` runs that many for every format, or for the specs that follow; the tests run a few
hundred.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from dataclasses import dataclass

import numpy as np
from arrays import array_of, as_numpy, gradient

from hvd_gradcomp.compressors import Compressor, Context, Int8, RandomK, Threshold, TopK
from hvd_gradcomp.errors import ConfigurationError, PayloadError
from hvd_gradcomp.feedback import NoMemory
from hvd_gradcomp.ops import Ops, backend
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.payload import split_payloads, write_payload

_FINGERPRINT = 0x600DF00D
#: Positions in every index code, drawn ones among them; the values are those of `value_codes`.
POSITIONS: tuple[Compressor, ...] = (
    TopK(0.01),
    TopK(0.3),
    Threshold(0.5),
    RandomK(0.3),
    RandomK(0.3, unbiased=True, memory=NoMemory()),
    RandomK(0.05) >> Int8(block=64),
)


@dataclass
class Report:
    """How mutated frames ended, and the most memory that decoding one took."""

    refused: int = 0
    decoded: int = 0
    peak_bytes: int = 0


def mutate(rng: np.random.Generator, data: bytes) -> bytes:
    """`data` with a few changes of the kinds that break decoders; never `data` itself."""
    changed = bytearray(data)
    while bytes(changed) == data:
        for _ in range(rng.integers(1, 4)):
            kind = rng.integers(6)
            # Headers are few bytes among many: half of the changes go to the first forty.
            place = int(rng.integers(max(len(changed) if rng.random() < 0.5 else min(40, len(changed)), 1)))
            if kind == 0 and changed:
                changed[place] ^= 1 << int(rng.integers(8))
            elif kind == 1 and changed:
                changed[place] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)]))
            elif kind == 2:
                changed[place : place + 4] = int(
                    rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, rng.integers(2**32)])
                ).to_bytes(4, "little")
            elif kind == 3:
                del changed[place:]
            elif kind == 4:
                del changed[place : place + int(rng.integers(1, 9))]
            else:
                changed[place:place] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(changed)


def fuzz(code: Compressor, runs: int, seed: int, ops: Ops | None = None) -> Report:
    """Decode `runs` mutated frames of `code`, of tensors of many kinds and sizes.

    Raises:
        AssertionError: a result has another size, or decoding took more than some int64 temporaries of the tensor's
            and the frame's length. Crashes of other kinds than a PayloadError pass through.
    """
    ops = ops or backend("numpy")
    rng = np.random.default_rng(seed)
    report = Report()
    tracemalloc.start()
    try:
        for run in range(runs):
            if run % 50 == 0:
                size = int(rng.choice([1, 7, 64, 300]))
                kind = str(rng.choice(["normal", "sparse", "wild", "ties", "all zeros"]))
                x = array_of(ops, gradient(kind, (size,), int(rng.integers(2**32))))
                frame = as_numpy(code.encode(ops, x, Context(step=run))[0]).tobytes()
            _decode(code, ops, mutate(rng, frame), size, report)
    finally:
        tracemalloc.stop()
    return report


def _decode(code: Compressor, ops: Ops, data: bytes, size: int, report: Report) -> None:
    array = array_of(ops, np.frombuffer(data, np.uint8))
    out = ops.zeros(size, "float32", array)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        reader = Reader(ops, array)
        # Corrupt scales may overflow where they are multiplied: to infinity, as IEEE says.
        with np.errstate(over="ignore", invalid="ignore"):
            found = code.decode_add(ops, reader, out)
        reader.end()
    except PayloadError:
        report.refused += 1
    else:
        assert found.shape == (size,)
        report.decoded += 1
    peak = tracemalloc.get_traced_memory()[1] - before
    # Positions are drawn from up to twice as many, by some temporaries of int64.
    assert peak < 10_000 + 128 * size + 16 * len(data), f"{peak} bytes to decode {len(data)} bytes for {size} elements"
    report.peak_bytes = max(report.peak_bytes, peak)


def fuzz_payload(code: Compressor, runs: int, seed: int) -> int:
    """Check `runs` mutated payloads as the engine does; the number refused, which should be all.

    The checksum in a payload's header covers everything, so what is not refused would be a wrong gradient.
    """
    ops = backend("numpy")
    rng = np.random.default_rng(seed)
    refused = 0
    for run in range(runs):
        if run % 50 == 0:
            x = gradient("normal", (int(rng.choice([1, 7, 64, 300])),), int(rng.integers(2**32)))
            frame, _ = code.encode(ops, x, Context(step=run))
            payload = as_numpy(write_payload(ops, [frame], _FINGERPRINT, x)).tobytes()
        mutated = np.frombuffer(mutate(rng, payload), np.uint8)
        try:
            split_payloads(ops, mutated, [0], _FINGERPRINT)
        except (PayloadError, ConfigurationError):
            refused += 1
    return refused


def main() -> None:
    from value_codes import FORMATS

    runs = int(sys.argv[1])
    wanted = sys.argv[2:]
    for seed, methods in enumerate([*((code, TopK(0.3) >> code) for code in FORMATS), POSITIONS]):
        for method in (each for each in methods if not wanted or str(each) in wanted):
            began = time.time()
            report = fuzz(method, runs, seed)
            refused = fuzz_payload(method, runs, seed)
            assert refused == runs, f"{runs - refused} mutated payloads of {method} were taken for right ones"
            print(
                f"{method}: {runs} frames, {report.refused} refused, {report.decoded} decoded, peak "
                f"{report.peak_bytes} bytes; {refused} of {runs} payloads refused; {time.time() - began:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
