"""A sparsifier chooses which values travel, a value code says in how many bits: `TopK(0.01) >> Int8()` is both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import Memory
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.frame import read_frame, write_frame
from hvd_gradcomp.wire.parts import Reader
from hvd_gradcomp.wire.positions import decode_positions, encode_positions, expected_bits
from hvd_gradcomp.wire.values import decode_values, encode_floats

#: The wire number of frames that hold positions and values.
SPARSE_FRAME = 1


@dataclass(frozen=True)
class ValueCode(Compressor):
    """Base of the codes for values. Alone, a value code compresses every value of the tensor."""

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        """The bytes (uint8) for float32 `values` (count,), and the float32 values (count,) they decode to."""
        raise NotImplementedError

    def bits(self) -> float:
        """Bits a value, everything included."""
        raise NotImplementedError

    def encode(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        coded, decoded = self.encode_values(ops, x, context)
        return (
            write_frame(ops, SPARSE_FRAME, len(x), len(x), encode_positions(ops, None, len(x), x), coded),
            x - decoded,
        )

    def decode_add(self, ops: Ops, frames: Reader, out: Array) -> Array:
        return decode_sparse(ops, frames, out)

    def expected_bytes(self, size: int) -> float:
        return self.bits() * size / 8


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """Base of the compressors that send some values only. Alone, it sends them as float32."""

    def select(self, ops: Ops, x: Array, context: Context) -> Array:
        """The positions to send: int64, ascending, distinct; may be empty."""
        raise NotImplementedError

    def kept(self, size: int) -> float:
        """About how many of `size` values are sent."""
        raise NotImplementedError

    def __rshift__(self, code: object) -> Compressor:
        if isinstance(code, type) and issubclass(code, ValueCode):
            code = code()
        if not isinstance(code, ValueCode):
            raise ConfigurationError(f"{self} >> {code!r}: the right side must be a value code such as Int8()")
        return Chain(self, code)

    def encode(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        return encode_sparse(ops, x, self.select(ops, x, context), None, context)

    def decode_add(self, ops: Ops, frames: Reader, out: Array) -> Array:
        return decode_sparse(ops, frames, out)

    def expected_bytes(self, size: int) -> float:
        return expected_sparse_bytes(self.kept(size), size, 32)


@dataclass(frozen=True)
class Chain(Compressor):
    """What `sparsifier >> code` gives: select with one, code the selected values with the other.

    The options (`memory`, `dense_below`) are the sparsifier's; those of the value code are not looked at.
    """

    spec_name: ClassVar[str] = ">>"

    sparsifier: Sparsifier
    code: ValueCode
    memory: Memory = field(init=False, compare=False)
    dense_below: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", self.sparsifier.memory)
        object.__setattr__(self, "dense_below", self.sparsifier.dense_below)
        super().__post_init__()

    def encode(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        return encode_sparse(ops, x, self.sparsifier.select(ops, x, context), self.code, context)

    def decode_add(self, ops: Ops, frames: Reader, out: Array) -> Array:
        return decode_sparse(ops, frames, out)

    def expected_bytes(self, size: int) -> float:
        return expected_sparse_bytes(self.sparsifier.kept(size), size, self.code.bits())

    def __str__(self) -> str:
        return f"{self.sparsifier} >> {self.code}"


def encode_sparse(
    ops: Ops, x: Array, positions: Array, code: ValueCode | None, context: Context
) -> tuple[Array, Array]:
    """The frame of the values of `x` at `positions`, and the residual, made in the memory of `x`."""
    size = len(x)
    values = ops.take(x, positions)
    if code is None:
        coded, left = encode_floats(ops, values, "float32"), ops.clear(values)
    else:
        coded, decoded = code.encode_values(ops, values, context)
        left = values - decoded
    frame = write_frame(ops, SPARSE_FRAME, size, len(positions), encode_positions(ops, positions, size, x), coded)
    return frame, ops.put(x, positions, left)


def decode_sparse(ops: Ops, frames: Reader, out: Array) -> Array:
    """Add the values of the next frame onto `out` (float32) at their positions; the reverse of `encode_sparse`."""
    body, count = read_frame(frames, SPARSE_FRAME, len(out))
    positions = decode_positions(body, len(out), count)
    values = decode_values(body, count)
    body.end()
    return ops.accumulate(out, values) if positions is None else ops.put_add(out, positions, values)


def expected_sparse_bytes(kept: float, size: int, value_bits: float) -> float:
    """Bytes of `kept` of `size` values at `value_bits` each, with their positions."""
    return kept * (expected_bits(min(1.0, kept / size)) + value_bits) / 8 if size else 0.0
