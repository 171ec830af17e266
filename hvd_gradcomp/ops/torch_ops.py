"""The primitives in torch operations: they run wherever the tensor lives, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.ops.native.kernels import NativeKernels
from hvd_gradcomp.ops.triton.kernels import TritonKernels

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
# Integers whose bits are laid out at once, as 8 bytes each: many enough for a GPU, few enough to cost no memory.
_CHUNK = 1 << 18
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TorchOps(Ops):
    """Primitives over torch tensors; nothing here is recorded by autograd."""

    name = "torch"

    def flat32(self, x: Array) -> Array:
        return x.detach().reshape(-1).to(torch.float32).contiguous()

    def zeros(self, count: int, dtype: str, like: Array) -> Array:
        return torch.zeros(count, dtype=_DTYPES[dtype], device=like.device)

    def arange(self, count: int, like: Array) -> Array:
        return torch.arange(count, dtype=torch.int64, device=like.device)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.to(_DTYPES[dtype])

    def bytes_of(self, x: Array) -> Array:
        return _viewed(x.contiguous(), torch.uint8)

    def from_bytes(self, data: Array, dtype: str) -> Array:
        size = _DTYPES[dtype].itemsize
        # A view needs a start aligned to the item: a slice out of a gathered buffer may not have one.
        if data.storage_offset() % size or not data.is_contiguous():
            data = data.clone()
        return _viewed(data, _DTYPES[dtype])

    def pack_float(self, x: Array, kind: str) -> Array:
        return _viewed(x.to(_DTYPES[kind]), torch.uint8)

    def unpack_float(self, data: Array, kind: str) -> Array:
        return self.from_bytes(data, kind).to(torch.float32)

    def to_host(self, data: Array) -> bytes:
        return data.cpu().numpy().tobytes()

    def from_host(self, data: bytes, like: Array) -> Array:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(like.device)

    def nonzero(self, mask: Array) -> Array:
        return mask.nonzero().reshape(-1)

    def take(self, x: Array, positions: Array) -> Array:
        return x.index_select(0, positions)

    def put(self, x: Array, positions: Array, values: Array) -> Array:
        return x.index_copy_(0, positions, values)

    def put_add(self, x: Array, positions: Array, values: Array) -> Array:
        return x.index_add_(0, positions, values)

    def scatter_add(self, x: Array, positions: Array, values: Array) -> Array:
        return x.index_add_(0, positions, values)

    def accumulate(self, x: Array, y: Array) -> Array:
        return x.add_(y)

    def divide(self, x: Array, divisor: int) -> Array:
        # By a tensor: for a plain number a GPU would multiply by its reciprocal, and round differently.
        return x.div_(x.new_full((), divisor))

    def clear(self, x: Array) -> Array:
        return x.zero_()

    def concat(self, parts: Sequence[Array]) -> Array:
        return torch.cat(list(parts))

    def interleave(self, parts: Sequence[Array]) -> Array:
        return torch.stack(list(parts), dim=1).reshape(-1)

    def copy(self, x: Array) -> Array:
        return x.clone()

    def where(self, mask: Array, x: Array, y: Array | float) -> Array:
        return torch.where(mask, x, y)

    def abs(self, x: Array) -> Array:
        return x.abs()

    def round(self, x: Array) -> Array:
        return x.round()

    def floor(self, x: Array) -> Array:
        return x.floor()

    def sqrt(self, x: Array) -> Array:
        # In double precision first: a GPU's float32 root may be off in the last bit, and this rounds to the right one.
        return x.to(torch.float64).sqrt().to(torch.float32)

    def clip(self, x: Array, low: float, high: float) -> Array:
        return x.clamp(low, high)

    def kth_largest(self, x: Array, k: int) -> float:
        return float(torch.topk(x, k, sorted=False).values.min())

    def search_sorted(self, bounds: Array, x: Array) -> Array:
        return torch.searchsorted(bounds, x)

    def row_max(self, x: Array, columns: int) -> Array:
        return x.reshape(-1, columns).amax(dim=1)

    def repeat(self, x: Array, times: int) -> Array:
        return x.repeat_interleave(times)

    def cumsum(self, x: Array) -> Array:
        return x.cumsum(0)

    def total(self, x: Array) -> int:
        return int(x.sum())

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
        left = x.reshape(inner, rows).t() if x_transposed else x.reshape(rows, inner)
        right = y.reshape(columns, inner).t() if y_transposed else y.reshape(inner, columns)
        return (left @ right).reshape(-1)

    def all_finite(self, x: Array) -> bool:
        # One pass and no temporary: the extremes are NaN or infinite exactly if some value is.
        return not len(x) or all(bool(extreme.isfinite()) for extreme in x.aminmax())

    def shift_right(self, x: Array, bits: int) -> Array:
        return x >> bits

    def bit_and(self, x: Array, mask: int) -> Array:
        return x & mask

    def bit_xor(self, x: Array, y: Array | int) -> Array:
        return x ^ y

    def pack_bits(self, bits: Array) -> Array:
        octets = self.pad(bits, 8).view(-1, 8)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
        return (octets * weights).sum(dim=1, dtype=torch.uint8)

    def unpack_bits(self, data: Array, count: int) -> Array:
        shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
        return ((data.unsqueeze(1) >> shifts) & 1).reshape(-1)[:count]

    def pack_uint(self, x: Array, width: int) -> Array:
        if width == 0 or not len(x):
            return self.zeros(0, "uint8", x)
        shifts = torch.arange(width, dtype=torch.int64, device=x.device)
        return torch.cat(
            [
                self.pack_bits(((part.unsqueeze(1) >> shifts) & 1).to(torch.uint8).reshape(-1))
                for part in x.split(_CHUNK)
            ]
        )

    def unpack_uint(self, data: Array, width: int, count: int) -> Array:
        if width == 0 or not count:
            return self.zeros(count, "int64", data)
        shifts = torch.arange(width, dtype=torch.int64, device=data.device)
        values = torch.empty(count, dtype=torch.int64, device=data.device)
        for part, octets in zip(values.split(_CHUNK), data.split(_CHUNK // 8 * width), strict=False):
            bits = self.unpack_bits(octets, len(part) * width).view(len(part), width).to(torch.int64)
            torch.sum(bits << shifts, dim=1, out=part)
        return values

    def checksum(self, data: Array) -> int:
        words = self.from_bytes(data, "int32").to(torch.int64)
        # Signed words differ from unsigned ones by a multiple of 2**32, which the final mask removes.
        return int((words * (2 * self.arange(len(words), words) + 1)).sum()) & 0xFFFFFFFF

    def dtype_of(self, x: Array) -> str:
        return _NAMES[x.dtype]


def _viewed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # An empty tensor may have a stride of 0, for example one made from numpy, of which torch refuses such a view.
    return x.view(dtype) if len(x) else x.new_empty(0, dtype=dtype)


class NativeTorchOps(NativeKernels, TorchOps):
    """The same, by the native kernels for tensors on the CPU."""

    def reachable(self, x: Array, dtype: str, written: bool = False) -> bool:
        return x.dtype is _DTYPES[dtype] and x.is_cpu and x.is_contiguous()

    def address(self, x: Array) -> int:
        return int(x.data_ptr())

    def length(self, x: Array) -> int:
        return int(x.numel())

    def room(self, count: int, dtype: str, like: Array) -> Array:
        return torch.empty(count, dtype=_DTYPES[dtype], device=like.device)


class TritonTorchOps(TritonKernels, TorchOps):
    """The same, by Triton's kernels for tensors on GPUs."""


class TritonNativeTorchOps(TritonKernels, NativeTorchOps):
    """The same, by Triton's kernels for tensors on GPUs and native ones for those on the CPU."""
