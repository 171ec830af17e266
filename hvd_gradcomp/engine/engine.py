"""The path of a gradient: + residual, compress, exchange, decode, average; what was not sent is the new residual.

One engine serves one optimizer on one worker. A door submits gradients by name as they become ready; a bucket is
exchanged when all its gradients are there, and `finish` completes the step. Framework arrays pass through as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.collectives import Allgather, Exchange, Request, Transport, add, moves_fewer_bytes
from hvd_gradcomp.compressors import BF16, FP16, Compressor, Context, NoCompression
from hvd_gradcomp.engine.agreement import compare_settings, settings_message
from hvd_gradcomp.engine.buckets import BUCKET_BYTES, Bucket, Parameter, plan_buckets
from hvd_gradcomp.errors import ConfigurationError, GradcompError, PayloadError
from hvd_gradcomp.ops import Array, Ops, ops_for
from hvd_gradcomp.telemetry import BucketCounters, Counters
from hvd_gradcomp.wire.frame import frame_kept
from hvd_gradcomp.wire.payload import split_payloads, write_payload

# What a dense exchange of gradients in a 16-bit format sends; others go as float32.
_DENSE: dict[str, Compressor] = {"float16": FP16(), "bfloat16": BF16()}
_UNCHANGED = NoCompression()
_DENSE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass
class _InFlight:
    """A bucket between its launch and the end of its exchange."""

    bucket: Bucket
    exchange: Exchange[dict[str, Array]]
    handle: Any
    rounds: int = 0


class Engine:
    """Exchanges the gradients of one optimizer.

    Args:
        compressor: how; may be replaced between steps, on all workers at the same step.
        parameters: what, in the order of the model, the same on all workers.
        transport: among whom.
        average: divide the sum by the number of workers.
        options: further settings that must agree between workers, for the error when they do not.
        bucket_bytes: see `plan_buckets`.
        groups: see `plan_buckets`.
        scope: precedes the names of collectives, to tell apart engines whose parameters have equal names.
        settings_name: the collective in which workers compare their settings; by default one of its own. It has to be
            the same on workers whose parameters or settings differ, or they would wait for each other.

    Attributes:
        residuals: parameter name -> float32 (n,): what this worker has not sent yet.
        counters: what was sent, for each bucket.
    """

    def __init__(
        self,
        compressor: Compressor,
        parameters: Sequence[Parameter],
        transport: Transport,
        *,
        average: bool = True,
        options: Mapping[str, object] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        groups: Iterable[Iterable[str]] | None = None,
        scope: str = "",
        settings_name: str = "",
    ) -> None:
        self.compressor = compressor
        self.parameters = tuple(parameters)
        self.transport = transport
        self.average = average
        self.options = dict(options or {})
        self.scope = scope
        self.residuals: dict[str, Array] = {}
        self.counters = Counters()
        self.buckets = plan_buckets(self.parameters, bucket_bytes, groups)
        self._bucket_of = {parameter.name: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._steps: dict[int, int] = {}
        self._gathering: dict[int, dict[str, Array | None]] = {}
        self._in_flight: list[_InFlight] = []
        # Grouping does not change it: workers whose buckets differ must meet there to find that out.
        own_name = f"{min((parameter.name for parameter in self.parameters), default='')}.settings"
        self._settings_name = f"{scope}{settings_name or own_name}"
        self._agreed_workers = 0
        self._agreement: tuple[Any, Ops] | None = None

    def submit(self, name: str, gradient: Array | None) -> None:
        """Hand in the gradient of parameter `name`; the last one of a bucket starts its exchange.

        Args:
            name: one of the engine's parameters, each once a step.
            gradient: any shape, a float dtype; its memory is the engine's from now on, to keep or to change.
                None leaves the parameter out of this step (its gradient travels another way), on all workers.

        Raises:
            ConfigurationError: `name` is unknown or was handed in already.
        """
        bucket = self._bucket_of.get(name)
        if bucket is None:
            raise ConfigurationError(f"no parameter is called {name!r}")
        gathering = self._gathering.setdefault(bucket.index, {})
        if name in gathering or any(flight.bucket is bucket for flight in self._in_flight):
            raise ConfigurationError(f"the gradient of {name!r} was handed in twice in one step")
        gathering[name] = gradient
        if len(gathering) == len(bucket.parameters):
            self._launch(bucket, self._gathering.pop(bucket.index))

    def finish(self) -> dict[str, Array]:
        """Complete all exchanges begun by `submit`, in the same order on every worker.

        Returns:
            For each parameter handed in: the average (or sum) of what the workers sent, float32, flat; NaN throughout
            where some worker's gradient was not finite, in which case no residual changes.

        Raises:
            ConfigurationError: workers were given different settings, or not all gradients of a bucket are here.
            PayloadError: some rank sent corrupt bytes.
        """
        results: dict[str, Array] = {}
        try:
            if self._gathering:
                missing = sorted(
                    parameter.name
                    for index, part in self._gathering.items()
                    for parameter in self.buckets[index].parameters
                    if parameter.name not in part
                )
                raise ConfigurationError(
                    f"some gradients were not handed in before the end of the step: {missing}; "
                    "hand in None for a parameter that takes no part in it"
                )
            self.conclude_agreement()
            pending = sorted(self._in_flight, key=lambda flight: flight.bucket.index)
            while pending:
                pending = [flight for flight in pending if not self._advance(flight, results)]
        finally:
            self._gathering.clear()
            self._in_flight.clear()
        return results

    def abandon(self) -> None:
        """Forget the step that is under way, on all workers; what they kept before it stays as it was."""
        self._gathering.clear()
        flights = self._in_flight.copy()
        self._in_flight.clear()
        for flight in flights:
            self.transport.wait(flight.handle)

    # -- one bucket ---------------------------------------------------------------------------------------------------

    def _launch(self, bucket: Bucket, gradients: Mapping[str, Array | None]) -> None:
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        if not present:
            return
        self.begin_agreement(next(iter(present.values())))
        exchange = self._exchange(bucket, present)
        request = next(exchange)
        self._in_flight.append(_InFlight(bucket, exchange, self._start(bucket, request, 0)))

    def _start(self, bucket: Bucket, request: Request, rounds: int) -> Any:
        name = f"{self.scope}{bucket.name}"
        if rounds or name == self._settings_name:
            name += f".{rounds}"
        return self.transport.start(request, name)

    def _advance(self, flight: _InFlight, results: dict[str, Array]) -> bool:
        """Wait for the round that is under way and start the next one; True when there is none."""
        with self.counters.bucket(flight.bucket.name).timed("exchange"):
            received = self.transport.wait(flight.handle)
        try:
            request = flight.exchange.send(received)
        except StopIteration as end:
            results.update(end.value)
            return True
        flight.rounds += 1
        flight.handle = self._start(flight.bucket, request, flight.rounds)
        return False

    def _exchange(self, bucket: Bucket, gradients: Mapping[str, Array]) -> Exchange[dict[str, Array]]:
        parameters = [parameter for parameter in bucket.parameters if parameter.name in gradients]
        counters = self.counters.bucket(bucket.name)
        counters.exchanges += 1
        counters.elements += sum(parameter.size for parameter in parameters)
        counters.dense_bytes += sum(_DENSE_BYTES[parameter.kind] * parameter.size for parameter in parameters)
        step = self._steps[bucket.index] = self._steps.get(bucket.index, -1) + 1
        method = self._method(parameters, counters)
        flight = _Tensors(self, method, parameters, gradients, counters, step)
        return (yield from (flight.gathered() if method.meets == "gather" else flight.summed()))

    def _method(self, parameters: Sequence[Parameter], counters: BucketCounters) -> Compressor:
        """The compressor, or a dense exchange where that moves fewer bytes at this worker count."""
        payload = sum(self.compressor.expected_bytes(parameter.size) for parameter in parameters)
        dense = sum(_DENSE_BYTES[parameter.kind] * parameter.size for parameter in parameters)
        if self.compressor.meets != "gather" or moves_fewer_bytes(payload, dense, self.transport.workers):
            return self.compressor
        counters.fallbacks += 1
        kinds = {parameter.kind for parameter in parameters}
        return _DENSE.get(kinds.pop(), _UNCHANGED) if len(kinds) == 1 else _UNCHANGED

    def fingerprint(self, parameters: Sequence[Parameter]) -> int:
        """32 bits for all that must be the same on the workers that exchange `parameters`."""
        names = [(parameter.name, parameter.size, parameter.kind) for parameter in parameters]
        text = f"{self.compressor}|{self.average}|{self.transport.workers}|{sorted(self.options.items())}|{names}"
        return zlib.crc32(text.encode())

    # -- agreement ----------------------------------------------------------------------------------------------------

    def begin_agreement(self, like: Array) -> None:
        """Start to compare the workers' settings, unless these workers have done so; `submit` does it by itself.

        Args:
            like: an array on the device that collectives use.
        """
        if self._agreed_workers == self.transport.workers or self._agreement is not None:
            return
        ops = ops_for(like)
        settings = {
            "compression": str(self.compressor),
            "op": "average" if self.average else "sum",
            "buckets": zlib.crc32(repr(self.buckets).encode()),
            **self.options,
        }
        request = Allgather(settings_message(ops, settings, like))
        self._agreement = (self.transport.start(request, self._settings_name), ops)

    def conclude_agreement(self) -> None:
        """Wait for what `begin_agreement` started; `finish` does it by itself.

        Raises:
            ConfigurationError: workers were given different settings.
        """
        if self._agreement is None:
            return
        (handle, ops), self._agreement = self._agreement, None
        compare_settings(ops, self.transport.wait(handle), self.transport.ranks, self.transport.rank)
        self._agreed_workers = self.transport.workers


class _Tensors:
    """The tensors of one bucket on their way through one exchange."""

    def __init__(
        self,
        engine: Engine,
        method: Compressor,
        parameters: Sequence[Parameter],
        gradients: Mapping[str, Array],
        counters: BucketCounters,
        step: int,
    ) -> None:
        self.engine = engine
        self.method = method
        self.parameters = parameters
        self.counters = counters
        self.step = step
        self.ops = ops_for(gradients[parameters[0].name])
        with counters.timed("compress"):
            self.corrected = {each.name: self._corrected(each.name, gradients[each.name]) for each in parameters}

    def _corrected(self, name: str, gradient: Array) -> Array:
        memory = self.engine.compressor.memory
        return memory.correct(self.ops, self.ops.flat32(gradient), self.engine.residuals.get(name))

    def _context(self, name: str) -> Context:
        transport = self.engine.transport
        return Context(transport.rank, transport.workers, name, self.step)

    def gathered(self) -> Exchange[dict[str, Array]]:
        """Every worker's payload goes to every worker, and is decoded there in rank order."""
        ops, method, engine = self.ops, self.method, self.engine
        fingerprint = engine.fingerprint(self.parameters)
        with self.counters.timed("compress"):
            like = self.corrected[self.parameters[0].name]
            residuals: dict[str, Array | None] = {}
            frames = []
            finite = all(ops.all_finite(x) for x in self.corrected.values())
            if finite:
                for name, x in self.corrected.items():
                    frame, residuals[name] = method.encode(ops, x, self._context(name))
                    frames.append(frame)
                    self.counters.kept += frame_kept(ops, frame)
            payload = write_payload(ops, frames, fingerprint, like, non_finite=not finite)
            self.corrected.clear()
        self.counters.sent_bytes += len(payload)
        gathered = yield Allgather(payload)
        self.counters.received_bytes += len(gathered) - len(payload)
        with self.counters.timed("decompress"):
            received = split_payloads(ops, gathered, engine.transport.ranks, fingerprint)
            if any(each.non_finite for each in received):
                return self._not_finite(like)
            results = {}
            for parameter in self.parameters:
                out = self._blank(parameter, like)
                for each in received:
                    out = self._decode_add(each.rank, each.frames, out)
                results[parameter.name] = self._scaled(out)
            for each in received:
                if each.frames.left:
                    raise PayloadError(f"rank {each.rank} sent {each.frames.left} bytes more than its frames need")
            self._keep(residuals)
        return results

    def summed(self) -> Exchange[dict[str, Array]]:
        """The workers' vectors are added on the way."""
        ops, method = self.ops, self.method
        with self.counters.timed("compress"):
            residuals: dict[str, Array | None] = {}
            vectors = []
            finite = all(ops.all_finite(x) for x in self.corrected.values())
            for name, x in self.corrected.items():
                vector, residuals[name] = self._summands(x, self._context(name))
                # One NaN is enough to tell everybody, and limits of a format must not hide an infinity.
                vectors.append(vector if finite else vector + float("nan"))
            lengths = [len(vector) for vector in vectors]
            joined = vectors[0] if len(vectors) == 1 else ops.concat(vectors)
            kind = "float32" if method.meets == "dense" else method.sum_kind
            self.corrected.clear()
        self.counters.sent_bytes += _DENSE_BYTES[kind] * len(joined)
        self.counters.received_bytes += _DENSE_BYTES[kind] * len(joined)
        self.counters.kept += len(joined)
        total = yield from add(ops, joined, kind, self.engine.transport)
        with self.counters.timed("decompress"):
            if not ops.all_finite(total):
                return self._not_finite(total)
            results = {}
            start = 0
            for parameter, length in zip(self.parameters, lengths, strict=True):
                part = total[start : start + length]
                start += length
                if method.meets == "sum":
                    part = method.from_sum(ops, part, parameter.size, self._context(parameter.name))
                results[parameter.name] = self._scaled(ops.copy(part))
            self._keep(residuals)
        return results

    def _summands(self, x: Array, context: Context) -> tuple[Array, Array | None]:
        if self.method.meets == "dense":
            return x, None
        return self.method.summands(self.ops, x, context)

    def _decode_add(self, rank: int, frames: Any, out: Array) -> Array:
        try:
            return self.method.decode_add(self.ops, frames, out)
        except GradcompError as error:
            raise type(error)(f"rank {rank} sent a frame that cannot be decoded: {error}") from None

    def _scaled(self, total: Array) -> Array:
        return self.ops.divide(total, self.engine.transport.workers) if self.engine.average else total

    def _blank(self, parameter: Parameter, like: Array) -> Array:
        """Zeros to decode into: the old residual's memory, which the new one does not use."""
        old = self.engine.residuals.pop(parameter.name, None)
        return self.ops.zeros(parameter.size, "float32", like) if old is None else self.ops.clear(old)

    def _keep(self, residuals: Mapping[str, Array | None]) -> None:
        for name, residual in residuals.items():
            self.engine.residuals.pop(name, None)
            if residual is not None and self.engine.compressor.memory.keeps:
                self.engine.residuals[name] = residual

    def _not_finite(self, like: Array) -> dict[str, Array]:
        """NaN for every value, so that loss scaling sees the step and skips it; all residuals stay as they were."""
        self.counters.non_finite += 1
        nan = float("nan")
        return {each.name: self.ops.zeros(each.size, "float32", like) + nan for each in self.parameters}
