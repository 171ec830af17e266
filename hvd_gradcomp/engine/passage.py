"""The path of a gradient: + what memory holds, compress, exchange, decode, average; what was not sent is remembered.

One `Passage` takes the gradients of one bucket through one step. Nothing that lasts is changed before the exchange has
shown that all workers' gradients were finite.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

from hvd_gradcomp.collectives import Allgather, Allreduce, Confirm, Exchange, Request, Transport, add
from hvd_gradcomp.compressors import BF16, FP16, Compressor, Context, NoCompression
from hvd_gradcomp.compressors.base import Item, Sent
from hvd_gradcomp.compressors.marks import MARKS, Verdict, marks, marks_fit, verdict
from hvd_gradcomp.engine.adaptation import Adaptation, norm
from hvd_gradcomp.engine.buckets import Parameter
from hvd_gradcomp.engine.scatter import Scatter
from hvd_gradcomp.engine.units import Unit, units_of
from hvd_gradcomp.errors import ConfigurationError, GradcompError, PayloadError
from hvd_gradcomp.feedback.shares import shared_part, whole_parts
from hvd_gradcomp.ops import Array, Corrected, ops_for
from hvd_gradcomp.telemetry import BucketCounters
from hvd_gradcomp.wire.frame import frame_kept
from hvd_gradcomp.wire.payload import Received, split_payloads, write_payload

_Result = TypeVar("_Result")
#: Unit name -> the sum over the workers, or what gives these sums.
Totals: TypeAlias = dict[str, Array] | Callable[[], dict[str, Array]]

#: Bytes of a gradient element.
KIND_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# Everything, in the formats in which summands can travel.
_WHOLE: dict[str, Compressor] = {"float32": NoCompression(), "float16": FP16(), "bfloat16": BF16()}


class Home(Protocol):
    """What a passage belongs to: an engine, or a worker's part in the exchange between nodes."""

    @property
    def compressor(self) -> Compressor: ...

    @property
    def adaptation(self) -> Adaptation: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def average(self) -> bool: ...

    @property
    def state(self) -> dict[str, dict[str, Array]]: ...

    def fingerprint(self, parameters: Sequence[Parameter]) -> int: ...


class Passage:
    """The tensors of one bucket on their way through one exchange.

    Args:
        engine: whose state is used and, at the end, replaced.
        method: how to compress, the engine's compressor or what stands in for it.
        parameters: those of the bucket that have a gradient in this step.
        gradients: parameter name -> gradient, as given to `Engine.submit`.
        counters: of the bucket.
        step: see `Context`.
        collective: how payloads that cannot be added meet, "allgather" or "scatter_reduce".
        owners: of how many shares of each tensor this is one; the gradients are of this size.
    """

    def __init__(
        self,
        engine: Home,
        method: Compressor,
        parameters: Sequence[Parameter],
        gradients: Mapping[str, Array],
        counters: BucketCounters,
        step: int,
        collective: str = "allgather",
        owners: int = 1,
    ) -> None:
        self.engine = engine
        self.method = method
        self.memory = engine.compressor.of(parameters[0].name, parameters[0].shape).memory
        self.adaptation = engine.adaptation
        # Unit name -> the L2 norm of its vector, and a copy of the vector, where a policy wants to know.
        self.looked_at: dict[str, tuple[float, Array | None]] = {}
        self.counters = counters
        self.step = step
        self.parameters = parameters
        self.owners = owners
        self.like = gradients[parameters[0].name]
        self.ops = ops_for(self.like)
        # Asking Horovod takes longer than much of what is done with the answer.
        self.rank, self.workers = engine.transport.rank, engine.transport.workers
        self.scatter = Scatter(self) if collective == "scatter_reduce" else None
        # What is kept for shares this exchange knows nothing of, and adds to what it has.
        self.own_ending = shared_part("", self.rank, self.workers) if self.scatter else ""
        # Unit name -> what was sent of it, and so what is to be kept.
        self.kept: dict[str, Sent] = {}
        self.advanced: dict[str, dict[str, Array]] = {}
        # Units whose totals have been divided on the way.
        self.scaled: set[str] = set()
        # Small tensors are here only where the memory needs them, and travel whole.
        least = method.dense_below // owners if self.memory.is_momentum and method.meets != "dense" else 0
        large = [each for each in parameters if each.size >= least]
        self.large = units_of(large, method.granularity) if large else ()
        self.small = units_of([each for each in parameters if each.size < least], "layer")
        self.units = self.large + self.small
        with counters.timed("compress"):
            self.vectors = {unit.name: self._corrected(unit, gradients) for unit in self.units}
            self.finite = all(each.finite for each in self.vectors.values())

    def exchange(self) -> Generator[Request | Confirm, Any, dict[str, Array]]:
        """Yields requests, receives their results, and confirms; returns what `Engine.finish` hands out."""
        totals = yield from self.reduce()
        confirmed = yield Confirm(totals is not None)
        with self.counters.timed("decompress"):
            if totals is None or not confirmed:
                return self._not_finite()
            results = self.results(totals)
            self.remember()
        return results

    def reduce(self) -> Exchange[Totals | None]:
        """Yields requests and receives their results; returns the sums over the workers by unit.

        None where some worker's gradient was not finite. A function gives the sums once they are wanted.
        """
        gather = self.scatter.exchange if self.scatter else self._gather
        ways: dict[str, Callable[..., Exchange[Any]]] = {"gather": gather, "own": self._own}
        totals: Totals | None = yield from ways.get(self.method.meets, self._sum)(self.units)
        return totals

    def results(self, totals: Totals) -> dict[str, Array]:
        """The average (or sum) for each parameter. May use the memory of the old residuals."""
        by_unit = totals() if callable(totals) else totals
        results: dict[str, Array] = {}
        for unit in self.units:
            total = by_unit[unit.name]
            results |= unit.split(total if unit.name in self.scaled else self._scaled(total))
        return results

    def _corrected(self, unit: Unit, gradients: Mapping[str, Array]) -> Corrected:
        """The vector to compress, which has been looked at for what its method wants to know."""
        ops, memory, state, workers = self.ops, self.memory, self.engine.state, self.workers
        wanted = self.method_of(unit).wanted(unit.size)
        alone = len(unit.parameters) == 1
        looked = {}
        for name, size in ((parameter.name, parameter.size) for parameter in unit.parameters):
            gradient = ops.flat32(gradients[name])
            if self.adaptation.looks:
                self.adaptation.note_gradient(ops, gradient)
            parts = whole_parts(ops, name, size, state.get(name, {}), self.own_ending)
            looked[name], self.advanced[name] = (
                memory.correct_and_look(ops, gradient, parts, workers, wanted)
                if alone
                else memory.correct(ops, gradient, parts, workers)
            )
        corrected = looked[unit.name] if alone else ops.correct(unit.join(ops, looked), None, wanted)
        if self.adaptation.looks and unit in self.large:
            copied = ops.copy(corrected.x) if self.adaptation.looks_further else None
            self.looked_at[unit.name] = (norm(ops, corrected.x), copied)
        return corrected

    def context(self, unit: Unit, candidates: object = None) -> Context:
        state = self.engine.state.get(unit.name, {})
        return Context(self.rank, self.workers, unit.name, self.step, candidates, state)

    def method_of(self, unit: Unit) -> Compressor:
        return _WHOLE[self.method.sum_kind] if unit in self.small else self.method

    # -- the three ways to the sums over the workers; None where some worker's gradient was not finite -----------------

    def _gather(self, units: Sequence[Unit]) -> Exchange[Callable[[], dict[str, Array]] | None]:
        """Every worker's payload goes to every worker. Returns what decodes them, in the old residuals' memory."""
        ops, engine = self.ops, self.engine
        fingerprint = engine.fingerprint(self.parameters)
        with self.counters.timed("compress"):
            like = self.vectors[units[0].name].x
            frames = []
            for unit in units if self.finite else ():
                corrected = self.vectors.pop(unit.name)
                context = self.context(unit, corrected.candidates)
                frame, residual = self.method_of(unit).encode(ops, corrected.x, context)
                frames.append(frame)
                self._sent(unit, residual, frame, context.kept)
                self.counters.kept += frame_kept(ops, frame)
            payload = write_payload(ops, frames, fingerprint, like, non_finite=not self.finite)
            self.vectors.clear()
        self.counters.sent_bytes += len(payload)
        gathered = yield Allgather(payload)
        self.counters.received_bytes += len(gathered) - len(payload)
        with self.counters.timed("decompress"):
            received = split_payloads(ops, gathered, engine.transport.ranks, fingerprint)
            if any(each.non_finite for each in received):
                return None
        return lambda: self._all_decoded(units, received, like)

    def _all_decoded(self, units: Sequence[Unit], received: Sequence[Received], like: Array) -> dict[str, Array]:
        """The sums of all workers' payloads, added in rank order."""
        totals = {unit.name: self._decoded(unit, received, like) for unit in units}
        for each in received:
            if each.frames.left:
                raise PayloadError(f"rank {each.rank} sent {each.frames.left} bytes more than its frames need")
        return totals

    def _sum(self, units: Sequence[Unit]) -> Exchange[dict[str, Array] | None]:
        """The workers' vectors are added on the way."""
        ops, method, transport = self.ops, self.method, self.engine.transport
        kind = method.sum_kind if method.meets == "sum" else "float32"
        with self.counters.timed("compress"):
            vectors = []
            for unit in units:
                vector, residual = self._summands(unit, self.vectors.pop(unit.name).x)
                self._sent(unit, residual, None)
                # One NaN is enough to tell everybody, and limits of a format must not hide an infinity.
                vectors.append(vector if self.finite else vector + float("nan"))
            lengths = [len(vector) for vector in vectors]
            marked = method.draws and marks_fit(kind, self.workers)
            if marked:
                number = zlib.crc32(f"{self.engine.fingerprint(self.parameters)}|{self.step}".encode())
                vectors.append(marks(ops, number, self.finite, vectors[0]))
            joined = vectors[0] if len(vectors) == 1 else ops.concat(vectors)
        self.counters.kept += sum(lengths)
        # As one allreduce of them, which is what the two rounds of a format that Horovod cannot add move together.
        self.counters.sent_bytes += KIND_BYTES[kind] * len(joined)
        self.counters.received_bytes += KIND_BYTES[kind] * len(joined)
        total = yield from add(ops, joined, kind, transport)
        with self.counters.timed("decompress"):
            if not ops.all_finite(total):
                return None
            if marked and verdict(ops, total[-MARKS:], self.workers) is Verdict.DIFFERENT:
                raise ConfigurationError(
                    f"the workers added values of {self.units[0].name!r} that do not belong together: their settings "
                    f"differ, or their steps (this worker is at step {self.step}). Give every worker the same "
                    "compression, and the same saved state when training resumes"
                )
            totals = {}
            start = 0
            for unit, length in zip(units, lengths, strict=True):
                part = total[start : start + length]
                start += length
                each = self.method_of(unit)
                if each.meets == "sum":
                    part = each.from_sum(ops, part, unit.size, self.context(unit))
                totals[unit.name] = ops.copy(part)
        return totals

    def _own(self, units: Sequence[Unit]) -> Exchange[dict[str, Array] | None]:
        """The method's own exchange; small tensors first, which show all workers whether a gradient is not finite."""
        ops, engine = self.ops, self.engine
        totals = (yield from self._sum(self.small)) if self.small else {}
        if totals is None or not self.large:
            return totals
        items = [
            Item(self.vectors.pop(unit.name).x, unit.shape, self.context(unit), engine.state.get(unit.name, {}))
            for unit in self.large
        ]
        sent = yield from self._counting(self.method.exchange(ops, items, engine.transport))
        if sent is None or not all(ops.all_finite(each.total) for each in sent):
            return None
        for unit, each in zip(self.large, sent, strict=True):
            self.kept[unit.name] = each
            self.counters.kept += unit.size if each.positions is None else len(each.positions)
            totals[unit.name] = each.total
        return totals

    def _counting(self, exchange: Exchange[_Result]) -> Exchange[_Result]:
        """`exchange` with the bytes of its requests and results, and its own time, counted."""
        received = None
        while True:
            with self.counters.timed("compress"):
                try:
                    request = next(exchange) if received is None else exchange.send(received)
                except StopIteration as end:
                    return end.value
            received = yield request
            if isinstance(request, Allreduce):
                width = KIND_BYTES[request.kind]
                self.counters.sent_bytes += width * len(request.values)
                self.counters.received_bytes += width * len(received)
            else:
                self.counters.sent_bytes += len(request.payload)
                self.counters.received_bytes += len(received)

    def _summands(self, unit: Unit, x: Array) -> tuple[Array, Array | None]:
        method = self.method_of(unit)
        return (x, None) if method.meets == "dense" else method.summands(self.ops, x, self.context(unit))

    def _decoded(self, unit: Unit, received: Sequence[Received], like: Array) -> Array:
        """What all workers sent of a unit: at once where there is a kernel for it, else frame by frame."""
        method, workers = self.method_of(unit), self.workers
        out = self._blank(unit, like)
        # A vote is taken from the sum.
        if not method.votes:
            divisor = workers if self.engine.average else 1
            mean = method.decode_mean(self.ops, [each.frames for each in received], out, divisor)
            if mean is not None:
                self.scaled.add(unit.name)
                return mean
        out = self.ops.clear(out)
        for each in received:
            out = self._decode_add(unit, each.rank, each.frames, out)
        return method.combine(self.ops, out, workers)

    def _decode_add(self, unit: Unit, rank: int, frames: Any, out: Array) -> Array:
        try:
            return self.method_of(unit).decode_add(self.ops, frames, out)
        except GradcompError as error:
            raise type(error)(f"rank {rank} sent a frame that cannot be decoded: {error}") from None

    # -- results and state --------------------------------------------------------------------------------------------

    def _scaled(self, total: Array) -> Array:
        return self.ops.divide(total, self.workers) if self.engine.average else total

    def _blank(self, unit: Unit, like: Array) -> Array:
        """Memory to decode into, holding anything: the old residual's, if any, which the new one does not use."""
        old = self.engine.state.get(unit.name, {})
        if len(unit.parameters) > 1 or self.owners > 1 or "residual" not in old:
            return self.ops.zeros(unit.size, "float32", like)
        return old.pop("residual")

    def _sent(
        self, unit: Unit, residual: Array | None, frame: Array | None, kept: Mapping[str, Array] = MappingProxyType({})
    ) -> None:
        """Note what this worker has sent of a unit, for `remember`."""
        positions = None
        if self.memory.masks and residual is not None:
            method = self.method_of(unit)
            positions = method.positions_sent(self.ops, frame, residual, self.context(unit))
        self.kept[unit.name] = Sent(None, residual, positions, kept)

    def remember(self) -> None:
        """Put the new state in the place of the old one."""
        ops, state = self.ops, self.engine.state
        for unit in self.units:
            sent = self.kept[unit.name]
            if unit.name in self.looked_at:
                self._tell(unit, sent.residual)
            parts = self.advanced[unit.name]
            advanced = {
                part: unit.join(ops, {each.name: self.advanced[each.name][part] for each in unit.parameters})
                for part in parts
            }
            positions = sent.positions if self.memory.masks else None
            kept = self.memory.update(ops, advanced, sent.residual, positions)
            for parameter in unit.parameters:
                state.pop(parameter.name, None)
            for part, vector in kept.items():
                for name, piece in unit.split(vector).items():
                    state.setdefault(name, {})[part] = piece
            if sent.state:
                state.setdefault(unit.name, {}).update(sent.state)
        for name, own in self.scatter.owned.items() if self.scatter else ():
            state.setdefault(name, {}).update(own)

    def _tell(self, unit: Unit, residual: Array | None) -> None:
        """Tell the policy what became of a unit."""
        whole, copied = self.looked_at.pop(unit.name)
        sent = copied if copied is None or residual is None else copied - residual
        self.adaptation.note(self.ops, unit, whole, residual, sent, self.context(unit))

    def _not_finite(self) -> dict[str, Array]:
        """NaN for every value, so that loss scaling sees the step and skips it; all state stays as it was."""
        self.counters.non_finite += 1
        nan = float("nan")
        return {each.name: self.ops.zeros(each.size, "float32", self.like) + nan for each in self.parameters}
