"""Spec strings: `topk(ratio=0.01) >> int8` to a compressor, the reverse of `str(compressor)`.

Policies and rules hold other compressors: `gravac(topk >> int8, theta_min=10)`, `rules(rule('*.bias', None), ...)`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from hvd_gradcomp.compressors.adaptive import Accordion, Auto, GraVAC, Scheduled
from hvd_gradcomp.compressors.base import Compressor
from hvd_gradcomp.compressors.names import Compression
from hvd_gradcomp.compressors.rules import Rule, rules_of
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import ErrorFeedback, Memory, Momentum, MomentumCorrection, NoMemory
from hvd_gradcomp.policy import ByEpoch, Exponential, Piecewise

_COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    name: factory for name, factory in vars(Compression).items() if not name.startswith("_")
}
_MEMORIES: dict[str, Callable[..., Memory]] = {
    "none": NoMemory,
    "ef": ErrorFeedback,
    "dgc": MomentumCorrection,
    "momentum": Momentum,
}
# What holds compressors, and what these hold besides.
_POLICIES: dict[str, Callable[..., Any]] = {
    "gravac": GraVAC,
    "accordion": Accordion,
    "auto": Auto,
    "scheduled": Scheduled,
    "rules": rules_of,
}
_PARTS: dict[str, Callable[..., Any]] = {
    "rule": Rule,
    "exponential": Exponential,
    "piecewise": Piecewise,
    "by_epoch": ByEpoch,
}


def register_spec(name: str, factory: Callable[..., Compressor]) -> None:
    """Let specs use `name` for a compressor of your own; `factory` takes the arguments between the parentheses.

    Raises:
        ConfigurationError: `name` is no Python identifier, or is taken by another factory.
    """
    if not name.isidentifier() or name in _POLICIES:
        raise ConfigurationError(f"a spec name must be an identifier such as 'my_topk', got {name!r}")
    if _COMPRESSORS.setdefault(name, factory) is not factory:
        raise ConfigurationError(f"the spec name {name!r} is taken by {_COMPRESSORS[name]!r}; choose another")


def compression_from_spec(spec: str) -> Compressor:
    """The compressor that `spec` describes.

    Args:
        spec: names of compressors with their arguments, joined by `>>`; a hyphen in a name counts as an underscore.
            Examples: "none", "fp16", "topk-int8", "topk(ratio=0.001) >> int8", "topk(ratio=0.01, memory=none)",
            "gravac", "gravac(topk >> fp16, theta_max=100)", "scheduled(topk, piecewise((500,), (0.1, 0.01)))".

    Raises:
        ConfigurationError: the spec does not parse, or names what does not exist, or an argument is out of range.
    """
    # A hyphen between letters joins a name, as on a command line; before a digit it is a minus.
    text = _HYPHEN.sub(lambda found: found[1] or f"{found[2]}_", spec.strip())
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ConfigurationError(f"{_bad(spec)}: {error.msg} at column {error.offset}; {_EXAMPLES}") from None
    return _compressor(tree, spec)


# Quoted patterns of names stay as they are.
_HYPHEN = re.compile(r"""('[^']*'|"[^"]*")|\b([A-Za-z_]\w*)-(?=[A-Za-z_])""")
_EXAMPLES = "examples: 'topk-int8', 'topk(ratio=0.001) >> int8', 'fp16', 'none'"


def _bad(spec: str) -> str:
    return f"cannot read the compression spec {spec!r}"


def _compressor(tree: ast.expr, spec: str) -> Compressor:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.RShift):
        return _compressor(tree.left, spec) >> _compressor(tree.right, spec)
    return _call(tree, {**_COMPRESSORS, **_POLICIES}, "compressor", spec)


def _call(tree: ast.expr, known: dict[str, Callable[..., Any]], kind: str, spec: str) -> Any:
    """The object for `name` or `name(argument, key=argument, ...)`."""
    call = tree if isinstance(tree, ast.Call) else ast.Call(func=tree, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        raise ConfigurationError(
            f"{_bad(spec)}: expected the name of a {kind}, found {ast.unparse(tree)!r}; {_EXAMPLES}"
        )
    if call.func.id not in known:
        raise ConfigurationError(
            f"{_bad(spec)}: no {kind} is called {call.func.id!r}; known: {', '.join(sorted(known))}"
        )
    value = _nested if known[call.func.id] in (*_POLICIES.values(), *_PARTS.values()) else _value
    arguments = [value(each, spec) for each in call.args]
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ConfigurationError(f"{_bad(spec)}: '**' has no meaning here; {_EXAMPLES}")
        if keyword.arg in options:
            raise ConfigurationError(f"{_bad(spec)}: {keyword.arg!r} is repeated in {ast.unparse(tree)!r}")
        is_memory = keyword.arg == "memory"
        options[keyword.arg] = (
            _call(keyword.value, _MEMORIES, "memory", spec) if is_memory else value(keyword.value, spec)
        )
    try:
        return known[call.func.id](*arguments, **options)
    except TypeError as error:
        raise ConfigurationError(f"{_bad(spec)}: {call.func.id} does not take these arguments: {error}") from None


def _nested(tree: ast.expr, spec: str) -> Any:
    """What a policy or a set of rules is given: a compressor, a part of its own, or a plain value."""
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in _PARTS:
        return _call(tree, _PARTS, "schedule or rule", spec)
    if isinstance(tree, (ast.Call, ast.BinOp)) or (isinstance(tree, ast.Name) and tree.id in _COMPRESSORS):
        return _compressor(tree, spec)
    return _value(tree, spec)


def _value(tree: ast.expr, spec: str) -> Any:
    if isinstance(tree, ast.Name):
        # A word, such as in granularity=bucket.
        return tree.id
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError):
        raise ConfigurationError(
            f"{_bad(spec)}: {ast.unparse(tree)!r} is no plain value such as 0.01 or True"
        ) from None
