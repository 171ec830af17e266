"""Rules: which compressor a parameter gets, by name, size and role; the first that holds wins."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_gradcomp.compressors import DGC, FP16, GraVAC, Int8, NoCompression, Rule, Rules, TopK, TopKInt8
from hvd_gradcomp.compressors.rules import role_of
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import MomentumCorrection


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("fc.bias", (10,), "bias"),
        ("dense/bias", (10,), "bias"),
        ("layers.0.norm1.weight", (10,), "norm"),
        ("layers.0.norm1.bias", (10,), "norm"),
        ("bn1.bias", (10,), "norm"),
        ("encoder.ln_2.weight", (10,), "norm"),
        ("layer_normalization/gamma", (10,), "norm"),
        ("3.weight", (10,), "norm"),
        ("temperature", (), "norm"),
        ("embed.weight", (100, 10), "embedding"),
        ("transformer.wte.weight", (100, 10), "embedding"),
        ("embedding/embeddings", (100, 10), "embedding"),
        ("conv1.weight", (8, 3, 3, 3), "matrix"),
        ("dense/kernel", (10, 10), "matrix"),
        ("columns.weight", (10, 10), "matrix"),
        ("unknown", None, "matrix"),
    ],
)
def test_roles(name: str, shape: tuple[int, ...] | None, role: str) -> None:
    assert role_of(name, shape) == role


def test_the_first_rule_that_holds_wins() -> None:
    rules = Rules(
        [
            Rule(role="norm"),
            Rule("head.*", Int8()),
            Rule(("*.q", "*.k"), 0.5, min_size=100),
            Rule(max_size=50, compression=FP16),
            Rule(role="embedding", compression=TopK(0.001)),
            Rule(min_size=1000, compression=0.02),
        ],
        otherwise=TopK(0.3),
    )
    for name, shape, expected in [
        ("head.norm", (64,), NoCompression()),
        ("head.bias", (64,), Int8()),
        ("a.q", (10, 10), TopKInt8(0.5)),
        ("a.q", (7, 7), FP16()),
        ("embed", (7, 8), TopK(0.001)),
        ("body", (40, 40), TopKInt8(0.02)),
        ("body", (20, 20), TopK(0.3)),
    ]:
        assert rules.of(name, shape) == expected, name
    assert Rules([Rule("a", 0.1)]).of("b", (5000,)) == NoCompression()


def test_patterns_look_at_the_whole_name_and_at_capitals() -> None:
    rules = Rules([Rule("*.Bias", 0.1), Rule("layer[12].weight", 0.2)])
    found = [
        rules.of(name, (40, 40)).meets for name in ("x.Bias", "x.bias", "layer1.weight", "layer3.weight", "layer1")
    ]
    assert found == ["gather", "dense", "gather", "dense", "dense"]


def test_the_compression_that_ratios_are_of() -> None:
    assert Rules([Rule("*", 0.1)], compression=TopK() >> FP16()).of("a", (5,)) == TopK(0.1) >> FP16()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rules([]), "at least one Rule"),
        (lambda: Rules("*.bias"), "at least one Rule"),
        (lambda: Rules([Rule(), "*"]), "at least one Rule"),
        (lambda: Rules([Rule()], otherwise="dense"), "otherwise must be a compressor"),
        (lambda: Rules([Rule("*", 0.1)], compression=NoCompression()), "has no ratio"),
        (lambda: Rules([Rule("a", DGC()), Rule("b", TopK())]), "optimizer's momentum"),
        (lambda: Rules([Rule("a", TopK()), Rule("b", TopK(granularity="model"))]), "same granularity"),
        (lambda: Rule(3), "names must be a pattern"),
        (lambda: Rule(()), "names must be a pattern"),
        (lambda: Rule(role="weights"), "role must be one of"),
        (lambda: Rule(min_size=-1), "min_size must be a number of elements"),
        (lambda: Rule(min_size=5, max_size=4), "no size is at least 5 and at most 4"),
        (lambda: Rule("*", 2), "a rule's compression must be"),
        (lambda: Rule("*", "topk"), "a rule's compression must be"),
        (lambda: Rule("*", Rules([Rule()])), "put a policy around the rules"),
        (lambda: Rule("*", GraVAC()), "put a policy around the rules"),
    ],
)
def test_what_has_no_meaning_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_momentum_for_all_parameters() -> None:
    memory = MomentumCorrection()
    rules = Rules([Rule("a", TopK(1.0, memory=memory))], otherwise=DGC(memory=memory))
    assert rules.memory == memory
    assert rules.takes(1), "small tensors need the momentum as well"
