"""`hvd.allreduce(tensor, compression=TopKInt8)` outside an optimizer, without changing Horovod.

Horovod calls `compress`, adds up what it returns, and calls `decompress`; it tells neither the operation nor the
process set. So `compress` hands out a token: a one and, for each rank of the job, a one in that rank's place. What
comes back shows who took part, and whether the operation was a sum or an average and with which factors. Only then are
the payloads exchanged, so that an operation that has no meaning for them is an error before anything can hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common import process_sets
from horovod.torch import mpi_ops

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.compressors.base import LocalContext, decode_locally, doors, encode_locally, require_finite
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.errors import UnsupportedError
from hvd_gradcomp.ops import backend
from hvd_gradcomp.torch.transport import HorovodTransport


@dataclass(frozen=True)
class _Waiting:
    """A tensor that waits for its token."""

    tensor: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype


class Tokens:
    """The torch door's side of `compress` and `decompress`."""

    @staticmethod
    def install() -> None:
        """Let compressors find this door for torch tensors."""
        doors["torch"] = Tokens()

    def compress(self, compressor: Compressor, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A token for `tensor`, or the payload itself where Horovod is not running.

        Raises:
            UnsupportedError: the result would have to be differentiable.
            NonFiniteError: the tensor holds NaN or infinity.
        """
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                "a compressed allreduce has no gradient: pass tensor.detach(), or call it under torch.no_grad()"
            )
        ops = backend("torch")
        if not hvd.is_initialized():
            return encode_locally(compressor, ops, tensor)
        if compressor.meets == "dense":
            return tensor, None
        x = ops.copy(ops.flat32(tensor))
        require_finite(ops, x)
        token = torch.zeros(1 + hvd.size(), dtype=torch.float64, device=tensor.device)
        token[0] = token[1 + hvd.rank()] = 1
        return token, _Waiting(x, tensor.shape, tensor.dtype)

    def decompress(self, compressor: Compressor, token: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The sum or average that `token` asks for, of what the workers' payloads decode to.

        Raises:
            UnsupportedError: the operation was neither Sum nor Average.
        """
        if isinstance(ctx, LocalContext):
            restored: torch.Tensor = decode_locally(compressor, token, ctx)
            return restored
        ranks, factor = _read(token.cpu(), compressor)
        total = _sum(compressor, ctx.tensor, tuple(ctx.shape), ranks)
        return (total * factor).view(ctx.shape).to(ctx.dtype)


def _read(token: torch.Tensor, compressor: Compressor) -> tuple[list[int], float]:
    """Who took part, and the factor that their sum is to be multiplied by."""
    ranks = [rank for rank, mark in enumerate(token[1:].tolist()) if mark != 0]
    marks = token[1:][ranks]
    factor = float(token[0]) / max(len(ranks), 1)
    if not ranks or not torch.allclose(marks, torch.full_like(marks, factor)):
        raise UnsupportedError(
            f"{compressor} can be used with op=hvd.Sum and op=hvd.Average only (this was Min, Max, Product or Adasum): "
            "its payloads are decoded and added, nothing else"
        )
    return ranks, factor


def _sum(compressor: Compressor, x: torch.Tensor, shape: tuple[int, ...], ranks: list[int]) -> torch.Tensor:
    """The sum over `ranks` of the workers' compressed `x`; without error feedback, since there is no next step."""
    parameter = Parameter("hvd_gradcomp.allreduce", len(x), "float32", shape)
    engine = Engine(compressor, [parameter], HorovodTransport(_process_set(ranks)), average=False)
    engine.submit(parameter.name, x)
    total: torch.Tensor = engine.finish()[parameter.name]
    return total


def _process_set(ranks: list[int]) -> hvd.ProcessSet:
    """The process set of exactly `ranks`."""
    for number, members in mpi_ops._basics._get_process_set_ids_and_ranks().items():
        if list(members) == ranks:
            found = process_sets._temp_process_set_object(number)
            found.ranks = ranks
            return found
    raise UnsupportedError(f"no process set holds exactly the ranks {ranks} that took part in this allreduce")
