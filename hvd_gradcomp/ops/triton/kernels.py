"""The Triton kernels as a layer over a backend's primitives: what they cannot take goes to the layer below.

They take float32 tensors on a GPU that lie in one piece; other float formats become that before (`flat32`). All work
is put on torch's current stream. Nothing here imports torch or Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_gradcomp.ops.base import Array, Corrected, Ops
from hvd_gradcomp.ops.triton.library import load

# Larger tensors do not fit the format (wire/positions.py).
_MAX_SIZE = 2**31 - 1
# Elements, and places behind them up to a whole block, are counted in 32 bits.
_LONGEST = 2**31 - 2**13
_WIDEST = 32


class TritonKernels(Ops):
    """Mix in before the class of torch operations."""

    def on_device(self, x: Array) -> bool:
        """Whether kernels can run where `x` is."""
        return bool(x.is_cuda)

    def taken(self, x: Array, dtype: str) -> bool:
        """Whether kernels can take `x`, which is to be of `dtype`."""
        return (
            self.on_device(x)
            and str(x.dtype) == f"torch.{dtype}"
            and x.is_contiguous()
            and len(x) <= _LONGEST
            and load() is not None
        )

    # -- selection ------------------------------------------------------------------------------------------------

    def correct(self, gradient: Array, residual: Array | None, wanted: int) -> Corrected:
        if not self.taken(gradient, "float32"):
            return super().correct(gradient, residual, wanted)
        if residual is not None and (not self.taken(residual, "float32") or len(residual) != len(gradient)):
            return super().correct(gradient, residual, wanted)
        seen = load().look(gradient, residual, wanted > 0)
        return Corrected(gradient, seen, seen)

    def top_positions(self, x: Array, k: int, candidates: object = None) -> Array:
        if not self.taken(x, "float32") or not 1 <= k <= len(x):
            return super().top_positions(x, k, candidates)
        seen = candidates if isinstance(candidates, load().Seen) else None
        return load().top_positions(x, k, seen)

    def all_finite(self, x: Array) -> bool:
        if not self.taken(x, "float32"):
            return super().all_finite(x)  # type: ignore[safe-super]
        return bool(load().look(x, None, False))

    # -- coding ---------------------------------------------------------------------------------------------------

    def encode_positions(self, positions: Array, size: int) -> Array | None:
        if not self.taken(positions, "int64") or size > _MAX_SIZE:
            return super().encode_positions(positions, size)
        return load().encode_positions(positions, size)

    def decode_positions(self, data: Array, start: int, size: int, count: int) -> tuple[Array, int] | None:
        if not self.taken(data, "uint8") or size > _MAX_SIZE or not count <= size:
            return super().decode_positions(data, start, size, count)
        found: tuple[Array, int] | None = load().decode_positions(data, start, size, count)
        return found

    def encode_linear8(self, values: Array, block: int) -> tuple[Array, Array] | None:
        if not self.taken(values, "float32"):
            return super().encode_linear8(values, block)
        coded: tuple[Array, Array] = load().encode_linear8(values, block)
        return coded

    def encode_sparse8(self, x: Array, positions: Array | None, block: int) -> Array | None:
        if not self.taken(x, "float32") or not (positions is None or self.taken(positions, "int64")):
            return super().encode_sparse8(x, positions, block)
        return load().encode_sparse8(x, positions, block)

    def decode_add(self, data: Array, start: int, out: Array) -> int | None:
        if not self.taken(out, "float32") or not self.taken(data, "uint8"):
            return super().decode_add(data, start, out)
        end: int | None = load().decode_add(data, start, out)
        return end

    def decode_mean(self, frames: Sequence[tuple[Array, int]], out: Array, divisor: int) -> list[int] | None:
        if not self.taken(out, "float32") or not all(self.taken(data, "uint8") for data, _ in frames):
            return super().decode_mean(frames, out, divisor)
        ends: list[int] | None = load().decode_mean(frames, out)
        if ends is not None and divisor != 1:
            self.divide(out, divisor)
        return ends

    # -- bits -----------------------------------------------------------------------------------------------------

    def pack_bits(self, bits: Array) -> Array:
        if not self.taken(bits, "uint8"):
            return super().pack_bits(bits)  # type: ignore[safe-super]
        out = bits.new_empty((len(bits) + 7) // 8)
        load().pack(bits, 1, out)
        return out

    def unpack_bits(self, data: Array, count: int) -> Array:
        if not self.taken(data, "uint8") or 8 * len(data) < count:
            return super().unpack_bits(data, count)  # type: ignore[safe-super]
        out = data.new_empty(count)
        load().unpack(data, 0, 1, out)
        return out

    def pack_uint(self, x: Array, width: int) -> Array:
        if not self.taken(x, "int64") or not 1 <= width <= _WIDEST:
            return super().pack_uint(x, width)  # type: ignore[safe-super]
        out = self.zeros((len(x) * width + 7) // 8, "uint8", x)
        load().pack(x, width, out)
        return out

    def unpack_uint(self, data: Array, width: int, count: int) -> Array:
        if not self.taken(data, "uint8") or not 1 <= width <= _WIDEST or 8 * len(data) < count * width:
            return super().unpack_uint(data, width, count)  # type: ignore[safe-super]
        out = self.zeros(count, "int64", data)
        load().unpack(data, 0, width, out)
        return out

    def checksum(self, data: Array) -> int:
        if not self.taken(data, "uint8") or len(data) % 4:
            return super().checksum(data)  # type: ignore[safe-super]
        total: int = load().checksum(data)
        return total
