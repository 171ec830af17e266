"""Agreement: settings as messages, compared with every difference named; and fingerprints that settings change."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from arrays import array_of
from hypothesis import given
from hypothesis import strategies as st
from simulated_cluster import Cluster
from steps import engines_of, parameters_of

from hvd_gradcomp.compressors import Int8, TopK, TopKInt8
from hvd_gradcomp.engine import Engine, Parameter
from hvd_gradcomp.engine.agreement import compare_settings, settings_message
from hvd_gradcomp.errors import ConfigurationError, GradcompError, PayloadError
from hvd_gradcomp.ops import Array, Ops

RANKS = (4, 7, 9)


def gathered(ops: Ops, *settings: dict[str, object]) -> Array:
    like = array_of(ops, np.zeros(1))
    return ops.concat([settings_message(ops, each, like) for each in settings])


def test_equal_settings_pass(ops):
    settings = {"compression": "topk", "ratio": 0.1, "flag": True, "name": "Größe", "nothing": None}
    compare_settings(ops, gathered(ops, settings, dict(reversed(settings.items())), settings), RANKS, 1)


def test_every_difference_is_named(ops):
    data = gathered(ops, {"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 5, "b": 2, "c": "x"})
    with pytest.raises(ConfigurationError) as caught:
        compare_settings(ops, data, RANKS, 0)
    for part in (
        "rank 7 has b = 3, rank 4 has 2",
        "rank 9 has a = 5, rank 4 has 1",
        "rank 9 has c = 'x', rank 4 has None",
    ):
        assert part in str(caught.value)
    with pytest.raises(ConfigurationError, match="rank 4 has b = 2, rank 7 has 3"):
        compare_settings(ops, data, RANKS, 1)


def test_messages_that_are_none(ops):
    good = gathered(ops, {"a": 1})
    for bad in (b"", b"\1", b"\4\0\0\0abc", b"\4\0\0\0abcd", b"\2\0\0\0[]", b"\3\0\0\0\xff\xfe\xfd", b"\xff" * 9):
        data = ops.concat([good, array_of(ops, np.frombuffer(bad, np.uint8))])
        with pytest.raises(PayloadError, match="rank 7 sent settings that cannot be read"):
            compare_settings(ops, data, RANKS[:2], 0)
    with pytest.raises(PayloadError, match="rank 7 sent settings with"):
        compare_settings(ops, ops.concat([good, good, good]), RANKS[:2], 0)


@given(data=st.binary(max_size=40))
def test_no_bytes_give_another_error(ops, data):
    message = json.dumps({"a": 1}).encode()
    whole = struct.pack("<I", len(message)) + message + data
    with pytest.raises(GradcompError):
        compare_settings(ops, array_of(ops, np.frombuffer(whole, np.uint8)), RANKS[:2], 0)


def test_settings_are_compared_again_when_the_number_of_workers_changes(ops):
    """As after an elastic restart with the same engine."""
    parameters = parameters_of([(30,)])
    cluster = Cluster(2)
    engines = engines_of(cluster, TopKInt8(ratio=0.1), parameters)

    def work(transport):
        engine = engines[transport.rank]
        engine.transport = transport
        engine.submit("p0", array_of(ops, np.ones(30, np.float32)))
        engine.finish()

    cluster.run(work)
    larger = Cluster(3)
    engines += engines_of(larger, TopKInt8(ratio=0.1), parameters)[2:]
    for expected in (1, 0):
        larger.sent = [[], [], []]
        larger.run(work)
        for sent in larger.sent:
            assert [each.name for each in sent].count("p0.settings") == expected


# -- fingerprints -----------------------------------------------------------------------------------------------------

PARAMETERS = [Parameter("w", 100, "float32"), Parameter("b", 10, "float32")]


def engine_with(**changed: object) -> Engine:
    cluster = Cluster(changed.pop("workers", 2))  # type: ignore[arg-type]
    options = {"compressor": TopKInt8(ratio=0.1), "parameters": PARAMETERS, "options": {"x": 1}} | changed
    return engines_of(cluster, **options)[0]  # type: ignore[arg-type]


def test_fingerprints_are_equal_for_equal_settings():
    one, other = (engine_with(options={"x": 1, "y": [2, 3]}), engine_with(options={"y": [2, 3], "x": 1}))
    assert one.fingerprint(PARAMETERS) == other.fingerprint(PARAMETERS)
    assert 0 <= one.fingerprint(PARAMETERS) < 2**32


@pytest.mark.parametrize(
    "changed",
    [
        {"compressor": TopKInt8(ratio=0.2)},
        {"compressor": TopKInt8(ratio=0.1, dense_below=5)},
        {"compressor": TopK(ratio=0.1) >> Int8(block=64)},
        {"average": False},
        {"workers": 3},
        {"options": {"x": 2}},
        {"options": {}},
    ],
    ids=str,
)
def test_every_setting_changes_the_fingerprint(changed):
    assert engine_with(**changed).fingerprint(PARAMETERS) != engine_with().fingerprint(PARAMETERS)


@pytest.mark.parametrize(
    "parameters",
    [
        PARAMETERS[:1],
        PARAMETERS[::-1],
        [PARAMETERS[0], Parameter("c", 10, "float32")],
        [PARAMETERS[0], Parameter("b", 11, "float32")],
        [PARAMETERS[0], Parameter("b", 10, "float16")],
    ],
    ids=str,
)
def test_the_parameters_of_an_exchange_change_the_fingerprint(parameters):
    engine = engine_with()
    assert engine.fingerprint(parameters) != engine.fingerprint(PARAMETERS)
