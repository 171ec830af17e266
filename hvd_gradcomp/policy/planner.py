"""What a training step will take with each method, from what was measured on the machines at hand. Pure formulas.

A step is a pipeline: gradients become ready from the last layer to the first while the backward pass runs, compressing
them takes its turn on the same processor, a finished bucket goes to the network, and the network carries one bucket
after another. What it has not carried when the backward pass ends is waited for; then everything is decoded.

References:
    S. Agarwal, H. Wang, S. Venkataraman, D. Papailiopoulos, "On the Utility of Gradient Compression in Distributed
    Training Systems", MLSys 2022 (why overlap decides, and when compression does not pay).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvd_gradcomp.policy.cost import Links, Topology, request_seconds

#: Of a step's time without exchange; the backward pass computes two gradients where the forward pass computes a value.
FORWARD_SHARE = 1 / 3
# Differences below this are within what a prediction can tell.
_ALIKE = 1.1


@dataclass(frozen=True)
class Sending:
    """One bucket of gradients, and the collectives that exchange it.

    Attributes:
        dense_bytes: of the gradients.
        requests: kind (see `cost.request_seconds`) and bytes that this worker hands in, one after the other.
    """

    dense_bytes: float
    requests: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Method:
    """A way of exchanging the gradients of a model.

    Attributes:
        name: how a user asks for it.
        collective: how payloads meet.
        buckets: in the order in which gradients become ready.
        compress_s: seconds of compressing all of them.
        decompress_s: seconds of decoding all workers' payloads.
    """

    name: str
    collective: str
    buckets: tuple[Sending, ...]
    compress_s: float = 0.0
    decompress_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes handed to collectives by bytes of gradient."""
        sent = sum(size for bucket in self.buckets for _, size in bucket.requests)
        return sent / sum(bucket.dense_bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Compute:
    """Seconds of a training step without any exchange."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Machines:
    """Where the workers are, and what connects them.

    Attributes:
        topology: which workers share a node.
        links: kind of collective -> the networks as it sees them.
        overlap: how fast the network goes on while the workers compute, as a part of its speed.
    """

    topology: Topology
    links: Mapping[str, Links]
    overlap: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """What is expected of a method.

    Attributes:
        method: of which.
        wire_s: seconds that the network is busy in a step.
        exchange_s: seconds from all gradients to all averages when nothing else is done meanwhile.
        step_s: seconds of a training step, overlap taken into account; None where the time to compute is not known.
        speed_up: how many times faster than dense, in steps if they are known and in exchanges if not.
    """

    method: Method
    wire_s: float
    exchange_s: float
    step_s: float | None
    speed_up: float = 1.0


def predict(method: Method, machines: Machines, compute: Compute | None = None) -> Prediction:
    """What a step takes with `method`."""
    wires = [_wire(bucket, machines) for bucket in method.buckets]
    exchange = _pipeline(method, wires, 0.0, machines.overlap)
    step = compute.forward_s + _pipeline(method, wires, compute.backward_s, machines.overlap) if compute else None
    return Prediction(method, sum(busy for busy, _ in wires) + max(delay for _, delay in wires), exchange, step)


def rank(methods: Sequence[Method], machines: Machines, compute: Compute | None = None) -> list[Prediction]:
    """Predictions for all methods, the fastest first; one of them has to be called "dense"."""
    found = [predict(method, machines, compute) for method in methods]
    base = next(each for each in found if each.method.name == "dense")

    def seconds(each: Prediction) -> float:
        return each.exchange_s if each.step_s is None else each.step_s

    found = [replace(each, speed_up=seconds(base) / max(seconds(each), 1e-12)) for each in found]
    return sorted(found, key=seconds)


def advice(ranking: Sequence[Prediction], compute: Compute | None = None) -> str:
    """What the ranking means, in a sentence."""
    best = ranking[0]
    dense = next(each for each in ranking if each.method.name == "dense")
    if compute is None:
        saved = best.speed_up
        if saved < _ALIKE:
            return "dense is best here: no method exchanges these gradients faster"
        return (
            f"{_called(best)} exchanges fastest here, {saved:.1f} times as fast as dense; whether steps become faster "
            "depends on how much of the exchange hides behind the backward pass: give --step-ms to know"
        )
    assert dense.step_s is not None
    alone = compute.forward_s + compute.backward_s
    if dense.step_s < _ALIKE * alone:
        return (
            "dense is best here: the exchange hides behind backward "
            f"(of a step's {1e3 * dense.step_s:.1f} ms only {1e3 * (dense.step_s - alone):.1f} ms wait for it)"
        )
    if best.speed_up < _ALIKE:
        return "dense is best here: compressing takes as long as it saves on the network"
    assert best.step_s is not None
    return (
        f"{_called(best)} is best here: steps of {1e3 * best.step_s:.1f} ms instead of {1e3 * dense.step_s:.1f} ms "
        f"with dense, {best.speed_up:.1f} times as fast; computing alone takes {1e3 * alone:.1f} ms"
    )


def _called(prediction: Prediction) -> str:
    method = prediction.method
    return (
        f"{method.name} by {method.collective}"
        if method.collective in ("scatter_reduce", "hierarchical")
        else method.name
    )


def _wire(bucket: Sending, machines: Machines) -> tuple[float, float]:
    """Seconds for which one bucket keeps the network busy, and seconds by which its result comes later than that.

    The latter are latencies: collectives of other buckets begin and end meanwhile.
    """
    instant = {
        kind: Links(replace(links.between, latency_s=0.0), replace(links.within, latency_s=0.0))
        for kind, links in machines.links.items()
    }
    busy, whole = (
        sum(request_seconds(kind, size, machines.topology, links) for kind, size in bucket.requests)
        for links in (instant, machines.links)
    )
    return busy, whole - busy


def _pipeline(method: Method, wires: Sequence[tuple[float, float]], backward_s: float, overlap: float) -> float:
    """Seconds from the start of the backward pass until the last average is there."""
    work = backward_s + method.compress_s
    whole = sum(bucket.dense_bytes for bucket in method.buckets)
    done = free = last = 0.0
    for bucket, (busy, delay) in zip(method.buckets, wires, strict=True):
        done += bucket.dense_bytes / whole
        start = max(free, done * work)
        meanwhile = overlap * max(0.0, work - start)
        free = start + busy / overlap if busy < meanwhile else max(start, work) + busy - meanwhile
        last = max(last, free + delay)
    return max(last, work) + method.decompress_s
