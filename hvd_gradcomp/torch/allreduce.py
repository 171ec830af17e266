"""`hvd.allreduce(tensor, compression=TopKInt8)` outside an optimizer, without changing Horovod.

Horovod calls `compress`, adds up what it returns, and calls `decompress`; it tells neither the operation nor the
process set. So `compress` hands out a token: some numbers, and for each rank of the job a one in that rank's place.
What comes back shows who took part, whether the operation was a sum or an average and with which factors, and whether
some worker cannot go on. Only then are the payloads exchanged, so that what has no meaning for them, or cannot be sent,
is an error on every worker before anything can hang.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common import process_sets
from horovod.torch import mpi_ops

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.compressors.base import LocalContext, decode_locally, doors, encode_locally
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.errors import NonFiniteError, UnsupportedError
from hvd_gradcomp.ops import backend
from hvd_gradcomp.torch.transport import HorovodTransport


@dataclass(frozen=True)
class _Waiting:
    """A tensor that waits for its token."""

    tensor: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _Whole:
    """A tensor that is on its way uncompressed."""

    dtype: torch.dtype


# Before the ranks' places: a one, and the rank plus one. Without the latter all tokens would be of equal length, and
# Adasum, which weighs them by that, would look like a sum with a factor.
_NUMBERS = 2
_NOT_FINITE = float("nan")
_NEEDS_GRADIENT = float("inf")


class Tokens:
    """The torch door's side of `compress` and `decompress`."""

    @staticmethod
    def install() -> None:
        """Let compressors find this door for torch tensors."""
        doors["torch"] = Tokens()

    def compress(self, compressor: Compressor, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A token for `tensor`, or the payload itself where Horovod is not running.

        Small tensors (`dense_below`) and integers are handed out as they are, for Horovod to reduce.
        """
        ops = backend("torch")
        if not hvd.is_initialized():
            return encode_locally(compressor, ops, tensor)
        if not _is_compressed(compressor, tensor):
            # Horovod refuses bfloat16, and what is not contiguous.
            sent = tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
            return sent.contiguous(), _Whole(tensor.dtype)
        token = torch.zeros(_NUMBERS + hvd.size(), dtype=torch.float64, device=tensor.device)
        token[0], token[1] = 1, hvd.rank() + 1
        mark: float = 1
        x = ops.copy(ops.flat32(tensor))
        if tensor.requires_grad and torch.is_grad_enabled():
            mark = _NEEDS_GRADIENT
        elif not ops.all_finite(x):
            mark = _NOT_FINITE
        token[_NUMBERS + hvd.rank()] = mark
        return token, _Waiting(x, tensor.shape, tensor.dtype)

    def decompress(self, compressor: Compressor, token: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The sum or average that `token` asks for, of what the workers' payloads decode to.

        Raises:
            UnsupportedError: the operation was neither Sum nor Average, or the result would have to be differentiable.
            NonFiniteError: some worker's tensor holds NaN or infinity.
        """
        if isinstance(ctx, LocalContext):
            restored: torch.Tensor = decode_locally(compressor, token, ctx)
            return restored
        if isinstance(ctx, _Whole):
            return token.to(ctx.dtype)
        ranks, factor = _read(token.detach().cpu(), compressor)
        total = _sum(compressor, ctx.tensor, tuple(ctx.shape), ranks)
        return (total * factor).view(ctx.shape).to(ctx.dtype)


def _is_compressed(compressor: Compressor, tensor: torch.Tensor) -> bool:
    large = tensor.numel() >= max(compressor.dense_below, 1)
    return compressor.meets != "dense" and large and tensor.is_floating_point()


def _read(token: torch.Tensor, compressor: Compressor) -> tuple[list[int], float]:
    """Who took part, and the factor that their sum is to be multiplied by."""
    marks = token[_NUMBERS:]
    ranks = [rank for rank, mark in enumerate(marks.tolist()) if mark != 0]
    if len(token) == _NUMBERS + hvd.size() and ranks:
        _refuse(marks)
        # What a sum of their tokens is, up to a factor.
        tokens = torch.ones_like(token[: _NUMBERS + len(ranks)])
        tokens[0], tokens[1] = len(ranks), sum(ranks) + len(ranks)
        factor = float(token[0]) / len(ranks)
        if torch.allclose(torch.cat([token[:_NUMBERS], marks[ranks]]), tokens * factor):
            return ranks, factor
    raise UnsupportedError(
        f"{compressor} can be used with hvd.allreduce and hvd.grouped_allreduce, op=hvd.Sum and op=hvd.Average only "
        "(this was Min, Max, Product, Adasum or a reducescatter): its payloads are decoded and added, nothing else"
    )


def _refuse(marks: torch.Tensor) -> None:
    """Raise on every worker what keeps some worker from going on."""
    needing = [rank for rank, mark in enumerate(marks.tolist()) if mark == _NEEDS_GRADIENT]
    if needing:
        raise UnsupportedError(
            f"ranks {needing} passed a tensor that requires a gradient, and a compressed allreduce has none: "
            "pass tensor.detach(), or call it under torch.no_grad()"
        )
    unusable = [rank for rank, mark in enumerate(marks.tolist()) if math.isnan(mark)]
    if unusable:
        raise NonFiniteError(
            f"the tensors of ranks {unusable} hold NaN or infinity (as float32) and cannot be compressed: "
            "look for the cause there, or use compression=hvd.Compression.none, which passes them on"
        )


def _sum(compressor: Compressor, x: torch.Tensor, shape: tuple[int, ...], ranks: list[int]) -> torch.Tensor:
    """The sum over `ranks` of the workers' compressed `x`; without error feedback, since there is no next step."""
    parameter = Parameter("hvd_gradcomp.allreduce", len(x), "float32", shape)
    engine = Engine(compressor.without_memory(), [parameter], HorovodTransport(_process_set(ranks)), average=False)
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
