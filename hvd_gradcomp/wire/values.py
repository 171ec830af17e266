"""Value codes: the kept values, as bytes that say how to read themselves (see `codes` for the list).

Only layouts live in this room; how values are rounded to levels is the business of a compressor.
"""

from __future__ import annotations

from collections.abc import Callable

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Array
from hvd_gradcomp.ops.base import FLOAT_BYTES, Ops
from hvd_gradcomp.wire import levels, nonuniform, powers, signs, trits
from hvd_gradcomp.wire.codes import DYNAMIC8, HEADER, LEVELS, LEVELS_GAMMA, LINEAR8, POWERS, TRITS, TWO_VALUES
from hvd_gradcomp.wire.parts import Reader, write

#: The float formats, by their code.
FLOAT_KINDS = ("float32", "float16", "bfloat16")
#: Code -> the function that reads what follows the header: (reader, the header's two numbers, count) to values.
_DECODERS: dict[int, Callable[[Reader, int, int, int], Array]] = {
    LINEAR8: levels.decode_linear8,
    LEVELS: levels.decode_levels,
    LEVELS_GAMMA: levels.decode_gamma_levels,
    TRITS: trits.decode_trits,
    TWO_VALUES: signs.decode_two_values,
    POWERS: powers.decode_powers,
    DYNAMIC8: nonuniform.decode_dynamic8,
}


def encode_floats(ops: Ops, values: Array, kind: str) -> Array:
    """float32 `values` (count,) in the float format `kind` ("float32", "float16", "bfloat16")."""
    header = HEADER.pack(FLOAT_KINDS.index(kind), 0, 0)
    return write(ops, values, header, ops.pack_float(values, kind))


def decode_values(reader: Reader, count: int) -> Array:
    """The next `count` values as float32.

    Raises:
        PayloadError: the bytes are no valid value code.
    """
    code, first, second = reader.header(HEADER)
    if code < len(FLOAT_KINDS):
        kind = FLOAT_KINDS[code]
        return reader.ops.unpack_float(reader.bytes(FLOAT_BYTES[kind] * count), kind)
    if code in _DECODERS:
        return _DECODERS[code](reader, first, second, count)
    raise PayloadError(f"unknown value code {code}")
