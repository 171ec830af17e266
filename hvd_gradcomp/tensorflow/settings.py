"""How gradients are to be reduced: Horovod's options, as the user gave them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.errors import ConfigurationError


@dataclass(frozen=True)
class Settings:
    """Options of `hvd.DistributedGradientTape` and `hvd.DistributedOptimizer`, under Horovod's names and conditions.

    Attributes:
        compressor: one of this package.
        op: Average or Sum.
        groups: a number of groups, groups of variables, or None.

    Raises:
        ConfigurationError: the operation is neither Average nor Sum.
    """

    compressor: Compressor
    op: Any = hvd.Average
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    groups: int | tuple[tuple[Any, ...], ...] | None = None
    process_set: hvd.ProcessSet = hvd.global_process_set
    device_dense: str = ""
    device_sparse: str = ""
    backward_passes_per_step: int = 1
    #: Horovod's own compression, where that is used instead of `compressor`.
    stock: Any = None

    def __post_init__(self) -> None:
        if self.op not in (hvd.Average, hvd.Sum):
            raise ConfigurationError(
                f"{self.compressor} works with op=hvd.Average and op=hvd.Sum, got op={self.op!r}"
                + (" (Adasum combines whole gradients, not payloads)" if self.op == hvd.Adasum else "")
            )

    @property
    def further(self) -> dict[str, object]:
        """What else the workers must have in common, by the name under which an error shows it."""
        return {} if self.stock is None else {"Horovod compression": getattr(self.stock, "__name__", str(self.stock))}

    @property
    def averages(self) -> bool:
        """Whether sums are divided by the number of workers."""
        return bool(self.op == hvd.Average)
