"""Hierarchical exchange: dense within a node, compressed between nodes, and one residual for all workers of a node.

    gradient ─ alltoall on the node ─ sum of a share ─ + memory of the share ─ compressor ─ exchange with the same share
                                                          of the other nodes ─ allgather on the node ─ the sums

Each worker of a node owns 1 / S of every tensor, S being the number of workers of the smallest node, and keeps the
memory of its share only: error feedback is shared by the node's workers, and costs each 1 / S of a gradient. Workers
beyond the S-th take part on their node and own nothing. What is exchanged between nodes is a passage like any other,
on vectors of the shares' sizes, so any way of compressing and of meeting serves there.

State of full length (after a start from a checkpoint, or an exchange of another kind) is handed to the owners with the
first gradients.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_gradcomp.collectives import Allgather, Alltoall, Confirm, Exchange, Request, Transport
from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.engine.adaptation import Adaptation
from hvd_gradcomp.engine.buckets import Parameter
from hvd_gradcomp.engine.passage import Home, Passage, Totals
from hvd_gradcomp.errors import GradcompError, PayloadError, UnsupportedError
from hvd_gradcomp.feedback.shares import join_shares, own_parts, share_of, share_size, shared_part, whole_parts
from hvd_gradcomp.ops import Array, ops_for
from hvd_gradcomp.telemetry import BucketCounters
from hvd_gradcomp.wire.payload import split_payloads, write_payload, write_refusal

# Between more nodes than this each sends less by way of owners (scatter_reduce).
_GATHERING_NODES = 4
# Which parts of the memory travel with the gradients, one bit each.
_MOVED = struct.Struct("<I")


class Nodes:
    """Who shares a node, and who owns the same share on the others. A collective call.

    Args:
        transport: among all workers.
        needed: whether it is an error if process sets cannot be made; else `is_useful` says so.

    Attributes:
        sizes: the number of workers on each node.
        owners: into how many shares tensors are dealt.
        share: the number of this worker's share; `owners` and above for those that own none.
        local: the transport among the workers of this node.
        across: the transport among the owners of this worker's share.
    """

    def __init__(self, transport: Transport, needed: bool = True) -> None:
        nodes = transport.nodes()
        self.sizes = tuple(len(node) for node in nodes)
        self.owners = min(self.sizes)
        mine = next(node for node in nodes if transport.rank in node)
        self.share = mine.index(transport.rank)
        self.local = self.across = transport
        #: Whether there is more than one node, and one of more than one worker.
        self.is_useful = len(self.sizes) > 1 and max(self.sizes) > 1
        if not self.is_useful:
            return
        try:
            self.local = transport.part(nodes)
            sharing = [sorted(node[share] for node in nodes) for share in range(self.owners)]
            self.across = transport.part([*sharing, *([rank] for node in nodes for rank in node[self.owners :])])
        except UnsupportedError:
            if needed:
                raise
            self.is_useful = False

    @property
    def collective(self) -> str:
        """How shares meet between the nodes."""
        return "scatter_reduce" if len(self.sizes) > _GATHERING_NODES else "allgather"


@dataclass
class _Owner:
    """What the passage between the nodes belongs to: one share of what an engine has."""

    compressor: Compressor
    transport: Transport
    adaptation: Adaptation
    state: dict[str, dict[str, Array]]
    number: int
    average: bool = False

    def fingerprint(self, parameters: Sequence[Parameter]) -> int:
        return self.number


class NodePassage:
    """The tensors of one bucket on their way through one hierarchical exchange.

    Args:
        engine: whose state is used and, at the end, replaced.
        method: how to compress between the nodes.
        parameters: those of the bucket that have a gradient in this step.
        gradients: parameter name -> gradient, as given to `Engine.submit`.
        counters: of the bucket.
        step: see `Context`.
        nodes: of the engine's workers.
    """

    def __init__(
        self,
        engine: Home,
        method: Compressor,
        parameters: Sequence[Parameter],
        gradients: Mapping[str, Array],
        counters: BucketCounters,
        step: int,
        nodes: Nodes,
    ) -> None:
        self.engine = engine
        self.method = method
        self.parameters = parameters
        self.counters = counters
        self.step = step
        self.nodes = nodes
        self.like = gradients[parameters[0].name]
        self.ops = ops_for(self.like)
        self.gradients = {each.name: self.ops.flat32(gradients[each.name]) for each in parameters}
        self.memory = engine.compressor.of(parameters[0].name, parameters[0].shape).memory
        self.number = engine.fingerprint(parameters)
        self.passage: Passage | None = None
        number = zlib.crc32(f"{self.number}|{nodes.share}".encode())
        self.owner = _Owner(engine.compressor, nodes.across, engine.adaptation, {}, number)
        self.owned = [
            Parameter(each.name, size, each.kind)
            for each in parameters
            if nodes.share < nodes.owners and (size := share_size(each.name, each.size, nodes.share, nodes.owners))
        ]

    def exchange(self) -> Generator[Request | Confirm, Any, dict[str, Array]]:
        """Yields requests, receives their results, and confirms; returns what `Engine.finish` hands out."""
        ops, nodes, counters = self.ops, self.nodes, self.counters
        counters.nodewise += 1
        with counters.timed("compress"):
            request = self._to_owners()
        self._count_local(len(request.payload))
        arrived = yield request
        counters.received_bytes += len(arrived) - request.splits[nodes.local.rank]
        answer = yield from self._answer(arrived)
        self._count_local(len(answer))
        gathered = yield Allgather(answer, among=nodes.local, label="node")
        counters.received_bytes += len(gathered) - len(answer)
        with counters.timed("decompress"):
            received = split_payloads(ops, gathered, nodes.local.ranks, self.number)
            usable = not any(each.non_finite for each in received)
        confirmed = yield Confirm(usable)
        with counters.timed("decompress"):
            if not usable or not confirmed:
                counters.non_finite += 1
                nan = float("nan")
                return {each.name: ops.zeros(each.size, "float32", self.like) + nan for each in self.parameters}
            shares = [
                self._read(each.frames.data, owner, f"rank {each.rank}")
                for owner, each in enumerate(received[: nodes.owners])
            ]
            divisor = self.engine.transport.workers if self.engine.average else 1
            results = {}
            for each in self.parameters:
                total = join_shares(ops, each.name, [share[each.name] for share in shares], each.size)
                results[each.name] = ops.divide(total, divisor) if divisor > 1 else total
            self._remember()
        return results

    # -- on the node --------------------------------------------------------------------------------------------------

    def _to_owners(self) -> Alltoall:
        """Every owner's share of this worker's gradients, and of what it keeps that is no share of its own."""
        ops, nodes = self.ops, self.nodes
        ending = shared_part("", nodes.share, nodes.owners)
        state = self.engine.state
        whole = {
            each.name: whole_parts(ops, each.name, each.size, state.get(each.name, {}), ending)
            for each in self.parameters
        }
        known = self.memory.parts
        moved = [part for part in known if any(part in parts for parts in whole.values())]
        bits = sum(1 << known.index(part) for part in moved)
        payloads = []
        for owner in range(nodes.local.workers):
            vectors = []
            if owner < nodes.owners:
                for each in self.parameters:
                    vectors.append(share_of(ops, each.name, self.gradients[each.name], owner, nodes.owners))
                for part in moved:
                    for each in self.parameters:
                        kept = whole[each.name].get(part)
                        size = share_size(each.name, each.size, owner, nodes.owners)
                        vectors.append(
                            ops.zeros(size, "float32", self.like)
                            if kept is None
                            else share_of(ops, each.name, kept, owner, nodes.owners)
                        )
            frames = [ops.from_host(_MOVED.pack(bits), self.like), *(ops.bytes_of(vector) for vector in vectors)]
            payloads.append(write_payload(ops, frames, self.number, self.like))
        return Alltoall(ops.concat(payloads), tuple(len(payload) for payload in payloads), among=nodes.local)

    def _take(self, arrived: Array) -> dict[str, Array]:
        """The sum over the node of this worker's share of each gradient; what came with it goes to `owner.state`."""
        ops, nodes = self.ops, self.nodes
        known = self.memory.parts
        sums: dict[str, Array] = {}
        for each in self.owned:
            kept = own_parts(self.engine.state.get(each.name, {}), nodes.share, nodes.owners)
            self.owner.state[each.name] = {part: ops.copy(values) for part, values in kept.items()}
        for sender in split_payloads(ops, arrived, nodes.local.ranks, self.number):
            data = sender.frames.data
            (bits,) = _MOVED.unpack(ops.to_host(data[: _MOVED.size]))
            rest = data[_MOVED.size :]
            moved = [part for place, part in enumerate(known) if bits >> place & 1]
            length = 4 * sum(parameter.size for parameter in self.owned)
            if bits >> len(known) or len(rest) != length * (1 + len(moved)):
                raise PayloadError(f"rank {sender.rank} sent {len(rest)} bytes of {length * (1 + len(moved))}")
            for name, values in self._split(rest[:length]).items():
                sums[name] = ops.accumulate(sums[name], values) if name in sums else ops.copy(values)
            for place, part in enumerate(moved, 1):
                for name, values in self._split(rest[place * length : (place + 1) * length]).items():
                    parts = self.owner.state[name]
                    parts[part] = ops.accumulate(parts[part], values) if part in parts else ops.copy(values)
        return sums

    def _split(self, data: Array) -> dict[str, Array]:
        """This worker's shares out of their bytes."""
        values = self.ops.from_bytes(self.ops.copy(data), "float32")
        found = {}
        start = 0
        for each in self.owned:
            found[each.name] = values[start : start + each.size]
            start += each.size
        return found

    def _read(self, data: Array, owner: int, who: str) -> dict[str, Array]:
        """The sums of the share of `owner`."""
        values = self.ops.from_bytes(self.ops.copy(data), "float32")
        found = {}
        start = 0
        for each in self.parameters:
            end = start + share_size(each.name, each.size, owner, self.nodes.owners)
            found[each.name] = values[start:end]
            start = end
        if start != len(values):
            raise PayloadError(f"{who} sent {len(values)} sums where {start} were expected")
        return found

    def _count_local(self, sent: int) -> None:
        self.counters.sent_bytes += sent
        self.counters.node_bytes += sent

    # -- between the nodes --------------------------------------------------------------------------------------------

    def _answer(self, arrived: Array) -> Exchange[Array]:
        """The payload of all workers' sums of this worker's share; or word that they are not finite, or of an error."""
        ops = self.ops
        nodes = self.nodes
        try:
            sums = self._take(arrived)
        except GradcompError as error:
            # The other owners wait for this one, and the others of its node for it.
            refusal = write_refusal(ops, error, self.owner.number, self.like)
            yield from _among(self._say(refusal), nodes.across)
            return write_refusal(ops, error, self.number, self.like)
        try:
            totals: Totals | None = {}
            results: dict[str, Array] = {}
            if not self.owned:
                # As many operations as all workers begin, or those without a name would no longer match.
                yield from _among(self._say(write_payload(ops, [], self.owner.number, self.like)), nodes.across)
            else:
                self.passage = Passage(
                    self.owner,
                    self.method,
                    self.owned,
                    sums,
                    self.counters,
                    self.step,
                    nodes.collective,
                    nodes.owners,
                )
                totals = yield from _among(self.passage.reduce(), nodes.across)
            with self.counters.timed("decompress"):
                if totals is None:
                    return write_payload(ops, [], self.number, self.like, non_finite=True)
                if self.passage is not None:
                    results = self.passage.results(totals)
                frames = [ops.bytes_of(results[each.name]) for each in self.owned]
                return write_payload(ops, frames, self.number, self.like)
        except GradcompError as error:
            return write_refusal(ops, error, self.number, self.like)

    def _say(self, payload: Array) -> Exchange[Totals | None]:
        """Hand `payload` to all owners of this share, in place of a passage, in as many rounds as that has."""
        if self.nodes.collective == "scatter_reduce":
            owners = self.nodes.across.workers
            yield Alltoall(self.ops.concat([payload] * owners), (len(payload),) * owners)
        yield Allgather(payload)
        return None

    def _remember(self) -> None:
        """Put the new state of this worker's shares in the place of all that it had."""
        nodes, state = self.nodes, self.engine.state
        if self.passage is not None:
            self.passage.remember()
        for each in self.parameters:
            state.pop(each.name, None)
        for name, parts in self.owner.state.items():
            if parts:
                state[name] = {shared_part(part, nodes.share, nodes.owners): values for part, values in parts.items()}


def _among(exchange: Exchange[Totals | None], transport: Transport) -> Exchange[Totals | None]:
    """`exchange` with its requests to be met by the workers of `transport`."""
    received = None
    while True:
        try:
            request = next(exchange) if received is None else exchange.send(received)
        except StopIteration as end:
            totals: Totals | None = end.value
            return totals
        received = yield replace(request, among=transport)
