"""Mutated frames and payloads for the native kernels, compared with the reference: as many as asked for.

`python tests/unit/native_fuzz.py 100000` runs that many for each format; `scripts/sanitize.sh` runs some of them with
the kernels compiled for the sanitizers, and the tests a few hundred.
"""

from __future__ import annotations

import sys

import numpy as np
from arrays import array_of, bits_of, gradient
from fuzzing import mutate
from native import REFERENCE, VARIANTS, guarded, unharmed, variant

from hvd_gradcomp.compressors import BF16, FP16, Compressor, Context, Int8, TopK, TopKInt8
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.ops.numpy_ops import NativeNumpyOps
from hvd_gradcomp.wire.parts import Reader

#: One for each code of values and positions that the kernels read.
METHODS: tuple[Compressor, ...] = (
    TopKInt8(0.1),
    TopK(0.5) >> Int8(block=16),
    TopK(0.1),
    TopK(0.1) >> FP16(),
    TopK(0.1) >> BF16(),
    Int8(block=16),
)


def outcome(ops: Ops, method: Compressor, data: bytes, out: Array) -> tuple[object, bytes]:
    """What decoding comes to: where it ended or what was wrong, and the array."""
    reader = Reader(ops, array_of(ops, np.frombuffer(data, np.uint8)))
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            out = method.decode_add(ops, reader, out)
    except PayloadError as error:
        return str(error), bits_of(out)
    return reader.position, bits_of(out)


def compare_frames(method: Compressor, runs: int, seed: int) -> int:
    """Decode `runs` mutated frames natively and by the reference, which must agree; returns how many were refused."""
    rng = np.random.default_rng(seed)
    refused = 0
    for run in range(runs):
        size = int(rng.choice([1, 9, 70, 300]))
        x = gradient(str(rng.choice(["normal", "sparse", "ties"])), (size,), (seed, run))
        data = mutate(rng, bytes(method.encode(REFERENCE, x, Context())[0]))
        expected = outcome(REFERENCE, method, data, np.ones(size, np.float32))
        refused += isinstance(expected[0], str)
        for instruction_set, cls in VARIANTS:
            with variant(instruction_set, cls) as ops:
                inside, around = guarded(np.ones(size, np.float32))
                out = inside if cls is NativeNumpyOps else array_of(ops, np.ones(size, np.float32))
                assert outcome(ops, method, data, out) == expected, (size, data)
                assert unharmed(around)
    return refused


def compare_means(method: Compressor, runs: int, seed: int) -> int:
    """Average `runs` times three frames, one of them mutated: right, or declined; returns how many were declined."""
    rng = np.random.default_rng(seed)
    declined = 0
    for run in range(runs):
        size = int(rng.choice([1, 9, 70, 300]))
        gradients = [gradient("normal", (size,), (seed, run, rank)) for rank in range(3)]
        frames = [bytes(method.encode(REFERENCE, x, Context())[0]) for x in gradients]
        place = int(rng.integers(3))
        frames[place] = mutate(rng, frames[place])
        expected: np.ndarray | None = np.zeros(size, np.float32)
        for data in frames:
            reader = Reader(REFERENCE, np.frombuffer(data, np.uint8))
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    expected = method.decode_add(REFERENCE, reader, expected)
            except PayloadError:
                expected = None
                break
        with variant(*VARIANTS[run % len(VARIANTS)]) as ops:
            inside, around = guarded(np.ones(size, np.float32))
            readers = [Reader(ops, array_of(ops, np.frombuffer(data, np.uint8))) for data in frames]
            mean = method.decode_mean(ops, readers, inside if ops.name == "numpy" else array_of(ops, inside), 1)
            assert unharmed(around)
            if mean is None:
                declined += 1
                assert all(reader.position == 0 for reader in readers)
            else:
                assert expected is not None, (size, frames)
                assert np.array_equal(mean, expected, equal_nan=True), (size, frames)
    return declined


def main() -> None:
    runs = int(sys.argv[1])
    for method in METHODS:
        refused = compare_frames(method, runs, seed=runs)
        declined = compare_means(method, runs, seed=runs)
        print(f"{method}: {refused} of {runs} frames refused, {declined} of {runs} means declined", flush=True)


if __name__ == "__main__":
    main()
