"""The reference primitives, in numpy: the oracle that every other backend is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.ops.native.kernels import NativeKernels


class NumpyOps(Ops):
    """Primitives over numpy arrays in host memory (little-endian machines)."""

    name = "numpy"

    def flat32(self, x: Array) -> Array:
        # A float64 beyond float32 becomes infinity, which the engine looks for.
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(x, dtype=np.float32).reshape(-1)

    def zeros(self, count: int, dtype: str, like: Array) -> Array:
        return np.zeros(count, dtype)

    def arange(self, count: int, like: Array) -> Array:
        return np.arange(count, dtype=np.int64)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.astype(dtype)

    def bytes_of(self, x: Array) -> Array:
        return np.ascontiguousarray(x).view(np.uint8)

    def from_bytes(self, data: Array, dtype: str) -> Array:
        return np.ascontiguousarray(data).view(dtype)

    def pack_float(self, x: Array, kind: str) -> Array:
        if kind != "bfloat16":
            # A value beyond float16's range becomes infinity, as IEEE says: the caller limits it if that matters.
            with np.errstate(over="ignore"):
                return x.astype(kind).view(np.uint8)
        # numpy has no bfloat16: keep the upper half of each word, rounded to nearest even.
        words = x.view(np.uint32)
        rounded = words + (0x7FFF + ((words >> 16) & 1)).astype(np.uint32)
        upper = np.where(np.isnan(x), 0x7FC0, rounded >> 16)
        return upper.astype(np.uint16).view(np.uint8)

    def unpack_float(self, data: Array, kind: str) -> Array:
        data = np.ascontiguousarray(data)
        if kind == "bfloat16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return data.view(kind).astype(np.float32)

    def to_host(self, data: Array) -> bytes:
        return bytes(data)

    def from_host(self, data: bytes, like: Array) -> Array:
        return np.frombuffer(data, np.uint8)

    def nonzero(self, mask: Array) -> Array:
        return np.flatnonzero(mask)

    def take(self, x: Array, positions: Array) -> Array:
        return x[positions]

    def put(self, x: Array, positions: Array, values: Array) -> Array:
        x[positions] = values
        return x

    def put_add(self, x: Array, positions: Array, values: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            x[positions] += values
        return x

    def scatter_add(self, x: Array, positions: Array, values: Array) -> Array:
        np.add.at(x, positions, values)
        return x

    def accumulate(self, x: Array, y: Array) -> Array:
        # Gradients of 1e38 may overflow here: the engine looks for infinities afterwards.
        with np.errstate(over="ignore", invalid="ignore"):
            x += y
        return x

    def divide(self, x: Array, divisor: int) -> Array:
        x /= np.float32(divisor)
        return x

    def clear(self, x: Array) -> Array:
        x.fill(0)
        return x

    def concat(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def interleave(self, parts: Sequence[Array]) -> Array:
        return np.stack(parts, axis=1).reshape(-1)

    def copy(self, x: Array) -> Array:
        return x.copy()

    def where(self, mask: Array, x: Array, y: Array | float) -> Array:
        return np.where(mask, x, np.asarray(y, dtype=x.dtype))

    def abs(self, x: Array) -> Array:
        return np.abs(x)

    def round(self, x: Array) -> Array:
        return np.rint(x)

    def floor(self, x: Array) -> Array:
        return np.floor(x)

    def sqrt(self, x: Array) -> Array:
        return np.sqrt(x)

    def clip(self, x: Array, low: float, high: float) -> Array:
        return np.clip(x, low, high)

    def kth_largest(self, x: Array, k: int) -> float:
        return float(np.partition(x, len(x) - k)[len(x) - k])

    def search_sorted(self, bounds: Array, x: Array) -> Array:
        return np.searchsorted(bounds, x, side="left").astype(np.int64, copy=False)

    def row_max(self, x: Array, columns: int) -> Array:
        return x.reshape(-1, columns).max(axis=1)

    def repeat(self, x: Array, times: int) -> Array:
        return np.repeat(x, times)

    def cumsum(self, x: Array) -> Array:
        return np.cumsum(x, dtype=np.int64)

    def total(self, x: Array) -> int:
        return int(x.sum(dtype=np.int64))

    def matmul(
        self,
        x: Array,
        y: Array,
        rows: int,
        inner: int,
        columns: int,
        *,
        x_transposed: bool = False,
        y_transposed: bool = False,
    ) -> Array:
        left = x.reshape(inner, rows).T if x_transposed else x.reshape(rows, inner)
        right = y.reshape(columns, inner).T if y_transposed else y.reshape(inner, columns)
        # Values that are not finite, or too large to multiply, are found afterwards.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(left @ right).reshape(-1)

    def all_finite(self, x: Array) -> bool:
        return bool(np.isfinite(x).all())

    def shift_right(self, x: Array, bits: int) -> Array:
        return x >> bits

    def bit_and(self, x: Array, mask: int) -> Array:
        return x & mask

    def bit_xor(self, x: Array, y: Array | int) -> Array:
        return x ^ y

    def pack_bits(self, bits: Array) -> Array:
        return np.packbits(bits, bitorder="little")

    def unpack_bits(self, data: Array, count: int) -> Array:
        return np.unpackbits(data, count=count, bitorder="little")

    def pack_uint(self, x: Array, width: int) -> Array:
        if width == 0:
            return np.zeros(0, np.uint8)
        octets = x.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : (width + 7) // 8]
        bits = np.unpackbits(np.ascontiguousarray(octets), axis=1, bitorder="little")[:, :width]
        return np.packbits(bits, bitorder="little")

    def unpack_uint(self, data: Array, width: int, count: int) -> Array:
        if width == 0:
            return np.zeros(count, np.int64)
        bits = np.unpackbits(data, count=count * width, bitorder="little").reshape(count, width)
        octets = np.zeros((count, 8), np.uint8)
        packed = np.packbits(bits, axis=1, bitorder="little")
        octets[:, : packed.shape[1]] = packed
        return octets.view("<i8").reshape(-1)

    def checksum(self, data: Array) -> int:
        words = data.view(np.uint32).astype(np.int64)
        with np.errstate(over="ignore"):
            return int((words * (2 * np.arange(len(words), dtype=np.int64) + 1)).sum()) & 0xFFFFFFFF

    def dtype_of(self, x: Array) -> str:
        return str(x.dtype)


class NativeNumpyOps(NativeKernels, NumpyOps):
    """The same, by the native kernels where they reach."""

    def reachable(self, x: Array, dtype: str, written: bool = False) -> bool:
        flags = x.flags
        return bool(x.dtype == dtype and flags.c_contiguous and flags.aligned and (flags.writeable or not written))

    def address(self, x: Array) -> int:
        start: int = x.__array_interface__["data"][0]
        return start

    def length(self, x: Array) -> int:
        return len(x)

    def room(self, count: int, dtype: str, like: Array) -> Array:
        return np.empty(count, dtype)
