"""Reduce by scattering: each worker adds up what all sent of its share, compresses the sums, and sends them to all.

    x ─ select or quantize ─ a payload for each owner ─ alltoall ─ add in rank order ─ + residual of the sums
                                                     ─ select or quantize ─ a payload ─ allgather ─ decode ─ the sums

Each worker sends (N - 1) / N of two payloads, however many workers there are, where with an allgather of payloads it
sends N - 1. What is not sent of x stays with the worker, as ever; what an owner does not send of the sums stays with
the owner, as a residual of its share (`feedback/shares.py`): gradients + both residuals = what arrives + both new
residuals.

An owner that cannot read what it got tells all workers so in place of its sums, so that nobody waits for it.

References:
    C. Renggli, S. Ashkboos, M. Aghagolzadeh, D. Alistarh, T. Hoefler, "SparCML: High-Performance Sparse Communication
    for Machine Learning", SC 2019.
    S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from hvd_gradcomp.collectives import Allgather, Alltoall, Exchange
from hvd_gradcomp.compressors import Compressor, Context, Linear, TopK
from hvd_gradcomp.compressors.base import Sent
from hvd_gradcomp.compressors.chain import Sparsifier, ValueCode, encode_sparse, encode_values_at, parts_of, read_sparse
from hvd_gradcomp.engine.segments import Segment, segments_of
from hvd_gradcomp.engine.units import Unit
from hvd_gradcomp.errors import GradcompError, PayloadError
from hvd_gradcomp.feedback import NoMemory
from hvd_gradcomp.feedback.shares import join_shares, own_parts, share_of, share_size, shared_part, start_of
from hvd_gradcomp.ops import Array
from hvd_gradcomp.wire.frame import frame_kept
from hvd_gradcomp.wire.payload import Received, split_payloads, write_payload, write_refusal

if TYPE_CHECKING:
    from hvd_gradcomp.engine.passage import Passage

# The results of votes are not compressed again: in two bits where they are -1, 0 or 1 times a number, else whole.
_VERDICTS = TopK(ratio=1.0) >> Linear(bits=2, block=None)
_WHOLE = TopK(ratio=1.0)


class Scatter:
    """One exchange of a bucket's tensors by way of owners.

    Args:
        passage: whose vectors are sent, and who remembers what is left of them.

    Attributes:
        owned: parameter name -> part -> what this worker keeps of the sums of its share.
    """

    def __init__(self, passage: Passage) -> None:
        self.passage = passage
        self.ops = passage.ops
        self.transport = passage.engine.transport
        self.rank, self.workers = passage.rank, passage.workers
        self.owned: dict[str, dict[str, Array]] = {}

    def exchange(self, units: Sequence[Unit]) -> Exchange[Callable[[], dict[str, Array]] | None]:
        """The sums over the workers, by unit; None where some worker's gradient was not finite."""
        passage, ops, counters = self.passage, self.ops, self.passage.counters
        fingerprint = passage.engine.fingerprint(passage.parameters)
        ranks = self.transport.ranks
        segments = segments_of(units, passage.method_of, self.workers)
        with counters.timed("compress"):
            like = passage.vectors[units[0].name].x
            outgoing: list[list[Array]] = [[] for _ in range(self.workers)]
            if passage.finite:
                for segment in segments:
                    self._encode(segment, outgoing)
            passage.vectors.clear()
            non_finite = not passage.finite
            payloads = [write_payload(ops, frames, fingerprint, like, non_finite) for frames in outgoing]
            request = Alltoall(ops.concat(payloads), tuple(len(payload) for payload in payloads))
        counters.scattered += 1
        counters.sent_bytes += len(request.payload)
        arrived = yield request
        counters.received_bytes += len(arrived) - len(payloads[self.rank])
        with counters.timed("compress"):
            answer = self._answer(segments, arrived, fingerprint, like)
        counters.sent_bytes += len(answer)
        gathered = yield Allgather(answer)
        counters.received_bytes += len(gathered) - len(answer)
        with counters.timed("decompress"):
            received = split_payloads(ops, gathered, ranks, fingerprint)
            if any(each.non_finite for each in received):
                return None
        return lambda: self._sums(segments, received, like)

    # -- what this worker sends to the owners -------------------------------------------------------------------------

    def _encode(self, segment: Segment, outgoing: list[list[Array]]) -> None:
        """A frame for each owner that has a share of `segment`, onto the end of `outgoing`."""
        parts = parts_of(segment.method)
        if parts is None:
            self._encode_shares(segment, outgoing)
        else:
            self._encode_selected(segment, outgoing, *parts)

    def _encode_selected(
        self, segment: Segment, outgoing: list[list[Array]], sparsifier: Sparsifier, code: ValueCode | None
    ) -> None:
        """Values are selected from each unit as a whole, as in any other exchange, and dealt out to their owners."""
        ops, passage = self.ops, self.passage
        # Owner -> for each parameter, positions in its unit and in the frame.
        dealt: list[list[tuple[Unit, Array, Array]]] = [[] for _ in range(self.workers)]
        before = [0] * self.workers
        vectors = {}
        for unit in segment.units:
            corrected = passage.vectors.pop(unit.name)
            x = vectors[unit.name] = corrected.x
            positions = sparsifier.select(ops, x, passage.context(unit, corrected.candidates))
            whole = len(positions) == len(x) or not passage.memory.masks
            passage.kept[unit.name] = Sent(None, x, None if whole else positions)
            start = 0
            for each in unit.parameters:
                inside = positions
                if len(unit.parameters) > 1:
                    inside = ops.take(positions, ops.nonzero((positions >= start) & (positions < start + each.size)))
                rows = (inside - start) // self.workers
                column = inside - start - rows * self.workers
                for owner in range(self.workers):
                    first = start_of(each.name, owner, self.workers)
                    its = ops.nonzero(column == first)
                    if len(its):
                        dealt[owner].append((unit, ops.take(inside, its), ops.take(rows, its) + before[owner]))
                    before[owner] += len(range(first, each.size, self.workers))
                start += each.size
        for owner, chosen in enumerate(dealt):
            if not before[owner]:
                continue
            like = vectors[segment.name]
            values = ops.concat([ops.zeros(0, "float32", like)] + [ops.take(vectors[u.name], p) for u, p, _ in chosen])
            places = ops.concat([ops.zeros(0, "int64", like)] + [place for _, _, place in chosen])
            context = self._context(segment, owner)
            frame, decoded = encode_values_at(ops, values, places, before[owner], code, context)
            outgoing[owner].append(frame)
            passage.counters.kept += len(places)
            left = values - decoded
            start = 0
            for unit, positions, _ in chosen:
                end = start + len(positions)
                vectors[unit.name] = ops.put(vectors[unit.name], positions, left[start:end])
                start = end
        for unit in segment.units:
            passage.kept[unit.name] = replace(passage.kept[unit.name], residual=vectors[unit.name])

    def _encode_shares(self, segment: Segment, outgoing: list[list[Array]]) -> None:
        """Each owner's share of the segment is compressed as a vector of its own."""
        ops, passage, method = self.ops, self.passage, segment.method
        vectors: dict[str, Array] = {}
        for unit in segment.units:
            vectors |= unit.split(passage.vectors.pop(unit.name).x)
        left: dict[str, list[Array]] = {each.name: [] for each in segment.parameters}
        sent: dict[str, list[Array]] = {each.name: [] for each in segment.parameters}
        whole = True
        for owner in range(self.workers):
            shares = [share_of(ops, each.name, vectors[each.name], owner, self.workers) for each in segment.parameters]
            joined = ops.concat(shares)
            context = self._context(segment, owner)
            masks = passage.memory.masks and len(joined) > 0
            marks = joined
            if len(joined):
                frame, joined = method.encode(ops, joined, context)
                outgoing[owner].append(frame)
                passage.counters.kept += frame_kept(ops, frame)
                positions = method.positions_sent(ops, frame, joined, context) if masks else None
                marks = ops.zeros(len(joined), "float32", joined)
                if positions is None:
                    marks = marks + 1.0
                else:
                    whole = False
                    marks = ops.put(marks, positions, ops.zeros(len(positions), "float32", marks) + 1.0)
            for collected, values in ((left, joined), (sent, marks)):
                for name, piece in segment.split(values, owner, self.workers).items():
                    collected[name].append(piece)
        for unit in segment.units:
            residual, marked = (
                unit.join(ops, {p.name: join_shares(ops, p.name, pieces[p.name], p.size) for p in unit.parameters})
                for pieces in (left, sent)
            )
            passage.kept[unit.name] = Sent(
                None, None if method.meets == "dense" else residual, None if whole else ops.nonzero(marked > 0)
            )

    # -- what it answers as an owner ----------------------------------------------------------------------------------

    def _answer(self, segments: Sequence[Segment], arrived: Array, fingerprint: int, like: Array) -> Array:
        """The payload of the sums of this worker's share; or word that they are not finite, or of an error."""
        ops = self.ops
        try:
            received = split_payloads(ops, arrived, self.transport.ranks, fingerprint)
            if any(each.non_finite for each in received):
                return write_payload(ops, [], fingerprint, like, non_finite=True)
            frames = []
            finite = True
            for segment in segments:
                if segment.size(self.rank, self.workers):
                    total = self._added(segment, received, like)
                    finite = finite and ops.all_finite(total)
                    if finite:
                        frames.append(self._encode_owned(segment, total))
            for each in received:
                if each.frames.left:
                    raise PayloadError(f"rank {each.rank} sent {each.frames.left} bytes more than its frames need")
        except GradcompError as error:
            return write_refusal(ops, error, fingerprint, like)
        return write_payload(ops, frames if finite else [], fingerprint, like, non_finite=not finite)

    def _added(self, segment: Segment, received: Sequence[Received], like: Array) -> Array:
        """The sum of what all workers sent of this worker's share, in rank order, and what is still owed of it."""
        ops, rank = self.ops, self.rank
        total = ops.zeros(segment.size(rank, self.workers), "float32", like)
        for each in received:
            total = self._decode_add(segment.method, each, total)
        if segment.method.votes:
            return segment.method.combine(ops, total, self.workers)
        state = self.passage.engine.state
        parts = {
            each.name: own_parts(state.get(each.name, {}), rank, self.workers).get("residual")
            for each in segment.parameters
        }
        if all(residual is None for residual in parts.values()):
            return total
        shares = {
            each.name: share for each, share in zip(segment.parameters, self._shares(segment, total), strict=True)
        }
        joined = ops.concat([share * 0.0 if parts[name] is None else parts[name] for name, share in shares.items()])
        memory = self.passage.memory.of_owner()
        return memory.correct(ops, total, {"residual": joined}, self.workers)[0]

    def _shares(self, segment: Segment, vector: Array) -> list[Array]:
        return list(segment.split(vector, self.rank, self.workers).values())

    def _encode_owned(self, segment: Segment, total: Array) -> Array:
        """The frame of the sums; what it does not say is kept."""
        ops, rank, method = self.ops, self.rank, segment.method
        parts = parts_of(method)
        context = self._context(segment, rank)
        # Draws of its own, but positions that all workers draw alike are the same.
        context = replace(context, rank=self.workers + rank)
        if method.votes:
            frame, residual = _VERDICTS.encode(ops, ops.copy(total), context)
            return frame if not ops.total(residual != 0) else _WHOLE.encode(ops, total, context)[0]
        if parts is None:
            frame, residual = method.encode(ops, total, context)
        else:
            sparsifier, code = parts
            bounds = segment.selections(sparsifier, rank, self.workers)
            chosen = [sparsifier.select(ops, total[start:end], context) + start for start, end in bounds]
            frame, residual = encode_sparse(ops, total, sparsifier, code, context, ops.concat(chosen))
        memory = NoMemory() if method.meets == "dense" else self.passage.memory.of_owner()
        for part, values in memory.update(ops, {}, residual, None).items():
            for name, piece in segment.split(values, rank, self.workers).items():
                self.owned.setdefault(name, {})[shared_part(part, rank, self.workers)] = piece
        return frame

    # -- what all make of the answers ---------------------------------------------------------------------------------

    def _sums(self, segments: Sequence[Segment], received: Sequence[Received], like: Array) -> dict[str, Array]:
        """The sums of every unit from the owners' payloads."""
        ops = self.ops
        totals: dict[str, Array] = {}
        for segment in segments:
            parts = None if segment.method.votes else parts_of(segment.method)
            whole = (
                self._joined(segment, received, like)
                if parts is None
                else self._collected(segment, received, like, parts[1])
            )
            for unit in segment.units:
                totals[unit.name] = unit.join(ops, whole)
        for each in received:
            if each.frames.left:
                raise PayloadError(f"rank {each.rank} sent {each.frames.left} bytes more than its frames need")
        return totals

    def _joined(self, segment: Segment, received: Sequence[Received], like: Array) -> dict[str, Array]:
        """The sums of each parameter, of owners' shares that say something of every element."""
        ops = self.ops
        shares: dict[str, list[Array]] = {each.name: [] for each in segment.parameters}
        for owner, each in enumerate(received):
            out = ops.zeros(segment.size(owner, self.workers), "float32", like)
            if len(out):
                out = self._decode_add(_WHOLE if segment.method.votes else segment.method, each, out)
            for name, piece in segment.split(out, owner, self.workers).items():
                shares[name].append(piece)
        return {each.name: join_shares(ops, each.name, shares[each.name], each.size) for each in segment.parameters}

    def _collected(
        self, segment: Segment, received: Sequence[Received], like: Array, code: ValueCode | None
    ) -> dict[str, Array]:
        """The same where they say something of few elements: nothing is made of the rest, which is nearly all."""
        ops, workers = self.ops, self.workers
        whole = {each.name: ops.zeros(each.size, "float32", like) for each in segment.parameters}
        for owner, each in enumerate(received):
            size = segment.size(owner, workers)
            if not size:
                continue
            with _naming(each.rank):
                positions, values = read_sparse(each.frames, size, code)
            if positions is None:
                positions = ops.arange(size, values)
            start = 0
            for parameter in segment.parameters:
                first, end = start_of(parameter.name, owner, workers), start
                end += share_size(parameter.name, parameter.size, owner, workers)
                inside, its = positions, values
                if len(segment.parameters) > 1:
                    chosen = ops.nonzero((positions >= start) & (positions < end))
                    inside, its = ops.take(positions, chosen), ops.take(values, chosen)
                places = (inside - start) * workers + first
                whole[parameter.name] = ops.put_add(whole[parameter.name], places, its)
                start = end
        return whole

    def _decode_add(self, method: Compressor, received: Received, out: Array) -> Array:
        with _naming(received.rank):
            return method.decode_add(self.ops, received.frames, out)

    def _context(self, segment: Segment, owner: int) -> Context:
        # Owners' shares lie in one tensor: without the owner's number all would draw alike.
        return Context(self.rank, self.workers, f"{segment.name}#{owner}", self.passage.step)


@contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Say in an error that comes of a frame whose it was."""
    try:
        yield
    except GradcompError as error:
        raise type(error)(f"rank {rank} sent a frame that cannot be decoded: {error}") from None
