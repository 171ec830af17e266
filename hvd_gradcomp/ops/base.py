"""The array primitives that every backend provides, and what can be said once in terms of them.

Arrays are flat (one dimension) unless a method says otherwise. Arithmetic (`+ - * /`), comparisons and slicing are
used directly on arrays; everything that frameworks spell differently is a method here. All integer work is done in
int64, so that no backend needs unsigned types; all rounding is IEEE, so that every backend gives the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.ops import philox, selection

# An array of any backend. The backends share no base class that a type checker could name.
Array = Any

#: The float formats that can travel, with their size in bytes.
FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Corrected(NamedTuple):
    """A gradient with its residual added, and what was seen of it in the same pass.

    Attributes:
        x: float32, shape (n,).
        finite: whether no value is NaN or infinite; on a GPU an object that waits for the answer when it is asked, so
            that the host may put more work on the device before.
        candidates: where the largest magnitudes are, for `Ops.top_positions` at these values; None when nobody looked.
            It saves time and never changes what is selected.
    """

    x: Array
    finite: object
    candidates: object = None


class Ops(ABC):
    """Primitives over the arrays of one framework."""

    name: str

    # -- making and converting ------------------------------------------------------------------------------------

    @abstractmethod
    def flat32(self, x: Array) -> Array:
        """`x` of any shape and float dtype as a flat contiguous float32 array; no copy where it is one already."""

    @abstractmethod
    def zeros(self, count: int, dtype: str, like: Array) -> Array:
        """`count` zeros of `dtype` ("float32", "int64", "uint8") on the device of `like`."""

    @abstractmethod
    def arange(self, count: int, like: Array) -> Array:
        """0 ... count-1, int64, on the device of `like`."""

    @abstractmethod
    def cast(self, x: Array, dtype: str) -> Array:
        """`x` converted to `dtype` ("float32", "int64", "uint8", "int8")."""

    @abstractmethod
    def bytes_of(self, x: Array) -> Array:
        """The memory of a float32, int8 or uint8 array as a uint8 array, little endian."""

    @abstractmethod
    def from_bytes(self, data: Array, dtype: str) -> Array:
        """The reverse of `bytes_of`, for "int32" too; `len(data)` must be a multiple of the item size.

        May share memory with `data`.
        """

    @abstractmethod
    def pack_float(self, x: Array, kind: str) -> Array:
        """float32 values rounded to nearest even in format `kind` (a key of FLOAT_BYTES), as uint8."""

    @abstractmethod
    def unpack_float(self, data: Array, kind: str) -> Array:
        """The reverse of `pack_float`: float32 values from the bytes of format `kind`."""

    @abstractmethod
    def to_host(self, data: Array) -> bytes:
        """A uint8 array as bytes in host memory."""

    @abstractmethod
    def from_host(self, data: bytes, like: Array) -> Array:
        """Bytes as a uint8 array on the device of `like`."""

    # -- choosing and placing -------------------------------------------------------------------------------------

    @abstractmethod
    def nonzero(self, mask: Array) -> Array:
        """The positions at which a bool array is true, ascending, int64."""

    @abstractmethod
    def take(self, x: Array, positions: Array) -> Array:
        """`x[positions]`."""

    @abstractmethod
    def put(self, x: Array, positions: Array, values: Array) -> Array:
        """`x` with `x[positions] = values`; may change `x` in place. Positions must be distinct."""

    @abstractmethod
    def put_add(self, x: Array, positions: Array, values: Array) -> Array:
        """`x` with `x[positions] += values`; may change `x` in place. Positions must be distinct."""

    @abstractmethod
    def scatter_add(self, x: Array, positions: Array, values: Array) -> Array:
        """`x` with each of `values` added at its position, in any order; positions may repeat. May change `x`."""

    @abstractmethod
    def accumulate(self, x: Array, y: Array) -> Array:
        """`x + y`; may change `x` in place."""

    @abstractmethod
    def divide(self, x: Array, divisor: int) -> Array:
        """float32 values divided by `divisor`; may change `x` in place."""

    @abstractmethod
    def clear(self, x: Array) -> Array:
        """Zeros in the shape of `x`; may reuse its memory."""

    @abstractmethod
    def concat(self, parts: Sequence[Array]) -> Array:
        """The parts one after another; at least one part, all of one dtype."""

    @abstractmethod
    def interleave(self, parts: Sequence[Array]) -> Array:
        """The first element of every part, then the second of every part, and so on; parts of one length and dtype."""

    @abstractmethod
    def copy(self, x: Array) -> Array:
        """The same values in memory of their own."""

    @abstractmethod
    def where(self, mask: Array, x: Array, y: Array | float) -> Array:
        """`x` where `mask` is true, else `y`."""

    # -- arithmetic -----------------------------------------------------------------------------------------------

    @abstractmethod
    def abs(self, x: Array) -> Array:
        """The absolute values."""

    @abstractmethod
    def round(self, x: Array) -> Array:
        """float32 values rounded to the nearest integer, halves to even."""

    @abstractmethod
    def floor(self, x: Array) -> Array:
        """float32 values rounded down to an integer."""

    @abstractmethod
    def sqrt(self, x: Array) -> Array:
        """The square roots of float32 values >= 0, correctly rounded."""

    @abstractmethod
    def clip(self, x: Array, low: float, high: float) -> Array:
        """Values limited to [low, high]."""

    @abstractmethod
    def kth_largest(self, x: Array, k: int) -> float:
        """The k-th largest value (k = 1 is the maximum), 1 <= k <= len(x)."""

    @abstractmethod
    def search_sorted(self, bounds: Array, x: Array) -> Array:
        """For each of float32 `x`, how many of the ascending float32 `bounds` are smaller; int64."""

    @abstractmethod
    def row_max(self, x: Array, columns: int) -> Array:
        """The maxima of the rows of `x` seen as a (len(x) / columns, columns) matrix."""

    @abstractmethod
    def repeat(self, x: Array, times: int) -> Array:
        """Each element `times` times in a row."""

    @abstractmethod
    def cumsum(self, x: Array) -> Array:
        """Inclusive running sums of int64 values."""

    @abstractmethod
    def total(self, x: Array) -> int:
        """The sum of int64 (or bool) values as a Python int."""

    @abstractmethod
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
        """The product of two float32 matrices, each given row by row: (rows, inner) times (inner, columns).

        A transposed one is given as (inner, rows) or (columns, inner). Sums may be made in any order, so backends
        differ by rounding; the same backend on the same kind of machine gives the same bits.

        Returns:
            float32, shape (rows * columns,), row by row.
        """

    @abstractmethod
    def all_finite(self, x: Array) -> bool:
        """Whether no value is NaN or infinite."""

    # -- bits -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def shift_right(self, x: Array, bits: int) -> Array:
        """int64 values divided by 2**bits, rounding down: the sign bit comes in from the left."""

    @abstractmethod
    def bit_and(self, x: Array, mask: int) -> Array:
        """int64 values with all bits outside `mask` cleared."""

    @abstractmethod
    def bit_xor(self, x: Array, y: Array | int) -> Array:
        """int64 values with the bits of `y` flipped. (int64 sums and products wrap around in two's complement.)"""

    @abstractmethod
    def pack_bits(self, bits: Array) -> Array:
        """0/1 values (uint8), eight to a byte, first value in the lowest bit, zero padded, as uint8."""

    @abstractmethod
    def unpack_bits(self, data: Array, count: int) -> Array:
        """The first `count` bits of uint8 `data`, lowest bit first, as 0/1 in uint8."""

    @abstractmethod
    def pack_uint(self, x: Array, width: int) -> Array:
        """int64 values in [0, 2**width), `width` bits each, lowest bit first, zero padded to a byte, as uint8."""

    @abstractmethod
    def unpack_uint(self, data: Array, width: int, count: int) -> Array:
        """The reverse of `pack_uint`: `count` int64 values."""

    @abstractmethod
    def checksum(self, data: Array) -> int:
        """The sum of (2i + 1) * word_i modulo 2**32 over the little-endian 32-bit words of uint8 `data`.

        `len(data)` must be a multiple of 4. The weights are odd, so that no change within one word goes unseen.
        """

    # -- said once ------------------------------------------------------------------------------------------------

    def pad(self, data: Array, multiple: int) -> Array:
        """`data` followed by zeros up to a length divisible by `multiple`."""
        missing = -len(data) % multiple
        if not missing:
            return data
        return self.concat([data, self.zeros(missing, self.dtype_of(data), data)])

    def row_sum(self, x: Array, columns: int) -> Array:
        """The sums of the rows of float32 `x` seen as a matrix of `columns`, a power of two; the last may be short.

        Neighbours are added in pairs, then the sums of neighbouring pairs, and so on: this order is the same on every
        backend, where a framework's own sum is free to choose, and its error grows with log2(columns) only. The caller
        keeps subnormal numbers out, which some backends round to zero.
        """
        for _ in range(columns.bit_length() - 1):
            x = self.pad(x, 2)
            x = x[0::2] + x[1::2]
        return x

    def uniform(self, count: int, key: int, like: Array) -> Array:
        """`count` float32 draws from [0, 1), multiples of 2**-24; see `philox.uniform`."""
        return philox.uniform(self, count, key, like)

    @abstractmethod
    def dtype_of(self, x: Array) -> str:
        """The dtype's plain name, such as "float32"."""

    # -- several steps at once ------------------------------------------------------------------------------------
    #
    # A backend with kernels of its own overrides these (ops/native, ops/triton). What is left out here is said step by
    # step where it belongs: `None` asks the caller to take these steps. Either way the bytes are the same.

    def correct(self, gradient: Array, residual: Array | None, wanted: int) -> Corrected:
        """`gradient + residual` (or `gradient` alone), checked, and searched for the `wanted` largest magnitudes.

        Args:
            gradient: float32, shape (n,); its memory may be reused.
            residual: float32, shape (n,), not changed; or None.
            wanted: the k of a later `top_positions`; 0 when there will be none.
        """
        x = gradient if residual is None else self.accumulate(gradient, residual)
        return Corrected(x, self.all_finite(x))

    def top_positions(self, x: Array, k: int, candidates: object = None) -> Array:
        """The positions of the k values of largest magnitude, ascending; see `ops/selection.py`.

        Args:
            x: float32, shape (n,), all finite, 1 <= k <= n.
            candidates: what `correct` found with `wanted = k`, if these are still its values.
        """
        return selection.top_positions(self, self.abs(x), k)

    def encode_positions(self, positions: Array, size: int) -> Array | None:
        """What `wire.positions.encode_positions` writes for int64 `positions`, as uint8."""
        return None

    def decode_positions(self, data: Array, start: int, size: int, count: int) -> tuple[Array, int] | None:
        """What `wire.positions.decode_positions` reads from uint8 `data` at `start`, and where it ends.

        None also where the bytes are wrong, or stand for all positions.
        """
        return None

    def encode_linear8(self, values: Array, block: int) -> tuple[Array, Array] | None:
        """What `compressors.Linear(bits=8, block=block).encode_values` returns for float32 `values`."""
        return None

    def encode_sparse8(self, x: Array, positions: Array | None, block: int) -> Array | None:
        """The frame (uint8) of the values of `x` at `positions` (None: all) in the code of `compressors.Int8(block)`.

        The residual is made in the memory of `x`; without a frame, `x` is unchanged.
        """
        return None

    def decode_add(self, data: Array, start: int, out: Array) -> int | None:
        """Add the frame at `start` of uint8 `data` onto `out` (float32) in place; returns where it ends.

        None, with `out` unchanged, where the bytes are wrong or of a kind not known here.
        """
        return None

    def decode_mean(self, frames: Sequence[tuple[Array, int]], out: Array, divisor: int) -> list[int] | None:
        """Overwrite `out` (float32) with the sum of `frames`, in their order, divided by `divisor`, in one pass.

        Args:
            frames: for each worker, uint8 data and where its frame starts.

        Returns:
            Where each frame ends. None, with `out` holding anything, where some bytes are wrong or of a kind not known
            here.
        """
        return None
