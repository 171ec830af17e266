"""Invariant 4, never silently wrong: a corrupt payload, or settings that differ, are an error at every worker.

The error names the rank, and comes at once: a simulated cluster reports a worker that waits for nothing as a hang.
Here bytes are changed on their way, or a worker is set up in another way; test_hostile_frames.py goes further.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from arrays import COMPRESSORS, array_of, as_numpy, gradient
from simulated_cluster import Cluster, ClusterError, MemoryTransport
from steps import engines_of, parameters_of

from hvd_gradcomp.collectives import Allgather, Allreduce, Request
from hvd_gradcomp.compressors import FP16, Compressor, Context, Int8, TopK, TopKInt8
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.errors import ConfigurationError, GradcompError, PayloadError, UnsupportedError
from hvd_gradcomp.ops import Ops, ops_for
from hvd_gradcomp.wire.frame import write_frame
from hvd_gradcomp.wire.payload import CHECKSUM, HEADER, write_payload

WORKERS = 3
Change = Callable[[np.ndarray], Any]
PARAMETERS = parameters_of([(40,), (20,)])
GATHERED = [compressor for compressor in COMPRESSORS if compressor.meets == "gather"]


def outcomes(cluster: Cluster, engines: Sequence[Engine], ops: Ops, steps: int = 1) -> list[Any]:
    """What became of each worker in its last step."""

    def work(transport: MemoryTransport) -> Any:
        engine = engines[transport.rank]
        for number in range(steps):
            for each in engine.parameters:
                x = gradient("normal", (each.size,), (number, transport.rank))
                engine.submit(each.name, array_of(ops, x))
            engine.finish()
        return "finished"

    return cluster.outcomes(work)


def tampering(rank: int, change: Change, settings: bool = False) -> Callable[..., Request]:
    """Applies `change` to the bytes of the payloads (or the settings) that `rank` sends."""

    def tamper(sender: int, name: str, request: Request) -> Request:
        if sender != rank or not isinstance(request, Allgather) or name.endswith(".settings") != settings:
            return request
        ops = ops_for(request.payload)
        changed = np.asarray(change(as_numpy(request.payload)), np.uint8)
        return replace(request, payload=array_of(ops, changed))

    return tamper


def tampered(
    compressor: Compressor, ops: Ops, victim: int, change: Callable[[np.ndarray], Any], **how: Any
) -> list[Any]:
    """The outcomes when the bytes of worker `victim` are changed."""
    cluster = Cluster(WORKERS)
    cluster.tamper = tampering(cluster.ranks[victim], change, **how)
    return outcomes(cluster, engines_of(cluster, compressor, PARAMETERS), ops)


def assert_named(found: Sequence[Any], rank: int, error: type[GradcompError] = PayloadError) -> None:
    """Every worker has met an error that names `rank`."""
    for each in found:
        assert type(each) is error, f"expected {error.__name__}, got {each!r}"
        assert re.search(rf"\b{rank}\b", str(each)), f"rank {rank} is not named: {each}"


def test_untouched_payloads_are_fine(ops):
    """What the tests below see does not come from the tampering itself."""
    assert tampered(TopKInt8(ratio=0.1), ops, 1, lambda payload: payload) == ["finished"] * WORKERS


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", range(WORKERS))
def test_any_corrupt_byte_of_a_payload_is_seen_by_every_worker(ops, victim):
    lengths = []

    def flip(payload: np.ndarray) -> np.ndarray:
        lengths.append(len(payload))
        payload[place] ^= 1 << place % 8
        return payload

    place = 0
    while not lengths or place < lengths[0]:
        rank = Cluster(WORKERS).ranks[victim]
        found = tampered(TopKInt8(ratio=0.1), ops, victim, flip)
        assert_named(found, rank)
        assert all(f"rank {rank} sent a corrupt payload" in str(each) for each in found)
        place += 1
    # Header, and for each of two frames: header, positions, values.
    assert place >= 16 + 2 * (16 + 8 + 4)


@pytest.mark.parametrize("compressor", GATHERED, ids=str)
@pytest.mark.parametrize("victim", range(WORKERS))
def test_payloads_cut_short_or_too_long(ops, compressor, victim):
    rank = Cluster(WORKERS).ranks[victim]
    for cut in (1, 3, 4, 20):
        assert_named(tampered(compressor, ops, victim, lambda payload, cut=cut: payload[:-cut]), rank)
    for extra in (b"\0", b"\0\0\0\0", b"HG"):
        added = list(extra)
        assert_named(tampered(compressor, ops, victim, lambda payload, added=added: [*payload, *added]), rank)


@pytest.mark.parametrize("victim", range(WORKERS))
def test_zeros_behind_a_payload_are_no_worker_that_joined_unnamed(ops, victim):
    """A header of zeros is what Horovod sends for a joined worker, and what zeros behind a payload look like."""
    rank = Cluster(WORKERS).ranks[victim]
    error = PayloadError if victim == WORKERS - 1 else UnsupportedError
    assert_named(tampered(TopKInt8(ratio=0.1), ops, victim, lambda payload: [*payload, *bytes(40)]), rank, error)


def test_a_payload_of_another_format_version(ops):
    def newer(payload: np.ndarray) -> np.ndarray:
        payload[2] += 1
        return payload

    found = tampered(TopKInt8(ratio=0.1), ops, 2, newer)
    assert_named(found, Cluster(WORKERS).ranks[2])
    assert all("format version 2, this is version 1" in str(each) for each in found)


def test_every_corrupt_byte_of_the_settings_is_an_error(ops):
    """No worker goes on with another one's settings as they did not leave it."""
    lengths = []

    def flip(message: np.ndarray) -> np.ndarray:
        lengths.append(len(message))
        message[place] ^= 0x15
        return message

    place = 0
    rank = Cluster(WORKERS).ranks[1]
    while not lengths or place < lengths[0]:
        for each in tampered(TopKInt8(ratio=0.1), ops, 1, flip, settings=True):
            assert type(each) in (PayloadError, ConfigurationError), repr(each)
            assert re.search(rf"\brank {rank}\b", str(each))
        place += 1


# -- frames that no checksum gives away -------------------------------------------------------------------------------


def resent(compressor: Compressor, ops: Ops, frames: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """The outcomes when worker 1 sends other frames, in a payload that is sound."""
    cluster = Cluster(WORKERS)
    engines = engines_of(cluster, compressor, PARAMETERS)
    fingerprint = engines[0].fingerprint(engines[0].buckets[0].parameters)
    rank = cluster.ranks[1]

    def tamper(sender: int, name: str, request: Request) -> Request:
        if sender != rank or name.endswith(".settings"):
            return request
        like = request.payload
        good = [
            compressor.encode(ops, array_of(ops, np.ones(each.size, np.float32)), Context())[0]
            for each in engines[0].buckets[0].parameters
        ]
        return Allgather(write_payload(ops, frames(good), fingerprint, like))

    cluster.tamper = tamper
    return outcomes(cluster, engines, ops)


@pytest.mark.parametrize("compressor", GATHERED, ids=str)
def test_frames_that_do_not_belong_there(ops, compressor):
    rank = Cluster(WORKERS).ranks[1]
    assert resent(compressor, ops, lambda frames: frames) == ["finished"] * WORKERS
    assert_named(resent(compressor, ops, lambda frames: frames[::-1]), rank)
    assert_named(resent(compressor, ops, lambda frames: frames[:1]), rank)
    assert_named(resent(compressor, ops, lambda frames: []), rank)
    assert_named(resent(compressor, ops, lambda frames: [*frames, frames[0]]), rank)
    foreign = write_frame(ops, 99, 20, 0, ops.zeros(0, "uint8", array_of(ops, np.zeros(0))))
    assert_named(resent(compressor, ops, lambda frames: [foreign, *frames[1:]]), rank)


# -- settings ---------------------------------------------------------------------------------------------------------


def differing(ops: Ops, *, steps: int = 1, **other: Any) -> list[Any]:
    """The outcomes when worker 1 has other settings from the beginning."""
    cluster = Cluster(WORKERS)
    usual: dict[str, Any] = {"compressor": TopKInt8(ratio=0.1), "parameters": PARAMETERS}
    engines = [
        Engine(transport=MemoryTransport(cluster, rank), **(usual | other if rank == 1 else usual))
        for rank in range(WORKERS)
    ]
    return outcomes(cluster, engines, ops, steps)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"compressor": TopKInt8(ratio=0.2)}, "topk(ratio=0.2) >> int8"),
        ({"compressor": TopKInt8(ratio=0.1, dense_below=5)}, "dense_below=5"),
        ({"compressor": FP16()}, "fp16"),
        ({"compressor": TopK(ratio=1)}, "topk(ratio=1"),
        ({"average": False}, "'sum'"),
        ({"bucket_bytes": 10}, "buckets"),
        ({"groups": [["p0"], ["p1"]]}, "buckets"),
        ({"options": {"sparse_as_dense": True}}, "sparse_as_dense"),
        ({"parameters": [*PARAMETERS, Parameter("p2", 3, "float32")]}, "buckets"),
        ({"parameters": [PARAMETERS[0], replace(PARAMETERS[1], kind="float16")]}, "buckets"),
    ],
    ids=str,
)
def test_settings_that_differ_from_the_beginning(ops, other, word):
    found = differing(ops, **other)
    assert_named(found, Cluster(WORKERS).ranks[1], ConfigurationError)
    assert all(word in str(each) for each in found)


def test_settings_that_are_equal_are_compared_once_and_pass(ops):
    cluster = Cluster(WORKERS)
    engines = engines_of(cluster, TopKInt8(ratio=0.1), PARAMETERS, options={"sparse_as_dense": True})
    assert outcomes(cluster, engines, ops, steps=3) == ["finished"] * WORKERS
    assert sum(each.name.endswith(".settings") for each in cluster.sent[0]) == 1


@pytest.mark.parametrize("other", [TopKInt8(ratio=0.2), TopK(ratio=0.1), Int8()], ids=str)
def test_a_worker_that_changes_its_compressor_alone(ops, other):
    """In the middle of the training, when the settings have been compared already."""
    cluster = Cluster(WORKERS)
    engines = engines_of(cluster, TopKInt8(ratio=0.1), PARAMETERS)
    assert outcomes(cluster, engines, ops, steps=2) == ["finished"] * WORKERS
    engines[1].compressor = other
    found = outcomes(cluster, engines, ops)
    assert_named([found[0], found[2]], cluster.ranks[1], ConfigurationError)
    # To worker 1 it is the others that differ.
    assert_named([found[1]], cluster.ranks[0], ConfigurationError)
    assert_named([found[1]], cluster.ranks[2], ConfigurationError)


def test_a_worker_that_changes_to_another_kind_of_exchange_alone(ops):
    """Horovod itself refuses to match an allreduce with an allgather, since both go by the same name."""
    cluster = Cluster(WORKERS)
    engines = engines_of(cluster, TopKInt8(ratio=0.1), PARAMETERS)
    assert outcomes(cluster, engines, ops) == ["finished"] * WORKERS
    engines[1].compressor = FP16()
    assert all(isinstance(each, ClusterError) and "mismatched" in str(each) for each in outcomes(cluster, engines, ops))


def test_a_worker_that_leaves_out_a_parameter_alone(ops):
    cluster = Cluster(2)
    engines = engines_of(cluster, TopKInt8(ratio=0.1), PARAMETERS)

    def work(transport: MemoryTransport) -> Any:
        engine = engines[transport.rank]
        engine.submit("p0", array_of(ops, np.ones(40, np.float32)))
        engine.submit("p1", None if transport.rank else array_of(ops, np.ones(20, np.float32)))
        return engine.finish()

    found = cluster.outcomes(work)
    assert_named(found[:1], cluster.ranks[1], ConfigurationError)
    assert_named(found[1:], cluster.ranks[0], ConfigurationError)


def test_a_gradient_of_another_size_than_its_parameter(ops):
    cluster = Cluster(2)
    engines = engines_of(cluster, TopKInt8(ratio=0.1), PARAMETERS)

    def work(transport: MemoryTransport) -> Any:
        engine = engines[transport.rank]
        engine.submit("p0", array_of(ops, np.ones(40 + transport.rank, np.float32)))
        engine.submit("p1", array_of(ops, np.ones(20, np.float32)))
        return engine.finish()

    assert_named(cluster.outcomes(work), cluster.ranks[1])


# -- never added ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", GATHERED, ids=str)
def test_payload_bytes_are_never_added(ops, compressor):
    """Compressors whose payloads are decoded use no allreduce; what is added is float values and no bytes."""
    cluster = Cluster(2)
    engines = engines_of(cluster, compressor, PARAMETERS)
    assert outcomes(cluster, engines, ops, steps=3) == ["finished"] * 2
    assert [type(each.request) for each in cluster.sent[0]] == [Allgather] * 4


@pytest.mark.parametrize("compressor", [each for each in COMPRESSORS if each.meets == "sum"], ids=str)
def test_only_float_values_are_added(ops, compressor):
    cluster = Cluster(2, adds=("float32", "float16", "bfloat16"))
    engines = engines_of(cluster, compressor, PARAMETERS)
    assert outcomes(cluster, engines, ops, steps=1) == ["finished"] * 2
    added = [each.request for each in cluster.sent[0] if isinstance(each.request, Allreduce)]
    assert [(ops.dtype_of(each.values), each.kind) for each in added] == [("float32", compressor.sum_kind)]


def test_header_layout():
    """The places that the tests above change are what they think they are."""
    assert (HEADER.size, CHECKSUM.size) == (12, 4)
