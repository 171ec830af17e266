"""Steps and buckets: which gradients are exchanged when, under which name, by which method, in what order completed.

One engine serves one optimizer on one worker. A door submits gradients by name as they become ready; a bucket is
exchanged when all its gradients are there, and `finish` completes the step. Framework arrays pass through as they are.
What happens to the gradients of one bucket is in `passage`.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from hvd_gradcomp.collectives import Allgather, Confirm, Request, Transport
from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine.adaptation import Adaptation
from hvd_gradcomp.engine.agreement import compare_settings, settings_message
from hvd_gradcomp.engine.buckets import Bucket, Parameter, buckets_of, configured_bucket_bytes
from hvd_gradcomp.engine.choice import choose, dense_for, require_collective
from hvd_gradcomp.engine.choosing import Chooser, make_chooser
from hvd_gradcomp.engine.nodes import NodePassage, Nodes
from hvd_gradcomp.engine.passage import KIND_BYTES, Passage
from hvd_gradcomp.engine.planning import predicted_waits
from hvd_gradcomp.engine.segments import least_bucket_bytes
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, ops_for
from hvd_gradcomp.telemetry import BucketCounters, Counters


@dataclass
class _InFlight:
    """A bucket between its launch and the end of its exchange."""

    bucket: Bucket
    exchange: Generator[Request | Confirm, Any, dict[str, Array]]
    handle: Any
    rounds: int = 0
    usable: bool = False


class Engine:
    """Exchanges the gradients of one optimizer.

    Args:
        compressor: how; may be replaced between steps, on all workers at the same step. Buckets stay as they are, and
            so every parameter of one must then have the same compressor. A policy changes it by itself.
        parameters: what, in the order of the model, the same on all workers.
        transport: among whom.
        average: divide the sum by the number of workers.
        options: further settings that must agree between workers, for the error when they do not.
        bucket_bytes: see `plan_buckets`, by default `configured_bucket_bytes`; with granularity "model" there is one
            bucket, whatever this and `groups` say, and with collectives that deal tensors out to owners they are as
            large as so many owners need.
        groups: see `plan_buckets`.
        scope: precedes the names of collectives, to tell apart engines whose parameters have equal names.
        settings_name: the collective in which workers compare their settings; by default one of its own. It has to be
            the same on workers whose parameters or settings differ, or they would wait for each other.

    Attributes:
        state: parameter name -> part -> what this worker keeps between steps: the parts of the memory, float32 (n,)
            each, of which "residual" is what has not been sent yet, and what a method keeps for its own exchange.
        counters: what was sent, for each bucket.
        adaptation: what the compressor is at each step.
        chooser: what `collective="auto"` goes by; None before the first step, and with other collectives.
    """

    def __init__(
        self,
        compressor: Compressor,
        parameters: Sequence[Parameter],
        transport: Transport,
        *,
        average: bool = True,
        options: Mapping[str, object] | None = None,
        bucket_bytes: int | None = None,
        groups: Iterable[Iterable[str]] | None = None,
        scope: str = "",
        settings_name: str = "",
    ) -> None:
        require_collective(compressor)
        self.adaptation = Adaptation(compressor)
        self.parameters = tuple(parameters)
        self.transport = transport
        self.average = average
        self.options = dict(options or {})
        self.scope = scope
        self.state: dict[str, dict[str, Array]] = {}
        self.counters = Counters()
        if bucket_bytes is None:
            bucket_bytes = configured_bucket_bytes()
        if compressor.granularity == "model":
            bucket_bytes, groups = sum(KIND_BYTES["float32"] * each.size for each in self.parameters), None
        for each in compressor.members() if compressor.granularity != "model" else ():
            if each.collective != "allgather":
                bucket_bytes = max(bucket_bytes, least_bucket_bytes(each, transport.workers))
        self.buckets = buckets_of(compressor, self.parameters, bucket_bytes, groups)
        self._bucket_of = {parameter.name: bucket for bucket in self.buckets for parameter in bucket.parameters}
        # Bucket index -> exchanges begun; and how many had been when the state was saved that this engine began with.
        self._steps: dict[int, int] = {}
        self._resumed = 0
        self._gathering: dict[int, dict[str, Array | None]] = {}
        self._in_flight: list[_InFlight] = []
        # Grouping does not change it: workers whose buckets differ must meet there to find that out.
        own_name = f"{min((parameter.name for parameter in self.parameters), default='')}.settings"
        self._settings_name = f"{scope}{settings_name or own_name}"
        self._agreed_workers = 0
        # How many had agreed when the last step ended. Some may launch a bucket before they hear that all agree, others
        # the same bucket after it, so what holds in a step must not depend on that moment.
        self._settled_workers = 0
        self._nodes: Nodes | None = None
        self.chooser: Chooser | None = None
        # What follows from settings and sizes alone, for the settings that it was worked out for.
        self._choices: dict[int, tuple[Any, tuple[Compressor, str]]] = {}
        self._fingerprints: dict[str, tuple[Any, int]] = {}
        # Buckets that wait for the agreement, in the first step only.
        self._postponed: list[tuple[Bucket, Mapping[str, Array | None]]] = []
        self._agreement: tuple[Any, Array] | None = None

    @property
    def compressor(self) -> Compressor:
        """How gradients are compressed, as it was given."""
        return self.adaptation.compressor

    @compressor.setter
    def compressor(self, compressor: Compressor) -> None:
        self.adaptation = Adaptation(compressor)
        self._fingerprints.clear()

    @property
    def residuals(self) -> Mapping[str, Array]:
        """Parameter name -> float32 (n,): what this worker has not sent yet. To read; `load_state` changes it."""
        found = {name: parts["residual"] for name, parts in self.state.items() if "residual" in parts}
        return MappingProxyType(found)

    @property
    def step(self) -> int:
        """How many exchanges there have been, the same on all workers; schedules and shared draws follow it."""
        return max(self._steps.values(), default=self._resumed)

    @property
    def policy_state(self) -> tuple[float, ...]:
        """What a policy has to know when training resumes, the same on all workers; () where there is none."""
        return self.adaptation.saved()

    def load_state(self, state: Mapping[str, Mapping[str, Array]], step: int = 0, policy: Sequence[float] = ()) -> None:
        """Replace all that this worker keeps, between two steps and on every worker.

        Args:
            state: as `state`; the arrays are the engine's from now on.
            step: the step that was saved with it, the same on all workers.
            policy: the `policy_state` that was saved with it.
        """
        self.state = {name: dict(parts) for name, parts in state.items()}
        self._resumed = step
        self._steps.clear()
        self.adaptation.load(policy)

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
        begun = any(flight.bucket is bucket for flight in self._in_flight)
        if name in gathering or begun or any(each is bucket for each, _ in self._postponed):
            raise ConfigurationError(f"the gradient of {name!r} was handed in twice in one step")
        gathering[name] = gradient
        if len(gathering) == len(bucket.parameters):
            self._launch(bucket, self._gathering.pop(bucket.index))

    def finish(self, usable: bool = True) -> dict[str, Array]:
        """Complete all exchanges begun by `submit`, in the same order on every worker.

        Args:
            usable: False where gradients that travelled another way were not finite, on all workers.

        Returns:
            For each parameter handed in: the average (or sum) of what the workers sent, float32, flat. NaN throughout
            if any gradient of this step was not finite on some worker, in which case no state changes.

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
            flights = pending = sorted(self._in_flight, key=lambda flight: flight.bucket.index)
            while pending:
                pending = [flight for flight in pending if not self._advance(flight)]
            usable = usable and all(flight.usable for flight in flights)
            for flight in flights:
                try:
                    flight.exchange.send(usable)
                except StopIteration as end:
                    results.update(end.value)
            if flights and usable and self.adaptation.measuring:
                self._adapt()
            self._settled_workers = self._agreed_workers
        finally:
            self.adaptation.end(self.counters)
            self._gathering.clear()
            self._postponed.clear()
            self._in_flight.clear()
        return results

    def abandon(self) -> None:
        """Forget the step that is under way, on all workers; what they kept before it stays as it was."""
        self._gathering.clear()
        self._postponed.clear()
        flights = self._in_flight.copy()
        self._in_flight.clear()
        for flight in flights:
            self.transport.wait(flight.handle)

    def shares(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """What this worker may keep for shares only, when workers have agreed: its number, the owners, the parts."""
        found = []
        memory, collective = self.compressor.memory, self.compressor.collective
        if collective in ("scatter_reduce", "auto"):
            found.append((self.transport.rank, self.transport.workers, memory.of_owner().parts))
        nodes = self._nodes
        if nodes is not None and nodes.is_useful and nodes.share < nodes.owners:
            found.append((nodes.share, nodes.owners, memory.parts))
        return found

    @property
    def _asks_nodes(self) -> bool:
        """Whether it matters which workers share a node."""
        return any(each.collective in ("hierarchical", "auto") for each in self.compressor.members())

    # -- one bucket ---------------------------------------------------------------------------------------------------

    def _launch(self, bucket: Bucket, gradients: Mapping[str, Array | None]) -> None:
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        if not present:
            return
        self.begin_agreement(next(iter(present.values())))
        if self._agreement is not None and self._asks_nodes:
            # Who shares a node is asked among workers that agree that it matters.
            self._postponed.append((bucket, gradients))
            return
        if not self._in_flight:
            self.adaptation.begin(self.step, self._is_settled, next(iter(present.values())))
        exchange = self._exchange(bucket, present)
        request = next(exchange)
        assert not isinstance(request, Confirm), "nothing was exchanged yet"
        self._in_flight.append(_InFlight(bucket, exchange, self._start(bucket, request, 0)))

    def _start(self, bucket: Bucket, request: Request, rounds: int) -> Any:
        name = f"{self.scope}{bucket.name}"
        if request.label or rounds or name == self._settings_name:
            name += f".{request.label or rounds}"
        return (request.among or self.transport).start(request, name)

    def _advance(self, flight: _InFlight) -> bool:
        """Wait for the round that is under way and start the next one; True when there is none."""
        with self.counters.bucket(flight.bucket.name).timed("exchange"):
            received = self.transport.wait(flight.handle)
        request = flight.exchange.send(received)
        if isinstance(request, Confirm):
            flight.usable = request.usable
            return True
        flight.rounds += 1
        flight.handle = self._start(flight.bucket, request, flight.rounds)
        return False

    def _exchange(
        self, bucket: Bucket, gradients: Mapping[str, Array]
    ) -> Generator[Request | Confirm, Any, dict[str, Array]]:
        parameters = [parameter for parameter in bucket.parameters if parameter.name in gradients]
        counters = self.counters.bucket(bucket.name)
        counters.exchanges += 1
        counters.elements += sum(parameter.size for parameter in parameters)
        counters.dense_bytes += sum(KIND_BYTES[parameter.kind] * parameter.size for parameter in parameters)
        step = self._next_step(bucket)
        method, collective = self._choice(bucket, parameters, counters, step)
        passage: Passage | NodePassage
        if collective == "hierarchical" and self._nodes is not None:
            passage = NodePassage(self, method, parameters, gradients, counters, step, self._nodes)
        else:
            passage = Passage(self, method, parameters, gradients, counters, step, collective)
        return (yield from passage.exchange())

    def _next_step(self, bucket: Bucket) -> int:
        if not self._is_settled:
            # Workers that joined just now have other counts than the rest: until they agree, all take this one.
            self._steps[bucket.index] = max(self._steps.get(bucket.index, 0), self._resumed + 1)
            return self._resumed
        step = self._steps.get(bucket.index, self._resumed)
        self._steps[bucket.index] = step + 1
        return step

    def _choice(
        self, bucket: Bucket, parameters: Sequence[Parameter], counters: BucketCounters, step: int
    ) -> tuple[Compressor, str]:
        """The compressor and how its payloads meet, or a dense exchange where that moves fewer bytes."""
        given = self.compressor.of(bucket.name, bucket.parameters[0].shape)
        compressor = self.adaptation.method(step).of(bucket.name, bucket.parameters[0].shape)
        if compressor.meets == "dense" and given.meets != "dense":
            # A policy's choice.
            return dense_for(parameters), "allgather"
        asked = (compressor, len(parameters), self.transport.workers, self._shared_sizes, self.chooser)
        known, chosen = self._choices.get(bucket.index, (None, (compressor, "")))
        if known != asked or len(parameters) != len(bucket.parameters):
            chosen = self.chosen(compressor, parameters, given)
            self._choices[bucket.index] = asked, chosen
        counters.fallbacks += chosen[0] != compressor
        return chosen

    def chosen(
        self, compressor: Compressor, parameters: Sequence[Parameter], given: Compressor
    ) -> tuple[Compressor, str]:
        """`compressor` or a dense one, and how its payloads meet; see `choose`."""
        workers, nodes = self.transport.workers, self._shared_sizes
        return choose(compressor, parameters, workers, nodes, self.chooser, given)

    @property
    def _shared_sizes(self) -> tuple[int, ...]:
        """The number of workers on each node; empty where nobody asked, or where it does not matter."""
        return self._nodes.sizes if self._nodes is not None and self._nodes.is_useful else ()

    @property
    def settings_name(self) -> str:
        """The collective in which workers compare their settings; others of the engine's own are called after it."""
        return self._settings_name

    @property
    def nodes(self) -> Nodes | None:
        """Who shares a node; None where it does not matter."""
        return self._nodes

    def fingerprint(self, parameters: Sequence[Parameter]) -> int:
        """32 bits for all that must be the same on the workers that exchange `parameters`."""
        asked = (self.adaptation.in_use, self.transport.workers, tuple(parameters))
        known, number = self._fingerprints.get(parameters[0].name, (None, 0))
        if known != asked:
            described = [(parameter.name, parameter.size, parameter.kind) for parameter in parameters]
            method = f"{self.compressor}|{self.adaptation.in_use}"
            text = f"{method}|{self.average}|{self.transport.workers}|{sorted(self.options.items())}|{described}"
            number = zlib.crc32(text.encode())
            self._fingerprints[parameters[0].name] = asked, number
        return number

    @property
    def _is_settled(self) -> bool:
        """Whether these workers have agreed before this step."""
        return self._settled_workers == self.transport.workers

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
        request = Allgather(settings_message(ops, settings, like, self.step, self.adaptation.state))
        self._agreement = (self.transport.start(request, self._settings_name), like)

    def meet_again(self) -> None:
        """Compare settings anew before the next step, on all workers: equally many may be others than before."""
        self._agreed_workers = self._settled_workers = 0

    def conclude_agreement(self) -> None:
        """Wait for what `begin_agreement` started; `finish` does it by itself.

        Raises:
            ConfigurationError: workers were given different settings.
        """
        if self._agreement is None:
            return
        (handle, like), self._agreement = self._agreement, None
        ops = ops_for(like)
        gathered = self.transport.wait(handle)
        step, state = compare_settings(ops, gathered, self.transport.ranks, self.transport.rank)
        # A worker that joined just now takes over what those that go on have found out.
        self.adaptation.state = state
        self._steps = {bucket.index: step + 1 for bucket in self.buckets}
        self._agreed_workers = self.transport.workers
        if self._asks_nodes:
            auto = all(each.collective != "hierarchical" for each in self.compressor.members())
            measured = any(each.collective == "auto" for each in self.compressor.members())
            self._nodes = Nodes(self.transport, needed=not auto)
            if measured:
                buckets: dict[Compressor, list[tuple[Parameter, ...]]] = {}
                for bucket in self.buckets:
                    method = self.compressor.of(bucket.name, bucket.parameters[0].shape)
                    if method.collective == "auto":
                        buckets.setdefault(method, []).append(bucket.parameters)
                self.chooser = make_chooser(self.transport, self._nodes, self._settings_name, like, buckets)
        postponed, self._postponed = self._postponed, []
        for bucket, gradients in postponed:
            self._launch(bucket, gradients)

    def _adapt(self) -> None:
        """Tell the policy, on all workers alike, what they measured in this step, and what it wants to know besides."""
        ops = ops_for(self.adaptation.like)
        sent_bytes = sum(each.sent_bytes for each in self.counters.buckets.values())
        request = Allgather(self.adaptation.message(ops, sent_bytes, self.counters.waited_s))
        gathered = self.transport.wait(self.transport.start(request, f"{self._settings_name}.policy"))
        observed = self.adaptation.observed(ops, gathered, self.transport.ranks)
        ratios = self.adaptation.to_predict()
        if ratios:
            observed = replace(observed, predicted=predicted_waits(self, ratios, observed.seconds - observed.waited_s))
        self.adaptation.conclude(observed)
