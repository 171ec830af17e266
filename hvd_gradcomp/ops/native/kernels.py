"""The native kernels as a layer over a backend's primitives: what they cannot take goes to the layer below.

They take float32 arrays that lie in host memory in one piece; float16, bfloat16 and float64 become that before
(`flat32`). Every call hands over addresses, so whatever a kernel may write is made or measured here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from hvd_gradcomp.ops.base import Array, Corrected, Ops
from hvd_gradcomp.ops.native.library import load

# Larger tensors do not fit the format (wire/positions.py), nor the kernels' 32-bit positions.
_MAX_SIZE = 2**31 - 1
_WIDEST = 32
# Headers and padding of a frame, and then some.
_HEADERS = 64


class NativeKernels(Ops):
    """Mix in before a backend's class, and say how its memory is reached."""

    def __init__(self) -> None:
        self._kernels: Any = load()

    @abstractmethod
    def reachable(self, x: Array, dtype: str, written: bool = False) -> bool:
        """Whether `x` is of `dtype` and lies in host memory in one piece, which may be `written` if that is asked."""

    @abstractmethod
    def address(self, x: Array) -> int:
        """Where the memory of `x` begins."""

    @abstractmethod
    def length(self, x: Array) -> int:
        """`len(x)`, which takes torch longer than some kernels take."""

    @abstractmethod
    def room(self, count: int, dtype: str, like: Array) -> Array:
        """`count` elements of `dtype` that hold anything."""

    # -- selection ------------------------------------------------------------------------------------------------

    def correct(self, gradient: Array, residual: Array | None, wanted: int) -> Corrected:
        size = self.length(gradient)
        if not self.reachable(gradient, "float32", written=True) or size > _MAX_SIZE:
            return super().correct(gradient, residual, wanted)
        addend = 0
        if residual is not None:
            if not self.reachable(residual, "float32") or self.length(residual) != size:
                return super().correct(gradient, residual, wanted)
            addend = self.address(residual)
        return Corrected(gradient, *self._kernels.look(self.address(gradient), addend, size, wanted))

    def top_positions(self, x: Array, k: int, candidates: object = None) -> Array:
        size = self.length(x)
        if not self.reachable(x, "float32") or size > _MAX_SIZE or not 1 <= k <= size:
            return super().top_positions(x, k, candidates)
        positions = self.room(k, "int64", x)
        count = self._kernels.top_positions(self.address(x), size, k, candidates, self.address(positions))
        return positions if count == k else positions[:count]

    def kth_largest(self, x: Array, k: int) -> float:
        if not self.reachable(x, "float32") or not 1 <= k <= self.length(x):
            return super().kth_largest(x, k)  # type: ignore[safe-super]
        value: float = self._kernels.kth_largest(self.address(x), self.length(x), k)
        return value

    def all_finite(self, x: Array) -> bool:
        if not self.reachable(x, "float32"):
            return super().all_finite(x)  # type: ignore[safe-super]
        finite: bool = self._kernels.look(self.address(x), 0, self.length(x), 0)[0]
        return finite

    # -- coding ---------------------------------------------------------------------------------------------------

    def encode_positions(self, positions: Array, size: int) -> Array | None:
        if not self.reachable(positions, "int64") or size > _MAX_SIZE:
            return None
        count = self.length(positions)
        capacity = _positions_bytes(count, size) + _HEADERS
        out = self.room(capacity, "uint8", positions)
        used = self._kernels.encode_positions(self.address(positions), count, size, self.address(out), capacity)
        return out[:used] if used else None

    def decode_positions(self, data: Array, start: int, size: int, count: int) -> tuple[Array, int] | None:
        if not self.reachable(data, "uint8") or size > _MAX_SIZE or not count <= size:
            return None
        out = self.room(count, "int64", data)
        used = self._kernels.decode_positions(
            self.address(data) + start, self.length(data) - start, size, count, self.address(out)
        )
        return (out, start + used) if used else None

    def encode_linear8(self, values: Array, block: int) -> tuple[Array, Array] | None:
        if not self.reachable(values, "float32"):
            return None
        count = self.length(values)
        coded = self.room(_linear8_bytes(count, block), "uint8", values)
        decoded = self.room(count, "float32", values)
        self._kernels.encode_linear8(
            self.address(values), count, block.bit_length() - 1, self.address(decoded), self.address(coded)
        )
        return coded, decoded

    def encode_sparse8(self, x: Array, positions: Array | None, block: int) -> Array | None:
        size = self.length(x)
        if not self.reachable(x, "float32", written=True) or size > _MAX_SIZE:
            return None
        if positions is None:
            count, where = size, 0
        elif self.reachable(positions, "int64"):
            count, where = self.length(positions), self.address(positions)
        else:
            return None
        capacity = _positions_bytes(count, size) + _linear8_bytes(count, block) + _HEADERS
        out = self.room(capacity, "uint8", x)
        used = self._kernels.encode_sparse8(
            self.address(x), size, where, count, block.bit_length() - 1, self.address(out), capacity
        )
        return out[:used] if used else None

    def decode_add(self, data: Array, start: int, out: Array) -> int | None:
        if not self.reachable(out, "float32", written=True) or not self.reachable(data, "uint8"):
            return None
        used = self._kernels.decode_add(
            self.address(data) + start, self.length(data) - start, self.address(out), self.length(out)
        )
        return start + used if used else None

    def decode_mean(self, frames: Sequence[tuple[Array, int]], out: Array, divisor: int) -> list[int] | None:
        if not self.reachable(out, "float32", written=True) or not all(
            self.reachable(data, "uint8") for data, _ in frames
        ):
            return None
        places = [(self.address(data) + start, self.length(data) - start) for data, start in frames]
        used = self._kernels.decode_mean(places, self.address(out), self.length(out), divisor)
        return None if used is None else [start + each for (_, start), each in zip(frames, used, strict=True)]

    # -- bits -----------------------------------------------------------------------------------------------------

    def pack_bits(self, bits: Array) -> Array:
        if not self.reachable(bits, "uint8"):
            return super().pack_bits(bits)  # type: ignore[safe-super]
        out = self.room((self.length(bits) + 7) // 8, "uint8", bits)
        self._kernels.pack_bits(self.address(bits), self.length(bits), 1, self.address(out))
        return out

    def unpack_bits(self, data: Array, count: int) -> Array:
        if not self.reachable(data, "uint8") or self.length(data) * 8 < count:
            return super().unpack_bits(data, count)  # type: ignore[safe-super]
        out = self.room(count, "uint8", data)
        self._kernels.unpack_bits(self.address(data), count, 1, self.address(out))
        return out

    def pack_uint(self, x: Array, width: int) -> Array:
        if not self.reachable(x, "int64") or width > _WIDEST:
            return super().pack_uint(x, width)  # type: ignore[safe-super]
        out = self.room((self.length(x) * width + 7) // 8, "uint8", x)
        self._kernels.pack_uint(self.address(x), self.length(x), width, self.address(out))
        return out

    def unpack_uint(self, data: Array, width: int, count: int) -> Array:
        if not self.reachable(data, "uint8") or width > _WIDEST or self.length(data) * 8 < count * width:
            return super().unpack_uint(data, width, count)  # type: ignore[safe-super]
        out = self.room(count, "int64", data)
        self._kernels.unpack_uint(self.address(data), count, width, self.address(out))
        return out

    def checksum(self, data: Array) -> int:
        if not self.reachable(data, "uint8") or self.length(data) % 4:
            return super().checksum(data)  # type: ignore[safe-super]
        total: int = self._kernels.checksum(self.address(data), self.length(data) // 4)
        return total


def _positions_bytes(count: int, size: int) -> int:
    """No index code takes more than 32 bits a position or one bit an element, whichever is less."""
    return min(4 * count, (size + 7) // 8)


def _linear8_bytes(count: int, block: int) -> int:
    return 4 + 4 * -(-count // block) + count + -count % 4
