"""The primitives in TensorFlow operations: they run wherever the eager tensor lives.

Eager tensors never change, so nothing here works in place. On CPU, TensorFlow flushes subnormal numbers to zero in all
its arithmetic, down to `a + b` on tensors, and no formulation of the methods here could change what the operators do.
The door for TensorFlow therefore hands CPU tensors to the engine as numpy views without a copy, where all values are
exact, and this class serves the tensors that live elsewhere. On CPU it gives the same bytes for the same values as
long as no value, difference or product is subnormal (below 1.2e-38).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvd_gradcomp.ops.base import Array, Ops

_DTYPES = {
    "float32": tf.float32,
    "float16": tf.float16,
    "bfloat16": tf.bfloat16,
    "int64": tf.int64,
    "int32": tf.int32,
    "int8": tf.int8,
    "uint8": tf.uint8,
}


class TensorFlowOps(Ops):
    """Primitives over eager tensors; inside a `tf.function` they need a `tf.py_function` around them."""

    name = "tensorflow"

    def flat32(self, x: Array) -> Array:
        return tf.reshape(tf.cast(x, tf.float32), [-1])

    def zeros(self, count: int, dtype: str, like: Array) -> Array:
        with tf.device(like.device):
            return tf.zeros([count], _DTYPES[dtype])

    def arange(self, count: int, like: Array) -> Array:
        with tf.device(like.device):
            return tf.range(count, dtype=tf.int64)

    def cast(self, x: Array, dtype: str) -> Array:
        return tf.cast(x, _DTYPES[dtype])

    def bytes_of(self, x: Array) -> Array:
        return tf.reshape(tf.bitcast(x, tf.uint8), [-1])

    def from_bytes(self, data: Array, dtype: str) -> Array:
        size = _DTYPES[dtype].size
        return tf.bitcast(data if size == 1 else tf.reshape(data, [-1, size]), _DTYPES[dtype])

    def pack_float(self, x: Array, kind: str) -> Array:
        if kind != "bfloat16":
            return self.bytes_of(tf.cast(x, _DTYPES[kind]))
        # TensorFlow's own cast differs between devices on values halfway: keep the upper half of each word, rounded.
        words = tf.cast(tf.bitcast(x, tf.int32), tf.int64) & 0xFFFFFFFF
        rounded = self.shift_right(words + 0x7FFF + (self.shift_right(words, 16) & 1), 16)
        upper = tf.where(tf.math.is_nan(x), tf.constant(0x7FC0, tf.int64), rounded)
        return self.bytes_of(tf.cast(upper & 0xFFFF, tf.uint16))

    def unpack_float(self, data: Array, kind: str) -> Array:
        if kind == "bfloat16":
            words = tf.cast(tf.bitcast(tf.reshape(data, [-1, 2]), tf.uint16), tf.int32)
            return tf.bitcast(tf.bitwise.left_shift(words, 16), tf.float32)
        return tf.cast(self.from_bytes(data, kind), tf.float32)

    def to_host(self, data: Array) -> bytes:
        return bytes(data.numpy())

    def from_host(self, data: bytes, like: Array) -> Array:
        with tf.device(like.device):
            return tf.constant(np.frombuffer(data, np.uint8))

    def nonzero(self, mask: Array) -> Array:
        return tf.reshape(tf.where(mask), [-1])

    def take(self, x: Array, positions: Array) -> Array:
        return tf.gather(x, positions)

    def put(self, x: Array, positions: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_update(x, positions[:, None], values)

    def put_add(self, x: Array, positions: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_add(x, positions[:, None], values)

    def scatter_add(self, x: Array, positions: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_add(x, positions[:, None], values)

    def accumulate(self, x: Array, y: Array) -> Array:
        return x + y

    def divide(self, x: Array, divisor: int) -> Array:
        return x / divisor

    def clear(self, x: Array) -> Array:
        return tf.zeros_like(x)

    def concat(self, parts: Sequence[Array]) -> Array:
        return tf.concat(list(parts), 0)

    def interleave(self, parts: Sequence[Array]) -> Array:
        return tf.reshape(tf.stack(list(parts), axis=1), [-1])

    def copy(self, x: Array) -> Array:
        return tf.identity(x)

    def where(self, mask: Array, x: Array, y: Array | float) -> Array:
        return tf.where(mask, x, tf.cast(y, x.dtype))

    def abs(self, x: Array) -> Array:
        return tf.abs(x)

    def round(self, x: Array) -> Array:
        return tf.round(x)

    def floor(self, x: Array) -> Array:
        return tf.floor(x)

    def sqrt(self, x: Array) -> Array:
        # In double precision first: a GPU's float32 root may be off in the last bit, and this rounds to the right one.
        return tf.cast(tf.sqrt(tf.cast(x, tf.float64)), tf.float32)

    def clip(self, x: Array, low: float, high: float) -> Array:
        return tf.clip_by_value(x, low, high)

    def kth_largest(self, x: Array, k: int) -> float:
        return float(tf.math.top_k(x, k, sorted=True).values[-1])

    def search_sorted(self, bounds: Array, x: Array) -> Array:
        return tf.searchsorted(bounds, x, side="left", out_type=tf.int64)

    def row_max(self, x: Array, columns: int) -> Array:
        return tf.reduce_max(tf.reshape(x, [-1, columns]), axis=1)

    def repeat(self, x: Array, times: int) -> Array:
        return tf.repeat(x, times)

    def cumsum(self, x: Array) -> Array:
        return tf.cumsum(x)

    def total(self, x: Array) -> int:
        return int(tf.reduce_sum(tf.cast(x, tf.int64)))

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
        left = tf.reshape(x, [inner, rows] if x_transposed else [rows, inner])
        right = tf.reshape(y, [columns, inner] if y_transposed else [inner, columns])
        return tf.reshape(tf.matmul(left, right, transpose_a=x_transposed, transpose_b=y_transposed), [-1])

    def all_finite(self, x: Array) -> bool:
        return bool(tf.reduce_all(tf.math.is_finite(x)))

    def shift_right(self, x: Array, bits: int) -> Array:
        return tf.bitwise.right_shift(x, tf.constant(bits, x.dtype))

    def bit_and(self, x: Array, mask: int) -> Array:
        return tf.bitwise.bitwise_and(x, tf.constant(mask, x.dtype))

    def bit_xor(self, x: Array, y: Array | int) -> Array:
        return tf.bitwise.bitwise_xor(x, tf.convert_to_tensor(y, x.dtype))

    def pack_bits(self, bits: Array) -> Array:
        octets = tf.reshape(self.pad(bits, 8), [-1, 8])
        weights = tf.constant([1, 2, 4, 8, 16, 32, 64, 128], tf.int32)
        return tf.cast(tf.reduce_sum(tf.cast(octets, tf.int32) * weights, axis=1), tf.uint8)

    def unpack_bits(self, data: Array, count: int) -> Array:
        bits = tf.bitwise.right_shift(data[:, None], tf.constant(range(8), tf.uint8)) & tf.constant(1, tf.uint8)
        return tf.reshape(bits, [-1])[:count]

    def pack_uint(self, x: Array, width: int) -> Array:
        if width == 0:
            return self.zeros(0, "uint8", x)
        bits = tf.bitwise.right_shift(x[:, None], tf.range(width, dtype=tf.int64)) & 1
        return self.pack_bits(tf.reshape(tf.cast(bits, tf.uint8), [-1]))

    def unpack_uint(self, data: Array, width: int, count: int) -> Array:
        if width == 0:
            return self.zeros(count, "int64", data)
        bits = tf.cast(tf.reshape(self.unpack_bits(data, count * width), [count, width]), tf.int64)
        return tf.reduce_sum(tf.bitwise.left_shift(bits, tf.range(width, dtype=tf.int64)), axis=1)

    def checksum(self, data: Array) -> int:
        words = tf.cast(self.from_bytes(data, "int32"), tf.int64)
        # Signed words differ from unsigned ones by a multiple of 2**32, which the final mask removes.
        return int(tf.reduce_sum(words * (2 * self.arange(len(words), words) + 1))) & 0xFFFFFFFF

    def dtype_of(self, x: Array) -> str:
        return str(x.dtype.name)
