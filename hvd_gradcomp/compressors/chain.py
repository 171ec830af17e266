"""A sparsifier chooses which values travel, a value code says in how many bits: `TopK(0.01) >> Int8()` is both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
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
# Those of every compressor.
_OPTIONS = ("memory", "dense_below", "granularity", "collective")


@dataclass(frozen=True)
class ValueCode(Compressor):
    """Base of the codes for values. Alone, a value code compresses every value of the tensor.

    A subclass gives `encode_values` and `value_bits`, and, where its bytes are none of this package's formats
    (`wire.codes`), `decode_values` as well.
    """

    def encode_values(self, ops: Ops, values: Array, context: Context) -> tuple[Array, Array]:
        """The bytes (uint8) for float32 `values` (count,), and the float32 values (count,) they decode to.

        `count` may be zero: a sparsifier need not select anything.
        """
        raise NotImplementedError

    def decode_values(self, reader: Reader, count: int) -> Array:
        """The float32 values (count,) behind the bytes that `encode_values` gave, which come next in `reader`.

        Raises:
            PayloadError: the bytes are not what `encode_values` could have given.
        """
        return decode_values(reader, count)

    def value_bits(self) -> float:
        """Bits a value, everything included."""
        raise NotImplementedError

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are one of this package's formats, so that a kernel may read them."""
        return type(self).decode_values is ValueCode.decode_values

    def encode_at_once(self, ops: Ops, x: Array, positions: Array | None) -> Array | None:
        """The frame of the values of `x` at `positions` (None: all), with the residual left in `x`, by one kernel.

        None, with `x` unchanged, where there is no such kernel.
        """
        return None

    def encode(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        at_once = self.encode_at_once(ops, x, None)
        if at_once is not None:
            return at_once, x
        coded, decoded = self.encode_values(ops, x, context)
        return (
            write_frame(ops, SPARSE_FRAME, len(x), len(x), encode_positions(ops, None, len(x), x), coded),
            x - decoded,
        )

    def decode_add(self, ops: Ops, frames: Reader, out: Array) -> Array:
        return decode_sparse(ops, frames, out, self)

    def decode_mean(self, ops: Ops, frames: Sequence[Reader], out: Array, divisor: int) -> Array | None:
        return mean_sparse(ops, frames, out, divisor, self)

    def expected_bytes(self, size: int) -> float:
        return self.value_bits() * size / 8


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """Base of the compressors that send some values only. Alone, it sends them as float32."""

    def select(self, ops: Ops, x: Array, context: Context) -> Array:
        """The positions to send: int64, ascending, distinct; may be empty."""
        raise NotImplementedError

    def kept(self, size: int) -> float:
        """About how many of `size` values are sent; 0 where nobody can know beforehand."""
        raise NotImplementedError

    def scale(self, size: int) -> float:
        """What the selected of `size` values are multiplied by before they are sent."""
        return 1.0

    def is_plain(self, size: int) -> bool:
        """Whether the selected of `size` values travel as they are, behind coded positions, as kernels write them."""
        return self.scale(size) == 1 and type(self).encode_positions is Sparsifier.encode_positions

    def position_bits(self, size: int) -> float:
        """About how many bits the position of a sent value costs."""
        return expected_bits(min(1.0, self.kept(size) / size)) if self.kept(size) else 0.0

    def encode_positions(self, ops: Ops, positions: Array, size: int, like: Array, context: Context) -> Array:
        """The bytes for what `select` returned."""
        return encode_positions(ops, positions, size, like)

    def positions_sent(self, ops: Ops, frame: Array | None, like: Array, context: Context) -> Array | None:
        return None if frame is None else sparse_positions(ops, frame, len(like))

    def __rshift__(self, code: object) -> Compressor:
        if isinstance(code, type) and issubclass(code, ValueCode):
            code = code()
        if not isinstance(code, ValueCode):
            raise ConfigurationError(f"{self} >> {code!r}: the right side must be a value code such as Int8()")
        return Chain(self, code)

    def encode(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        return encode_sparse(ops, x, self, None, context)

    def decode_add(self, ops: Ops, frames: Reader, out: Array) -> Array:
        return decode_sparse(ops, frames, out, None)

    def decode_mean(self, ops: Ops, frames: Sequence[Reader], out: Array, divisor: int) -> Array | None:
        return mean_sparse(ops, frames, out, divisor, None)

    def expected_bytes(self, size: int) -> float:
        return self.kept(size) * (self.position_bits(size) + 32) / 8


@dataclass(frozen=True)
class Chain(Compressor):
    """What `sparsifier >> code` gives: select with one, code the selected values with the other.

    The options (`memory`, `dense_below`, `granularity`, `collective`) are the sparsifier's, and an error where they are
    given to the value code. Payloads add up where those of both parts do: `RandomK(0.01) >> FP16()` is summed in
    float16.
    """

    spec_name: ClassVar[str] = ">>"

    sparsifier: Sparsifier
    code: ValueCode
    memory: Memory = field(init=False, compare=False)
    dense_below: int = field(init=False, compare=False)
    granularity: str = field(init=False, compare=False)
    collective: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        misplaced = {
            each.name: getattr(self.code, each.name)
            for each in fields(self.code)
            if each.name in _OPTIONS and getattr(self.code, each.name) != each.default
        }
        if misplaced:
            raise ConfigurationError(
                f"{self}: {', '.join(misplaced)} would have no effect on the right of >>; options of the whole belong "
                f"to the left side, as in {replace(self.sparsifier, **misplaced)} >> {type(self.code).spec_name}"
            )
        for option in (*_OPTIONS, "draws"):
            object.__setattr__(self, option, getattr(self.sparsifier, option))
        # For other compressors these belong to the class; for a chain they depend on its parts.
        adds = self.sparsifier.meets == "sum" and self.code.meets in ("sum", "dense")
        object.__setattr__(self, "meets", "sum" if adds else "gather")
        object.__setattr__(self, "sum_kind", self.code.sum_kind)
        object.__setattr__(self, "votes", self.code.votes)
        super().__post_init__()

    def wanted(self, size: int) -> int:
        return self.sparsifier.wanted(size)

    def without_memory(self) -> Compressor:
        return self.sparsifier.without_memory() >> self.code

    def with_collective(self, collective: str) -> Compressor:
        return self.sparsifier.with_collective(collective) >> self.code

    def at(self, step: int) -> Compressor:
        sparsifier = self.sparsifier.at(step)
        return self if sparsifier is self.sparsifier else sparsifier >> self.code

    def with_ratio(self, ratio: float) -> Compressor:
        return self.sparsifier.with_ratio(ratio) >> self.code

    @property
    def learns(self) -> bool:
        return self.code.learns

    def encode(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        return encode_sparse(ops, x, self.sparsifier, self.code, context)

    def decode_add(self, ops: Ops, frames: Reader, out: Array) -> Array:
        return decode_sparse(ops, frames, out, self.code)

    def summands(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        if self.code.meets == "dense":
            return self.sparsifier.summands(ops, x, context)
        positions = self.sparsifier.select(ops, x, context)
        values = ops.take(x, positions)
        scaled = values * self.sparsifier.scale(len(x))
        summands, left = self.code.summands(ops, ops.copy(scaled), context)
        return summands, ops.put(x, positions, left + (values - scaled))

    def from_sum(self, ops: Ops, total: Array, size: int, context: Context) -> Array:
        if self.code.meets == "sum":
            total = self.code.from_sum(ops, total, len(total), context)
        return self.sparsifier.from_sum(ops, total, size, context)

    def positions_sent(self, ops: Ops, frame: Array | None, like: Array, context: Context) -> Array | None:
        return self.sparsifier.positions_sent(ops, frame, like, context)

    def decode_mean(self, ops: Ops, frames: Sequence[Reader], out: Array, divisor: int) -> Array | None:
        return mean_sparse(ops, frames, out, divisor, self.code)

    def combine(self, ops: Ops, total: Array, workers: int) -> Array:
        return self.code.combine(ops, total, workers)

    def expected_bytes(self, size: int) -> float:
        return self.sparsifier.kept(size) * (self.sparsifier.position_bits(size) + self.code.value_bits()) / 8

    def __str__(self) -> str:
        return f"{self.sparsifier} >> {self.code}"


def encode_sparse(
    ops: Ops,
    x: Array,
    sparsifier: Sparsifier,
    code: ValueCode | None,
    context: Context,
    positions: Array | None = None,
) -> tuple[Array, Array]:
    """The frame of the values of `x` that `sparsifier` selects, and the residual, made in the memory of `x`.

    Args:
        positions: what has been selected already; None to select now.
    """
    size = len(x)
    if positions is None:
        positions = sparsifier.select(ops, x, context)
    if code is not None and sparsifier.is_plain(size):
        at_once = code.encode_at_once(ops, x, positions)
        if at_once is not None:
            return at_once, x
    values = ops.take(x, positions)
    scaled = values * sparsifier.scale(size) if sparsifier.scale(size) != 1 else values
    if code is None:
        coded, decoded = encode_floats(ops, scaled, "float32"), scaled
    else:
        coded, decoded = code.encode_values(ops, scaled, context)
    left = values - decoded
    written = sparsifier.encode_positions(ops, positions, size, x, context)
    frame = write_frame(ops, SPARSE_FRAME, size, len(positions), written, coded)
    return frame, ops.put(x, positions, left)


def parts_of(method: Compressor) -> tuple[Sparsifier, ValueCode | None] | None:
    """What selects and what codes in `method`; None where positions are drawn, or are all."""
    sparsifier, code = (method.sparsifier, method.code) if isinstance(method, Chain) else (method, None)
    if not isinstance(sparsifier, Sparsifier):
        return None
    kind = type(sparsifier)
    plain = kind.encode_positions is Sparsifier.encode_positions and kind.scale is Sparsifier.scale
    return (sparsifier, code) if plain else None


def encode_values_at(
    ops: Ops, values: Array, positions: Array, size: int, code: ValueCode | None, context: Context
) -> tuple[Array, Array]:
    """The frame of a tensor of `size` elements that has `values` at `positions`, and what these decode to.

    Args:
        values: float32, shape (count,).
        positions: int64, shape (count,), ascending; `count` may be 0.
        code: what the values are written in; None for float32.
    """
    if code is None:
        coded, decoded = encode_floats(ops, values, "float32"), values
    else:
        coded, decoded = code.encode_values(ops, values, context)
    written = encode_positions(ops, positions, size, values)
    return write_frame(ops, SPARSE_FRAME, size, len(positions), written, coded), decoded


def decode_sparse(ops: Ops, frames: Reader, out: Array, code: ValueCode | None) -> Array:
    """Add the values of the next frame onto `out` (float32) at their positions; the reverse of `encode_sparse`.

    Args:
        code: what they were written in; None for float32.
    """
    if code is None or code.is_plain:
        end = ops.decode_add(frames.data, frames.position, out)
        if end is not None:
            frames.position = end
            return out
    positions, values = read_sparse(frames, len(out), code)
    return ops.accumulate(out, values) if positions is None else ops.put_add(out, positions, values)


def read_sparse(frames: Reader, size: int, code: ValueCode | None) -> tuple[Array | None, Array]:
    """The positions (int64; None where it holds all `size` elements) and values (float32) of the next frame."""
    body, count = read_frame(frames, SPARSE_FRAME, size)
    positions = decode_positions(body, size, count)
    values = code.decode_values(body, count) if code else decode_values(body, count)
    body.end()
    return positions, values


def mean_sparse(ops: Ops, frames: Sequence[Reader], out: Array, divisor: int, code: ValueCode | None) -> Array | None:
    """The frames of all workers added and divided at once; see `Compressor.decode_mean`."""
    if code is not None and not code.is_plain:
        return None
    ends = ops.decode_mean([(each.data, each.position) for each in frames], out, divisor)
    if ends is None:
        return None
    for each, end in zip(frames, ends, strict=True):
        each.position = end
    return out


def sparse_positions(ops: Ops, frame: Array, size: int) -> Array | None:
    """The positions in a frame of this worker's own; None where it holds all `size` elements."""
    body, count = read_frame(Reader(ops, frame), SPARSE_FRAME, size)
    return decode_positions(body, size, count)
