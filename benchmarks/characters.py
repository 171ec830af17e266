"""A small character model and the text it learns: Python's own standard library, which is wherever Python is."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn


def standard_library_text(count: int) -> torch.Tensor:
    """The first `count` characters as int64 in [0, 128); what is not ASCII is 127."""
    folder = Path(re.__file__).parent.parent
    text = "".join(path.read_text(errors="ignore") for path in sorted(folder.glob("*.py")))
    return torch.tensor([min(ord(each), 127) for each in text[:count]])


class Characters(nn.Module):
    """A causal transformer of four layers over ASCII."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.layers(self.embed(x) + self.places, mask=mask, is_causal=True))
