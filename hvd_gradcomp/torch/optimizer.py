"""`hvd.DistributedOptimizer` with this package's compressors: what is replaced in Horovod's optimizer, and when.

Horovod builds its optimizer from the methods of one class. `register` puts three methods in their place, each of which
calls Horovod's own unless the compression is one of ours: with stock compressions nothing changes. Horovod tells a
compressor neither the parameter's name nor the operation; its optimizer knows both. `hvd.join` is replaced as well, see
`engine/joining.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from horovod.torch import optimizer as stock

from hvd_gradcomp.compressors.base import as_compressor
from hvd_gradcomp.engine.joining import join, watch
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.telemetry import Counters
from hvd_gradcomp.torch.exchange import GradientExchange

_ATTRIBUTE = "_hvd_gradcomp"
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}
# How many optimizers of a process set began with a parameter of this name: their collectives need different names.
_seen: Counter[tuple[int, str]] = Counter()


def register() -> None:
    """Let `hvd.DistributedOptimizer` take this package's compressors. Done on import; repeating it changes nothing."""
    if _originals:
        return
    _replace(stock._DistributedOptimizer, "__init__", _init)
    _replace(stock._DistributedOptimizer, "_allreduce_grad_async", _allreduce_grad_async)
    _replace(stock._DistributedOptimizer, "synchronize", _synchronize)
    _replace(stock._DistributedAdasumOptimizer, "__init__", _adasum_init)
    # Both are names of one function, and users have the first.
    _replace(hvd, "join", join)
    _replace(mpi_ops, "join", join)


def unregister() -> None:
    """Undo `register`; optimizers that exist already keep working."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


@functools.wraps(stock.DistributedOptimizer)
def DistributedOptimizer(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:  # noqa: N802  (Horovod's name)
    # Horovod copies its methods into a new class for each optimizer, so registering for this moment is enough.
    with _registered():
        return stock.DistributedOptimizer(*args, **kwargs)


def counters(optimizer: torch.optim.Optimizer) -> Counters:
    """What `optimizer` has sent so far on this worker.

    Raises:
        ConfigurationError: the optimizer does not use a compressor of this package.
    """
    return exchange_of(optimizer).counters


def policy_report(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """What the policy of `optimizer` has decided for the next step, and why; the same on all workers.

    For GraVAC "ratio", "factor" and "gain", for Accordion "ratio", "critical" and "norm", for schedules "ratio"; {}
    where the compressor has no policy.

    Raises:
        ConfigurationError: the optimizer does not use a compressor of this package.
    """
    engine = exchange_of(optimizer).engine
    return engine.adaptation.report(engine.step)


def exchange_of(optimizer: torch.optim.Optimizer) -> GradientExchange:
    """The exchange behind an optimizer made with one of this package's compressors.

    Raises:
        ConfigurationError: there is none.
    """
    found = getattr(optimizer, _ATTRIBUTE, None)
    if not isinstance(found, GradientExchange):
        raise ConfigurationError(
            f"{type(optimizer).__name__} was not made by hvd.DistributedOptimizer with a compressor of hvd_gradcomp: "
            "import hvd_gradcomp.torch first and pass compression=, for example compression=TopKInt8"
        )
    return found


@contextmanager
def _registered() -> Iterator[None]:
    was_registered = bool(_originals)
    register()
    try:
        yield
    finally:
        if not was_registered:
            unregister()


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    _originals[owner, name] = original

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, function)


def _init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    call = inspect.signature(original).bind(self, *args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    compressor = as_compressor(options["compression"])
    if compressor is None:
        original(self, *args, **kwargs)
        return
    if options["op"] not in (hvd.Average, hvd.Sum):
        raise ConfigurationError(f"{compressor} works with op=hvd.Average and op=hvd.Sum, got op={options['op']!r}")
    groups = _checked_groups(options["groups"])
    # Groups become buckets of ours: Horovod's grouped path could neither wait for a bucket nor miss a gradient.
    options |= {"compression": compressor, "groups": None}
    original(*call.args, **call.kwargs)
    setattr(self, _ATTRIBUTE, GradientExchange(self, compressor, groups, _scope(self)))
    watch(compressor)


def _adasum_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    call = inspect.signature(original).bind(self, *args, **kwargs)
    compressor = as_compressor(call.arguments["compression"])
    if compressor is not None:
        raise ConfigurationError(
            f"op=hvd.Adasum cannot be used with {compressor}: Adasum combines whole gradients, not payloads. "
            "Use op=hvd.Average or op=hvd.Sum"
        )
    original(self, *args, **kwargs)


def _allreduce_grad_async(original: Callable[..., Any], self: Any, p: torch.Tensor) -> tuple[Any, Any]:
    exchange = getattr(self, _ATTRIBUTE, None)
    # The second part is Horovod's ctx: with None our `decompress` returns a result as it is.
    return original(self, p) if exchange is None else (exchange.submit(p), None)


def _synchronize(original: Callable[..., Any], self: Any) -> None:
    # Horovod averages again when synchronize() is called twice; averaging equals, that only costs time. Compressing
    # an averaged gradient again would lose most of it, so without a new gradient there is nothing to do.
    exchange = getattr(self, _ATTRIBUTE, None)
    if exchange is not None:
        if self._synchronized and not self._handles:
            return
        exchange.meet()
    original(self)


def _checked_groups(groups: Any) -> int | list[list[torch.Tensor]] | None:
    """Horovod's `groups`, under Horovod's conditions."""
    if groups is None:
        return None
    if isinstance(groups, int) and groups > 0:
        return groups
    if not isinstance(groups, list):
        raise ValueError(f"groups should be a positive integer or a list of lists of torch.Tensor, got {groups!r}")
    members = [member for group in groups for member in group]
    if not all(isinstance(member, torch.Tensor) for member in members):
        raise ValueError("groups must consist of torch.Tensor")
    if len({id(member) for member in members}) != len(members):
        raise ValueError("a parameter can only appear once in groups")
    return groups


def _scope(optimizer: Any) -> str:
    """What tells this optimizer's collectives from those of an earlier one whose parameters have the same names."""
    key = (optimizer.process_set.process_set_id, min(optimizer._parameter_names.values(), default=""))
    _seen[key] += 1
    return "" if _seen[key] == 1 else f"{_seen[key]}:"
