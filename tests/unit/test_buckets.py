"""The plan of buckets: who shares a payload, in which order, and that every worker plans the same."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_gradcomp.engine import Bucket, Parameter, plan_buckets
from hvd_gradcomp.engine.buckets import BUCKET_BYTES, BUCKET_VARIABLE, configured_bucket_bytes
from hvd_gradcomp.errors import ConfigurationError


def parameters(*sizes: int) -> list[Parameter]:
    return [Parameter(f"p{index}", size, "float32") for index, size in enumerate(sizes)]


def names(buckets: tuple[Bucket, ...]) -> list[list[str]]:
    return [[each.name for each in bucket.parameters] for bucket in buckets]


@given(sizes=st.lists(st.integers(0, 100), max_size=20), bucket_bytes=st.integers(1, 1000))
def test_every_parameter_is_in_one_bucket_and_no_bucket_is_too_large(sizes, bucket_bytes):
    buckets = plan_buckets(parameters(*sizes), bucket_bytes)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    # From the end of the model, where gradients are ready first.
    assert list(chain.from_iterable(names(buckets))) == [f"p{index}" for index in reversed(range(len(sizes)))]
    for bucket in buckets:
        assert bucket.parameters
        assert len(bucket.parameters) == 1 or 4 * bucket.size <= bucket_bytes
    for one, following in pairwise(buckets):
        assert 4 * (one.size + following.parameters[0].size) > bucket_bytes, "closed before it was full"


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [
        (400, [["p3", "p2", "p1", "p0"]]),
        (399, [["p3", "p2", "p1"], ["p0"]]),
        (200, [["p3", "p2"], ["p1", "p0"]]),
        (199, [["p3"], ["p2", "p1"], ["p0"]]),
        (1, [["p3"], ["p2"], ["p1"], ["p0"]]),
    ],
)
def test_a_bucket_is_closed_before_it_would_be_too_large(bucket_bytes, expected):
    assert names(plan_buckets(parameters(30, 20, 15, 35), bucket_bytes)) == expected


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own():
    assert names(plan_buckets(parameters(1, 1000, 1), 100)) == [["p2"], ["p1"], ["p0"]]


def test_no_parameters_no_buckets():
    assert plan_buckets([]) == ()
    assert plan_buckets([], groups=[["p0"]]) == ()


def test_a_bucket_is_named_and_measured():
    (bucket,) = plan_buckets(parameters(3, 4))
    assert (bucket.name, bucket.size) == ("p1", 7)


def test_groups_become_buckets_and_the_rest_stands_alone():
    plan = plan_buckets(parameters(9, 9, 9, 9, 9), bucket_bytes=4, groups=[["p3", "p0"], ["p2"]])
    assert names(plan) == [["p3", "p0"], ["p2"], ["p1"], ["p4"]]


def test_groups_may_name_what_is_not_compressed_or_nothing():
    plan = plan_buckets(parameters(9, 9), groups=[["bias", "p1"], ["bias"], [], ["p0"]])
    assert names(plan) == [["p1"], ["p0"]]
    assert [bucket.index for bucket in plan] == [0, 1]


def test_a_parameter_in_two_groups_is_in_the_first():
    assert names(plan_buckets(parameters(9, 9), groups=[["p0"], ["p0", "p1"]])) == [["p0"], ["p1"]]


def test_the_environment_gives_the_size(monkeypatch):
    monkeypatch.delenv(BUCKET_VARIABLE, raising=False)
    assert configured_bucket_bytes() == BUCKET_BYTES
    monkeypatch.setenv(BUCKET_VARIABLE, "400")
    assert configured_bucket_bytes() == 400


@pytest.mark.parametrize("text", ["0", "-1", "16MB", "1.5"])
def test_an_environment_that_gives_no_size_is_refused(monkeypatch, text):
    monkeypatch.setenv(BUCKET_VARIABLE, text)
    with pytest.raises(ConfigurationError, match=f"{BUCKET_VARIABLE} must be a number of bytes .* got '{text}'"):
        configured_bucket_bytes()
