"""Specs: every compressor prints as one that parses back, and a bad one gets told what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.compressors import (
    BF16,
    FP16,
    Chain,
    Compression,
    Compressor,
    Int8,
    NoCompression,
    TopK,
    TopKInt8,
    compression_from_spec,
    register_spec,
    spec,
)
from hvd_gradcomp.compressors.base import as_compressor
from hvd_gradcomp.errors import ConfigurationError, GradcompError, UnsupportedError
from hvd_gradcomp.feedback import ErrorFeedback, NoMemory

memories = st.sampled_from([ErrorFeedback(), NoMemory()])
sizes = st.sampled_from([0, 1, 1024, 2**40])
blocks = st.integers(0, 31).map(lambda log2: 2**log2)
ratios = st.floats(0, 1, exclude_min=True)
topks = st.builds(TopK, ratios, memory=memories, dense_below=sizes)
codes = st.one_of(
    st.builds(Int8, blocks, memory=memories, dense_below=sizes),
    st.builds(FP16, memory=memories, dense_below=sizes),
    st.builds(BF16, memory=memories, dense_below=sizes),
    st.builds(NoCompression, memory=memories, dense_below=sizes),
)
behind = st.one_of(st.builds(Int8, blocks), st.sampled_from([FP16(), BF16(), NoCompression()]))
compressors = st.one_of(topks, codes, st.builds(lambda left, right: left >> right, topks, behind))


def test_every_method_has_one_name_in_specs_and_in_compression():
    """Horovod's habit: an attribute that is passed as it is, or called with hyper-parameters."""
    names = [name for name in vars(Compression) if not name.startswith("_")]
    assert len(names) >= 20
    for name in names:
        method = as_compressor(getattr(Compression, name))
        assert method == as_compressor(getattr(Compression, name)()) == compression_from_spec(name)
    assert Compression.powersgd(rank=4) == compression_from_spec("powersgd(rank=4)")
    assert str(Compression.dgc(ratio=0.001) >> Compression.fp16) == "dgc >> fp16"
    # What is made of other compressors only has no defaults.
    made_of_others = {">>", "adaptive", "rules"}
    assert {each.spec_name for each in _all(Compressor) if hasattr(each, "spec_name")} - made_of_others <= set(names)


def _all(base: type) -> set[type]:
    """The subclasses of this package, however deep."""
    found = {each for child in base.__subclasses__() for each in {child, *_all(child)}}
    return {each for each in found if each.__module__.startswith("hvd_gradcomp")}


@settings(max_examples=200)
@given(compressor=compressors)
def test_what_prints_parses_back(compressor):
    parsed = compression_from_spec(str(compressor))
    assert parsed == compressor
    assert hash(parsed) == hash(compressor)
    assert str(parsed) == str(compressor)
    assert (parsed.memory, parsed.dense_below) == (compressor.memory, compressor.dense_below)


@settings(max_examples=100)
@given(one=compressors, other=compressors)
def test_equal_compressors_print_alike_and_others_do_not(one, other):
    """So that workers may compare what is printed."""
    assert (one == other) == (str(one) == str(other))


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("none", NoCompression()),
        ("fp16", FP16()),
        ("bf16", BF16()),
        ("int8(64)", Int8(block=64)),
        (" topk ", TopK()),
        ("topk(0.5)", TopK(ratio=0.5)),
        ("topk-int8", TopKInt8()),
        ("topk_int8", TopKInt8()),
        ("topk-int8(ratio=0.001)", TopKInt8(ratio=0.001)),
        ("topk(ratio=0.001) >> int8", TopKInt8(ratio=0.001)),
        ("topk(ratio=0.001)>>int8(block=32)", TopK(0.001) >> Int8(32)),
        ("(topk >> int8)", TopKInt8()),
        ("topk(ratio=1e-05, memory=none, dense_below=0)", TopK(1e-5, memory=NoMemory(), dense_below=0)),
        ("topk(memory=ef)", TopK()),
        ("topk(memory=ef()) >> bf16", TopK() >> BF16()),
    ],
)
def test_specs_that_users_write(text, compressor):
    assert compression_from_spec(text) == compressor


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read the compression spec ''"),
        ("topk(", "never closed"),
        ("topk(ratio=0.1, ratio=0.2)", "'ratio' is repeated"),
        ("topk >>", "invalid syntax"),
        ("topkk", "no compressor is called 'topkk'; known: .*topk"),
        ("topk >> int9", "no compressor is called 'int9'"),
        ("0.01", "expected the name of a compressor, found '0.01'"),
        ("topk + int8", r"found 'topk \+ int8'"),
        ("a.b", "found 'a.b'"),
        ("__import__('os').system('true')", "expected the name of a compressor"),
        ("topk(rato=0.1)", "rato"),
        ("topk(0.1, 0.2)", "topk does not take these arguments"),
        ("topk(ratio=0)", "0 < ratio <= 1, got 0"),
        ("topk(ratio=-0.1)", "0 < ratio <= 1, got -0.1"),
        ("topk(ratio=1.5)", "0 < ratio <= 1, got 1.5"),
        ("topk(ratio='a')", "0 < ratio <= 1, got 'a'"),
        ("topk(ratio=True)", "0 < ratio <= 1, got True"),
        ("topk(ratio=1e999)", "0 < ratio <= 1, got inf"),
        ("topk(ratio=x)", "ratio must be a number with 0 < ratio <= 1, got 'x'"),
        ("topk(ratio={[]: 1})", "is no plain value"),
        ("topk(**x)", r"'\*\*' has no meaning"),
        ("topk(memory=0)", "expected the name of a memory, found '0'"),
        ("topk(memory=all)", "no memory is called 'all'; known: dgc, ef, momentum, none"),
        ("topk(dense_below=-1)", "dense_below must be a number of elements >= 0, got -1"),
        ("topk(dense_below=0.5)", "dense_below must be a number of elements >= 0, got 0.5"),
        ("int8(block=3)", "block must be a power of two up to 2.*, got 3"),
        ("topk >> topk", "topk >> .*: the right side must be a value code"),
        ("int8 >> topk", "int8 >> topk: .* does not select values"),
        ("topk >> int8 >> int8", "topk >> int8 >> int8: .* does not select values"),
        ("none >> int8", "none >> int8: none does not select"),
        ("topk >> int8(memory=none)", r"memory would have no effect .* as in topk\(memory=none\) >> int8"),
        ("topk >> qsgd(dense_below=7)", r"dense_below .* as in topk\(dense_below=7\) >> qsgd"),
        ("topk >> int8(granularity=model)", r"granularity .* as in topk\(granularity=model\) >> int8"),
    ],
)
def test_a_bad_spec_is_told_what_is_wrong(text, message):
    with pytest.raises(ConfigurationError, match=message):
        compression_from_spec(text)


@settings(max_examples=200)
@given(text=st.text(alphabet="topkint8(ratio=0.1)> -_,{[*'fbs", max_size=30))
def test_no_text_gives_another_error(text):
    with suppress(ConfigurationError):
        compressor = compression_from_spec(text)
        assert compression_from_spec(str(compressor)) == compressor


# -- compressors as values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1])
def test_topk_int8_is_topk_then_int8_and_nothing_more(ratio):
    compressor = TopKInt8(ratio)
    assert type(compressor) is Chain
    assert compressor == TopK(ratio) >> Int8() == TopK(ratio) >> Int8 == TopKInt8(ratio=ratio)
    assert hash(compressor) == hash(TopK(ratio) >> Int8())
    assert str(compressor) == str(TopK(ratio) >> Int8())
    assert TopKInt8(ratio, memory=NoMemory(), dense_below=7) == TopK(ratio, memory=NoMemory(), dense_below=7) >> Int8()


def test_defaults():
    assert str(TopKInt8()) == "topk >> int8"
    assert TopK().ratio == 0.01
    assert all(each.memory == ErrorFeedback() for each in (TopK(), TopKInt8(), Int8(), FP16(), BF16()))


@pytest.mark.parametrize("ratio", [1, np.float64(1), np.float32(1).item()])
def test_equal_numbers_of_other_types_are_the_same_ratio(ratio):
    """Workers compare what is printed, and one may have computed its ratio with numpy."""
    assert str(TopK(ratio)) == str(TopK(1.0)) == "topk(ratio=1.0)"


def test_compressors_are_frozen():
    with pytest.raises(FrozenInstanceError):
        TopK().ratio = 0.5  # type: ignore[misc]
    assert replace(TopK(), ratio=0.5) == TopK(0.5)


@pytest.mark.parametrize("memory", [NoMemory, None, "none", ErrorFeedback])
def test_a_memory_is_an_instance(memory):
    with pytest.raises(ConfigurationError, match="such as ErrorFeedback"):
        TopK(memory=memory)


@pytest.mark.parametrize("right", [TopK(), TopK, "int8", None, int])
def test_only_value_codes_stand_on_the_right(right):
    with pytest.raises(ConfigurationError, match="right side must be a value code"):
        TopK() >> right


def test_which_objects_are_compressors():
    assert as_compressor(TopKInt8) == TopKInt8()
    assert as_compressor(TopK(0.5)) == TopK(0.5)
    assert as_compressor(FP16) == FP16()
    for other in (object(), int, None, "topk"):
        assert as_compressor(other) is None


def test_errors_can_be_caught_as_what_they_are():
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(UnsupportedError, RuntimeError)
    assert all(issubclass(each, GradcompError) for each in (ConfigurationError, UnsupportedError))


# -- a compressor of one's own ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loud(TopK):
    """A user's own."""

    spec_name: ClassVar[str] = "my_loud"
    volume: int = 3


@pytest.fixture
def _restored() -> Iterator[None]:
    known = dict(spec._COMPRESSORS)
    yield
    spec._COMPRESSORS.clear()
    spec._COMPRESSORS.update(known)


@pytest.mark.usefixtures("_restored")
def test_registering_a_compressor():
    with pytest.raises(ConfigurationError, match="no compressor is called 'my_loud'"):
        compression_from_spec("my_loud")
    register_spec("my_loud", Loud)
    register_spec("my_loud", Loud)
    assert compression_from_spec("my-loud") == Loud()
    assert compression_from_spec("my-loud(volume=4, ratio=0.1) >> int8") == Loud(0.1, volume=4) >> Int8()
    compressor: Compressor = Loud(volume=1, memory=NoMemory())
    assert compression_from_spec(str(compressor)) == compressor


@pytest.mark.usefixtures("_restored")
def test_registering_what_cannot_be():
    with pytest.raises(ConfigurationError, match="'my-loud'"):
        register_spec("my-loud", Loud)
    with pytest.raises(ConfigurationError, match="'topk' is taken"):
        register_spec("topk", Loud)
    assert compression_from_spec("topk") == TopK()
