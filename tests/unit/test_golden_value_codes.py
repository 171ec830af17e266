"""Golden bytes: what each code writes for one fixed gradient must never change unless the format's version does.

A checkpoint or a worker of another release depends on them; every backend has to give the same.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from arrays import array_of, bits_of
from value_codes import CONTEXT

from hvd_gradcomp.compressors import TopK, ValueCode, compression_from_spec
from hvd_gradcomp.ops import Ops

#: Spec -> CRC-32 of the frame of all values, and of the frame behind `TopK(0.1)`.
GOLDEN = {
    "none": (0xAFE0AE2B, 0x92271AA4),
    "fp16": (0x9BBF8227, 0x2ECAB5C9),
    "bf16": (0xDA718348, 0x0BC49D73),
    "int8": (0xECEA301D, 0x682C90D4),
    "int8(block=None)": (0xD5126ADA, 0x9DBD1C2F),
    "linear(bits=2)": (0xFB7DD276, 0x14044FA3),
    "linear(bits=3)": (0x53E82197, 0xA4A083E3),
    "linear": (0x683EE83A, 0x8F6DD614),
    "linear(bits=7, block=64)": (0x20F0AECF, 0x7FB5BFC3),
    "linear(rounding='stochastic')": (0x74D45693, 0x0182C26F),
    "linear(bits=8, rounding='stochastic', seed=1)": (0x7261A9E6, 0xAE64B2A5),
    "qsgd": (0xA53B9FA9, 0x3F85B412),
    "qsgd(levels=100, norm='max', bucket=None)": (0x918E1125, 0xAFD77553),
    "terngrad": (0x8045C923, 0xEB2535ED),
    "terngrad(clip=None, block=128, seed=2)": (0x64E155D4, 0xDD50967E),
    "natural": (0x7DCE2D41, 0x5986DAB2),
    "dynamic8": (0x45BC3210, 0x92FAC510),
    "dynamic8(block=64)": (0x0A86FF45, 0xD88E2839),
    "sign": (0xFE2B2203, 0x94FF8329),
    "scaled_sign": (0xC86C6A56, 0x570974B0),
    "scaled_sign(block=64)": (0x7E58F84E, 0xDA44FABA),
    "onebit": (0x6DAC454D, 0xE796C84F),
    "onebit(block=None)": (0x21CF9E5C, 0xB62F131E),
}


def fixed_gradient() -> np.ndarray:
    """1000 values of both signs over nine decades, with zeros, by integer arithmetic alone."""
    index = np.arange(1000)
    fraction = (index * 2654435761 % 2**32 - 2**31) / 2**31
    return (fraction * 10.0 ** (index % 9 - 6) * (index % 13 != 0)).astype(np.float32)


@pytest.mark.parametrize("spec", sorted(GOLDEN))
def test_bytes_have_not_changed(ops: Ops, spec: str) -> None:
    code = compression_from_spec(spec)
    assert isinstance(code, ValueCode)
    found = []
    for method in (code, TopK(0.1) >> code):
        frame, _ = method.encode(ops, array_of(ops, fixed_gradient()), CONTEXT)
        found.append(zlib.crc32(bits_of(frame)))
    assert tuple(found) == GOLDEN[spec], f"{spec} now gives {tuple(map(hex, found))}"
