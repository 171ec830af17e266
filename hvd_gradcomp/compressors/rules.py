"""Rules: which compressor for which parameter, by name, size or role."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any, ClassVar

from hvd_gradcomp.compressors.base import Compressor, Context, as_compressor
from hvd_gradcomp.compressors.cast import NoCompression
from hvd_gradcomp.compressors.topk import TopKInt8
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import Memory
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.parts import Reader

ROLES = ("bias", "norm", "embedding", "matrix")

_NORM = re.compile(r"norm|gamma|(?<![a-z])(bn|ln)\d*(?![a-z])")
_EMBEDDING = re.compile(r"embed|(?<![a-z])(wte|wpe)(?![a-z])")


def role_of(name: str, shape: tuple[int, ...] | None) -> str:
    """What a parameter is for, as far as its name and shape tell: one of ROLES.

    A vector is a bias if its name says so and no normalization is named, else of a normalization ("norm"), where alone
    vectors are weights. More dimensions are an embedding if the name says so, else a matrix, kernels of convolutions
    included.
    """
    lower = name.lower()
    if shape is not None and len(shape) <= 1:
        return "norm" if _NORM.search(lower) or not re.search("bias|beta", lower) else "bias"
    return "embedding" if _EMBEDDING.search(lower) else "matrix"


@dataclass(frozen=True)
class Rule:
    """How to compress the parameters for which all conditions hold.

    Args:
        names: a pattern as of file names, such as "encoder.*.weight", for the parameter's name; or several.
        compression: a compressor, a class of one, or a ratio, at which `Rules.compression` is used; None for dense.
        role: one of "bias", "norm", "embedding", "matrix"; see `role_of`.
        min_size: the fewest elements.
        max_size: the most elements.

    Raises:
        ConfigurationError: an argument is not one of these.
    """

    names: str | tuple[str, ...] = "*"
    compression: Any = None
    role: str | None = None
    min_size: int = 0
    max_size: int | None = None

    def __post_init__(self) -> None:
        single = isinstance(self.names, str) or not isinstance(self.names, Iterable)
        names = (self.names,) if single else tuple(self.names)
        if not names or not all(isinstance(each, str) for each in names):
            raise ConfigurationError(f"names must be a pattern such as '*.weight', or several, got {self.names!r}")
        if self.role is not None and self.role not in ROLES:
            raise ConfigurationError(f"role must be one of {ROLES}, got {self.role!r}")
        for name in ("min_size", "max_size"):
            value = getattr(self, name)
            number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not number and not (name == "max_size" and value is None):
                raise ConfigurationError(f"{name} must be a number of elements >= 0, got {value!r}")
        if self.max_size is not None and self.max_size < self.min_size:
            raise ConfigurationError(f"no size is at least {self.min_size} and at most {self.max_size}")
        found = as_compressor(self.compression)
        ratio = isinstance(self.compression, (int, float)) and not isinstance(self.compression, bool)
        if self.compression is None:
            found = NoCompression()
        if (found is None and not ratio) or (ratio and not 0 < self.compression <= 1):
            raise ConfigurationError(
                f"a rule's compression must be a compressor such as TopK(0.01), a ratio (0 < ratio <= 1) or None for "
                f"dense, got {self.compression!r}"
            )
        if found is not None and (found.adapts is not None or isinstance(found, Rules)):
            raise ConfigurationError(
                f"a rule cannot hold {found}: put a policy around the rules, as in GraVAC(Rules([...]))"
            )
        object.__setattr__(self, "names", names[0] if len(names) == 1 else names)
        object.__setattr__(self, "compression", self.compression if found is None else found)

    def holds(self, name: str, shape: tuple[int, ...] | None) -> bool:
        """Whether all conditions hold for the parameter `name`; a parameter without a shape has size 0."""
        size = prod(shape) if shape is not None else 0
        patterns = (self.names,) if isinstance(self.names, str) else self.names
        return (
            any(fnmatchcase(name, pattern) for pattern in patterns)
            and (self.role is None or role_of(name, shape) == self.role)
            and self.min_size <= size
            and (self.max_size is None or size <= self.max_size)
        )

    def __str__(self) -> str:
        parts = [repr(self.names), "None" if self.compression == NoCompression() else str(self.compression)]
        parts += [f"role={self.role}"] if self.role else []
        parts += [f"min_size={self.min_size}"] if self.min_size else []
        parts += [f"max_size={self.max_size}"] if self.max_size is not None else []
        return f"rule({', '.join(parts)})"


@dataclass(frozen=True)
class Rules(Compressor):
    """For each parameter, the compression of the first rule that holds for it.

        Rules([Rule(role="norm"), Rule("*embed*", TopK(0.001) >> Int8()), Rule(min_size=65536, compression=0.01)])

    Parameters share a bucket, and so a payload, only with others of the same compressor. A compressor's own
    `dense_below` applies as ever.

    Args:
        rules: in order.
        compression: for rules that give a ratio only; `TopK() >> Int8()` by default.
        otherwise: for parameters that no rule holds for; dense by default.

    Raises:
        ConfigurationError: there is no rule, or something in the list is none.
    """

    spec_name: ClassVar[str] = "rules"

    rules: tuple[Rule, ...]
    compression: Any = None
    otherwise: Any = None
    memory: Memory = field(init=False, compare=False)
    dense_below: int = field(init=False, compare=False)
    granularity: str = field(init=False, compare=False)
    collective: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        rules = tuple(self.rules) if isinstance(self.rules, Iterable) else ()
        if not rules or not all(isinstance(each, Rule) for each in rules):
            raise ConfigurationError(
                f"Rules takes a list of at least one Rule such as Rule('*.bias', None), got {self.rules!r}"
            )
        used = as_compressor(TopKInt8 if self.compression is None else self.compression)
        left = as_compressor(NoCompression if self.otherwise is None else self.otherwise)
        for name, found in (("compression", used), ("otherwise", left)):
            if found is None or found.adapts is not None or isinstance(found, Rules):
                raise ConfigurationError(
                    f"{name} must be a compressor such as TopK(0.01) >> Int8(), got {getattr(self, name)!r}"
                )
        assert used is not None
        filled = tuple(
            rule
            if isinstance(rule.compression, Compressor)
            else replace(rule, compression=used.with_ratio(rule.compression))
            for rule in rules
        )
        object.__setattr__(self, "rules", filled)
        object.__setattr__(self, "compression", None)
        object.__setattr__(self, "otherwise", left)
        members = self.members()
        compressed = [each for each in members if each.meets != "dense"]
        first = compressed[0] if compressed else members[0]
        granularities = {each.granularity for each in compressed}
        if len(granularities) > 1:
            raise ConfigurationError(f"all rules must have the same granularity, got {sorted(granularities)}")
        if any(each.memory.is_momentum for each in members) and len({each.memory for each in members}) > 1:
            raise ConfigurationError(
                f"{first.memory} takes the place of the optimizer's momentum and so must hold for every parameter: "
                "give it to all rules and to otherwise=, and TopK(1.0, memory=...) to those that should be sent whole"
            )
        object.__setattr__(self, "memory", first.memory)
        object.__setattr__(self, "dense_below", min(each.dense_below for each in compressed or members))
        object.__setattr__(self, "granularity", first.granularity)
        object.__setattr__(self, "collective", first.collective)
        object.__setattr__(self, "meets", "gather" if compressed else "dense")
        super().__post_init__()

    def of(self, name: str, shape: tuple[int, ...] | None) -> Compressor:
        key = (name, shape)
        if key not in self._known:
            holding = (rule.compression for rule in self.rules if rule.holds(name, shape))
            self._known[key] = next(holding, self.otherwise)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[str, tuple[int, ...] | None], Compressor]:
        """What was found for a parameter: doors ask several times a step."""
        return {}

    def members(self) -> tuple[Compressor, ...]:
        return tuple(dict.fromkeys([*(rule.compression for rule in self.rules), self.otherwise]))

    def takes(self, size: int) -> bool:
        return any(each.takes(size) for each in self.members())

    def with_ratio(self, ratio: float) -> Compressor:
        """Those that have a ratio at that one, the others as they are."""
        found = self._each(lambda each: _at_ratio(each, ratio) or each)
        if not any(_at_ratio(each, ratio) for each in self.members()):
            super().with_ratio(ratio)
        return found

    def without_memory(self) -> Compressor:
        return self._each(lambda each: each.without_memory())

    def with_collective(self, collective: str) -> Compressor:
        return self._each(lambda each: each.with_collective(collective) if each.meets == "gather" else each)

    def _each(self, change: Callable[[Compressor], Compressor]) -> Compressor:
        rules = [replace(rule, compression=change(rule.compression)) for rule in self.rules]
        return Rules(tuple(rules), otherwise=change(self.otherwise))

    # Outside an optimizer tensors have no name: there the first rule without conditions on it counts.

    def encode(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        return self.of(context.name, (len(x),)).encode(ops, x, context)

    def decode_add(self, ops: Ops, frames: Reader, out: Array) -> Array:
        return self.of("", (len(out),)).decode_add(ops, frames, out)

    def expected_bytes(self, size: int) -> float:
        return self.of("", (size,)).expected_bytes(size)

    def __str__(self) -> str:
        otherwise = [] if self.otherwise == NoCompression() else [f"otherwise={self.otherwise}"]
        return f"rules({', '.join([*map(str, self.rules), *otherwise])})"


def _at_ratio(compressor: Compressor, ratio: float) -> Compressor | None:
    """None where it has no ratio."""
    try:
        return compressor.with_ratio(ratio)
    except ConfigurationError:
        return None


def rules_of(*rules: Rule, compression: Any = None, otherwise: Any = None) -> Compressor:
    """`Rules` as a spec calls it: `rules(rule('*.bias', None), rule('*', topk >> int8))`."""
    return Rules(rules, compression, otherwise)
