"""Compressors whose ratio changes while training runs: `GraVAC(TopK() >> Int8())`, accepted wherever one that stays is.

This file joins a compressor to a policy. The rules are in `policy`; the engine measures, and asks the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvd_gradcomp import policy as policies
from hvd_gradcomp.compressors.base import Compressor, Context, as_compressor
from hvd_gradcomp.compressors.cast import NoCompression
from hvd_gradcomp.compressors.chain import Chain, Sparsifier
from hvd_gradcomp.compressors.topk import TopK, TopKInt8
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import Memory
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.wire.parts import Reader

_DENSE = NoCompression()


@dataclass(frozen=True)
class Adaptive(Compressor):
    """`compressor` at the ratio that `policy` says; where the policy says dense, gradients travel as they are.

    Its options (`memory`, `dense_below`, `granularity`) are those of `compressor`. Residuals outlive all changes.

    Args:
        compressor: one that has a ratio (a sparsifier, alone or before a value code), or bits that follow from it
            (int8, linear, qsgd); or rules, of which those that have a ratio follow and the others stay.
        policy: a schedule, `policy.GraVAC` or `policy.Accordion`, or another one.

    Raises:
        ConfigurationError: the compressor has no ratio.
    """

    spec_name: ClassVar[str] = "adaptive"

    compressor: Compressor
    policy: Policy
    memory: Memory = field(init=False, compare=False)
    dense_below: int = field(init=False, compare=False)
    granularity: str = field(init=False, compare=False)
    collective: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        compressor = as_compressor(self.compressor)
        if compressor is None or compressor.adapts is not None:
            raise ConfigurationError(
                f"{self.policy} changes a compressor such as TopK(0.01) >> Int8(), got {self.compressor!r}; "
                "one policy alone decides"
            )
        if not isinstance(self.policy, Policy):
            raise ConfigurationError(f"expected a policy such as Exponential(...), got {self.policy!r}")
        # Now, rather than at the step that first changes it.
        compressor.with_ratio(0.01)
        object.__setattr__(self, "compressor", compressor)
        for name in ("memory", "dense_below", "granularity", "collective", "meets", "draws", "votes", "sum_kind"):
            object.__setattr__(self, name, getattr(compressor, name))
        super().__post_init__()

    @property
    def adapts(self) -> Policy:
        return self.policy

    def of(self, name: str, shape: tuple[int, ...] | None) -> Compressor:
        return self.compressor.of(name, shape)

    def members(self) -> tuple[Compressor, ...]:
        return self.compressor.members()

    def with_ratio(self, ratio: float) -> Compressor:
        return self.compressor.with_ratio(ratio)

    def without_memory(self) -> Compressor:
        return Adaptive(self.compressor.without_memory(), self.policy)

    def with_collective(self, collective: str) -> Compressor:
        return Adaptive(self.compressor.with_collective(collective), self.policy)

    def at(self, step: int) -> Compressor:
        """As the policy begins; how it goes on depends on the gradients, which the engine follows."""
        return self.chosen(self.policy.ratio(self.policy.init(), step))

    def chosen(self, ratio: float | None) -> Compressor:
        """The compressor at `ratio`; None for dense."""
        return _DENSE if ratio is None else self.compressor.with_ratio(ratio)

    def encode(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        return self.at(context.step).encode(ops, x, context)

    def decode_add(self, ops: Ops, frames: Reader, out: Array) -> Array:
        return self.compressor.decode_add(ops, frames, out)

    def decode_mean(self, ops: Ops, frames: Sequence[Reader], out: Array, divisor: int) -> Array | None:
        return self.compressor.decode_mean(ops, frames, out, divisor)

    def expected_bytes(self, size: int) -> float:
        return self.at(0).expected_bytes(size)

    def __str__(self) -> str:
        policy = self.policy
        if isinstance(policy, policies.Schedule):
            return f"scheduled({self.compressor}, {policy})"
        arguments = policy.arguments()
        return f"{policy.spec_name}({self.compressor}{', ' if arguments else ''}{arguments})"


def left_by(ops: Ops, smaller: Compressor, sent: Array, context: Context) -> Array:
    """What `smaller` would leave of `sent`: of what a larger ratio of the same method has sent.

    Selecting from values that were selected already is nearly free (multi-level compression).

    Args:
        sent: float32, (n,); its memory may be reused.

    Returns:
        float32, any length: the values that are left.
    """
    if not isinstance(smaller, (Sparsifier, Chain)) and smaller.meets != "own":
        return smaller.encode(ops, sent, context)[1]
    # The count sketch finds the largest values, as top-k does, in an exchange that takes place between workers only.
    sparsifier = smaller.sparsifier if isinstance(smaller, Chain) else smaller
    selector = sparsifier if isinstance(sparsifier, Sparsifier) else TopK(getattr(sparsifier, "ratio"))  # noqa: B009
    values = ops.take(sent, ops.nonzero(ops.abs(sent) > 0))
    count = len(values)
    if not count:
        return values
    among_these = selector.with_ratio(min(1.0, selector.kept(len(sent)) / count))
    method = among_these >> smaller.code if isinstance(smaller, Chain) else among_these
    return method.encode(ops, values, context)[1]


class _With(Compressor):
    """A policy's name as a compressor's: called, it gives an `Adaptive`."""

    policy: ClassVar[type[Policy]]

    def __new__(cls, compressor: Any = TopKInt8, **options: Any) -> Compressor:  # type: ignore[misc]
        return Adaptive(compressor, cls.policy(**options))


class GraVAC(_With):
    """The factor that `policy.GraVAC` finds; its options are the keyword arguments here.

        GraVAC(TopK() >> Int8(), theta_min=10, theta_max=1000, epsilon=0.7, window=100)

    Args:
        compressor: what to change; `TopKInt8` by default. The ratio that it was given itself is not looked at.
    """

    policy: ClassVar[type[Policy]] = policies.GraVAC


class Accordion(_With):
    """One of two ratios, by `policy.Accordion`; its options are the keyword arguments here.

        Accordion(TopK() >> Int8(), low=0.1, high=0.01, window=312)

    Args:
        compressor: what to change; `TopKInt8` by default. The ratio that it was given itself is not looked at.
    """

    policy: ClassVar[type[Policy]] = policies.Accordion


class Auto(_With):
    """Dense, or the least compression that makes steps faster here, by `policy.Auto`; its options are the keywords.

        Auto(TopK() >> Int8(), lowest=0.001)

    Args:
        compressor: what to change; `TopKInt8` by default. The ratio that it was given itself is not looked at.
    """

    policy: ClassVar[type[Policy]] = policies.Auto


class Scheduled(Compressor):
    """The ratio by a schedule: `Scheduled(TopK() >> Int8(), Exponential(start=0.25, end=0.001, steps=1000))`.

    Args:
        compressor: what to change. The ratio that it was given itself is not looked at.
        schedule: a `Schedule`, or a function from the step to the ratio (None for dense), alike on all workers.
    """

    def __new__(cls, compressor: Any, schedule: Any) -> Compressor:  # type: ignore[misc]
        policy = schedule if isinstance(schedule, Policy) else policies.ByFunction(schedule)
        return Adaptive(compressor, policy)
