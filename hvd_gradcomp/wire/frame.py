"""A frame: one tensor's positions and values behind a header: the algorithm, the tensor's size, how much is kept."""

from __future__ import annotations

import struct

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.parts import Reader, write

#: algorithm, 3 unused bytes, elements of the tensor, elements kept, bytes of the body
HEADER = struct.Struct("<B3xIII")


def write_frame(ops: Ops, algorithm: int, size: int, kept: int, *parts: Array) -> Array:
    """A frame of `algorithm` (its wire number) with `kept` of a tensor's `size` elements; parts are uint8 arrays."""
    body = sum(len(part) for part in parts)
    return write(ops, parts[0], HEADER.pack(algorithm, size, kept, body), *parts)


def frame_kept(ops: Ops, frame: Array) -> int:
    """How many elements a frame made by `write_frame` holds."""
    return int(HEADER.unpack(ops.to_host(frame[: HEADER.size]))[2])


def read_frame(reader: Reader, algorithm: int, size: int) -> tuple[Reader, int]:
    """The body of the next frame, which must be of `algorithm` and for a tensor of `size` elements; and its count.

    Raises:
        PayloadError: it is not.
    """
    found_algorithm, found_size, kept, body = reader.header(HEADER)
    if found_algorithm != algorithm:
        raise PayloadError(f"frame of algorithm {found_algorithm} where {algorithm} was expected")
    if found_size != size:
        raise PayloadError(f"frame of a tensor of {found_size} elements where one of {size} was expected")
    if kept > size:
        raise PayloadError(f"frame keeps {kept} elements of a tensor of {size}")
    return Reader(reader.ops, reader.bytes(body)), kept
