"""TernGrad with scales that all workers share, so that ternary values can be added before they are sent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from hvd_gradcomp.collectives import Allgather, Allreduce, Alltoall, Exchange, Transport
from hvd_gradcomp.compressors.base import Compressor, Item, Sent
from hvd_gradcomp.compressors.linear import check_seed, quantize
from hvd_gradcomp.compressors.terngrad import TernGrad
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.feedback import Memory, NoMemory
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.codes import WHOLE
from hvd_gradcomp.wire.trits import IN_BYTE, pack_trits, unpack_trits


@dataclass(frozen=True)
class SharedTernGrad(Compressor):
    """`TernGrad` with one scale for each tensor and all workers: s = max over the workers of their own scales.

        s = max_w s_w                                      allreduce (max) of one number a tensor; s_w as in `TernGrad`
        l_w = -1, 0 or 1, with E[l_w] = x_w / s            drawn by each worker; x_w cut at its clip c sigma_w
        sum over workers = s * sum_w l_w                   an allreduce of whole numbers, packed:
                                                           alltoall of trits, each worker adds one share, allgather

    With N workers each sends 1.6 bits a value to the others and log2(2 N + 1) bits, rounded up, for its share of the
    values, n / N; it receives about 1.6 + log2(2 N + 1) bits a value, where the gathered `TernGrad` receives 1.6 N. So
    payloads add up, at the price of a larger variance: s_w |x_w| becomes s |x_w| at workers of smaller gradients.
    Unbiased but for what is clipped, and for gradients alike on all workers as `TernGrad`. About fifteen passes, and 30
    in cache for the draws.

    For more than about four workers with gradients of similar size; no memory by default, as for `TernGrad`.

    Args:
        clip: c, at least 1, in units of sigma; None does not clip.
        seed: of the draws; workers draw differently, and anew at every step.

    References:
        W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: Ternary Gradients to Reduce Communication in
        Distributed Deep Learning", NeurIPS 2017 (scaler sharing).
    """

    meets: ClassVar[str] = "own"
    spec_name: ClassVar[str] = "terngrad_shared"

    clip: float | None = 2.5
    seed: int = 0
    memory: Memory = field(default=NoMemory(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        self._own()

    def expected_bytes(self, size: int) -> float:
        return size / IN_BYTE

    def exchange(self, ops: Ops, items: Sequence[Item], transport: Transport) -> Exchange[list[Sent] | None]:
        finite = all(ops.all_finite(item.x) for item in items)
        like = items[0].x
        if finite:
            own = ops.concat([self._own().scales(ops, item.x) for item in items])
        else:
            # One infinity is enough to tell everybody; a maximum might pass over NaN.
            own = ops.zeros(len(items), "float32", like) + float("inf")
        scales = yield Allreduce(ops.copy(own), "float32", "max")
        if not ops.all_finite(scales):
            return None
        levels = []
        residuals = []
        for place, item in enumerate(items):
            # Cut at this worker's own scale, to which its clip belongs.
            mine, scale = own[place : place + 1], scales[place : place + 1]
            limited = ops.where(item.x > mine, mine, ops.where(item.x < -mine, -mine, item.x))
            drawn, sent = quantize(ops, limited, scale, WHOLE, 1, item.context.key(self.seed))
            levels.append(drawn)
            residuals.append(item.x - sent)
        sums = yield from _add(ops, ops.concat(levels), transport)
        results = []
        start = 0
        for place, (item, residual) in enumerate(zip(items, residuals, strict=True)):
            part = sums[start : start + len(item.x)]
            start += len(item.x)
            results.append(Sent(part * scales[place : place + 1], residual))
        return results

    def _own(self) -> TernGrad:
        return TernGrad(clip=self.clip)


def _add(ops: Ops, levels: Array, transport: Transport) -> Exchange[Array]:
    """The sum over the workers of float32 `levels` (n,) in {-1, 0, 1}: float32 (n,)."""
    size, workers = len(levels), transport.workers
    bounds = [size * worker // workers for worker in range(workers + 1)]
    packed = [pack_trits(ops, levels[start:end]) for start, end in pairwise(bounds)]
    received = yield Alltoall(ops.concat(packed), tuple(len(part) for part in packed))
    mine = bounds[transport.rank + 1] - bounds[transport.rank]
    length = -(-mine // IN_BYTE)
    total = ops.zeros(mine, "int64", levels)
    for worker, rank in enumerate(transport.ranks):
        try:
            total = total + unpack_trits(ops, received[worker * length : (worker + 1) * length], mine)
        except PayloadError as error:
            raise PayloadError(f"rank {rank} sent corrupt levels: {error}") from None
    width = (2 * workers).bit_length()
    gathered = yield Allgather(ops.pack_uint(total + workers, width))
    parts = []
    position = 0
    for rank, (start, end) in zip(transport.ranks, pairwise(bounds), strict=True):
        octets = (width * (end - start) + 7) // 8
        sums = ops.unpack_uint(gathered[position : position + octets], width, end - start)
        if ops.total(sums > 2 * workers):
            raise PayloadError(f"rank {rank} sent a sum that {workers} workers cannot have")
        parts.append(sums - workers)
        position += octets
    return ops.cast(ops.concat(parts), "float32")
