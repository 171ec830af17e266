"""Buckets: which parameters share a payload. A pure plan, the same on all workers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.errors import ConfigurationError

# Large enough that a collective's fixed cost does not show, small enough to overlap with the backward pass; chosen by
# benchmarks/lab/buckets.py.
BUCKET_BYTES = 16 * 2**20
#: bytes in the environment that take the place of BUCKET_BYTES, the same on all workers
BUCKET_VARIABLE = "HVD_GRADCOMP_BUCKET_BYTES"


@dataclass(frozen=True)
class Parameter:
    """A parameter to exchange.

    Attributes:
        name: the same on all workers.
        size: number of elements.
        kind: the format ("float32", ...) of its gradient.
        shape: for methods that see it as a matrix; None when unknown.
    """

    name: str
    size: int
    kind: str
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Bucket:
    """Parameters that are exchanged together, as soon as the gradients of all are there.

    The bucket is called after its first parameter, so its collective has a name that Horovod users know from their
    model, and a worker that sends that parameter uncompressed gets Horovod's own mismatch error at once.
    """

    index: int
    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        """The name of the collective."""
        return self.parameters[0].name

    @property
    def size(self) -> int:
        """Number of gradient elements."""
        return sum(parameter.size for parameter in self.parameters)


def configured_bucket_bytes() -> int:
    """`BUCKET_BYTES`, unless the environment says otherwise.

    Raises:
        ConfigurationError: it does not give a number of bytes.
    """
    text = os.environ.get(BUCKET_VARIABLE, "")
    if not text:
        return BUCKET_BYTES
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(
            f"{BUCKET_VARIABLE} must be a number of bytes of gradient >= 1, such as {BUCKET_BYTES}, got {text!r}"
        )
    return int(text)


def plan_buckets(
    parameters: Sequence[Parameter],
    bucket_bytes: int = BUCKET_BYTES,
    groups: Iterable[Iterable[str]] | None = None,
) -> tuple[Bucket, ...]:
    """Deal the parameters into buckets.

    Args:
        parameters: in the order of the model; buckets are filled from its end, where gradients are ready first.
        bucket_bytes: a bucket is closed before it would exceed this many bytes of float32 gradient.
        groups: names that the user wants exchanged together; each group becomes a bucket, whatever its size, and a
            parameter in none becomes one of its own.
    """
    parts: list[list[Parameter]] = []
    if groups is not None:
        by_name = {parameter.name: parameter for parameter in parameters}
        parts += [[by_name.pop(name) for name in group if name in by_name] for group in groups]
        parts += [[parameter] for parameter in by_name.values()]
        return _numbered(parts)
    filled = 0
    for parameter in reversed(parameters):
        if not parts or filled + 4 * parameter.size > bucket_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(parameter)
        filled += 4 * parameter.size
    return _numbered(parts)


def buckets_of(
    compressor: Compressor,
    parameters: Sequence[Parameter],
    bucket_bytes: int,
    groups: Iterable[Iterable[str]] | None,
) -> tuple[Bucket, ...]:
    """Buckets of parameters that have one compressor in common."""
    alike: dict[Compressor, list[Parameter]] = {}
    for parameter in parameters:
        alike.setdefault(compressor.of(parameter.name, parameter.shape), []).append(parameter)
    named = None if groups is None else [list(group) for group in groups]
    found = [bucket for each in alike.values() for bucket in plan_buckets(each, bucket_bytes, named)]
    return tuple(replace(bucket, index=index) for index, bucket in enumerate(found))


def _numbered(parts: list[list[Parameter]]) -> tuple[Bucket, ...]:
    return tuple(Bucket(index, tuple(part)) for index, part in enumerate(part for part in parts if part))
