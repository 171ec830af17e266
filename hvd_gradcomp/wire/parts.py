"""Reading and writing the parts of a frame: small headers on the host, bulk bytes wherever the arrays live."""

from __future__ import annotations

import struct

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops

ALIGNMENT = 4


class Reader:
    """Walks over uint8 `data`, never past its end.

    Raises:
        PayloadError: from any method, when fewer bytes are left than asked for.
    """

    def __init__(self, ops: Ops, data: Array) -> None:
        self.ops = ops
        self.data = data
        self.position = 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self.data) - self.position

    def bytes(self, count: int) -> Array:
        """The next `count` bytes; the padding behind them is skipped."""
        if count < 0 or count > self.left:
            raise PayloadError(f"payload is truncated: {count} bytes expected, {self.left} left")
        start = self.position
        self.position = min(start + count + (-count % ALIGNMENT), len(self.data))
        return self.data[start : start + count]

    def header(self, layout: struct.Struct) -> tuple[int, ...]:
        """The next fields in `layout`."""
        return layout.unpack(self.ops.to_host(self.bytes(layout.size)))

    def end(self) -> None:
        """Assert that nothing is left."""
        if self.left:
            raise PayloadError(f"payload has {self.left} bytes more than its headers say")


def write(ops: Ops, like: Array, *parts: bytes | Array) -> Array:
    """Headers (bytes) and uint8 arrays one after another, each padded to ALIGNMENT."""
    arrays = (ops.from_host(part, like) if isinstance(part, bytes) else part for part in parts)
    return ops.concat([ops.pad(array, ALIGNMENT) for array in arrays])
