"""All that the layer calls, in one module that imports Triton."""

from hvd_gradcomp.ops.triton.bits import checksum, pack, unpack
from hvd_gradcomp.ops.triton.frames import (
    decode_add,
    decode_mean,
    decode_positions,
    encode_linear8,
    encode_positions,
    encode_sparse8,
)
from hvd_gradcomp.ops.triton.select import Seen, look, top_positions

__all__ = [
    "Seen",
    "checksum",
    "decode_add",
    "decode_mean",
    "decode_positions",
    "encode_linear8",
    "encode_positions",
    "encode_sparse8",
    "look",
    "pack",
    "top_positions",
    "unpack",
]
