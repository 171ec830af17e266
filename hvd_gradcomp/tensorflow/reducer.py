"""What stands in for the function by which Horovod's tapes and optimizers reduce gradients.

A tape lives for one step, so what has to outlast it is kept here: one reducer for equal settings, and in it one
exchange for each list of variables.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvd_gradcomp.engine.joining import watch
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.tensorflow.exchange import Gradient, GradientExchange
from hvd_gradcomp.tensorflow.paths import paths_of, tensorflow_variable
from hvd_gradcomp.tensorflow.settings import Settings

_reducers: dict[Any, Reducer] = {}
_all: weakref.WeakSet[Reducer] = weakref.WeakSet()
# How many exchanges of a process set began with a variable of this path: their collectives need different names.
_seen: Counter[tuple[int, str]] = Counter()


class Reducer:
    """Reduces the gradients of any number of models with the same settings.

    Args:
        settings: how.
        name: what Horovod calls its owner, where that is Horovod's own tape or optimizer.
    """

    def __init__(self, settings: Settings, name: str = "") -> None:
        self.settings = settings
        self.name = name
        self._exchanges: dict[tuple[int, ...], GradientExchange] = {}
        watch(settings.compressor)
        _all.add(self)

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self,
        grads: Sequence[Gradient],
        vars: Sequence[Any] | None = None,  # noqa: A002
        use_generic_names: bool = False,
    ) -> list[Gradient]:
        """Horovod's call: the reduced gradients of `vars`, in order; see `GradientExchange.reduce`.

        Raises:
            ConfigurationError: the variables were not given.
        """
        if vars is None or len(vars) != len(grads):
            raise ConfigurationError(
                f"{len(grads)} gradients were given for {0 if vars is None else len(vars)} variables: the residual of "
                "a compressed gradient belongs to its variable, so every gradient needs one"
            )
        if not len(grads):
            return []
        return self.exchange(vars, use_generic_names).reduce(list(grads))

    def exchange(self, variables: Sequence[Any], use_generic_names: bool = False) -> GradientExchange:
        """The exchange of this list of variables, made on first use."""
        inner = [tensorflow_variable(each) for each in variables]
        key = tuple(id(each) for each in inner)
        if key not in self._exchanges:
            names = [f"grad_{place}" for place in range(len(inner))] if use_generic_names else paths_of(inner)
            scope = _scope(self.settings, names[0])
            self._exchanges[key] = GradientExchange(self.settings, inner, names, scope, self.name)
            # A number may name another variable once this one is gone.
            weakref.finalize(inner[0], self._exchanges.pop, key, None)
        return self._exchanges[key]

    def find(self, variables: Sequence[Any] | None) -> list[GradientExchange]:
        """The exchanges of exactly these variables, in any order; all exchanges where None."""
        if variables is None:
            return list(self._exchanges.values())
        wanted = {id(tensorflow_variable(each)) for each in variables}
        return [exchange for key, exchange in self._exchanges.items() if set(key) == wanted]


def reducer_of(settings: Settings, name: str = "") -> Reducer:
    """The reducer for these settings; `name` tells apart users that should not share one."""
    groups = settings.groups
    # Variables cannot be compared, their references can.
    groups_key = groups if groups is None or isinstance(groups, int) else tuple(tuple(map(id, g)) for g in groups)
    plain = replace(settings, groups=None, process_set=None)
    key = (name, groups_key, settings.process_set.process_set_id, plain)
    return _reducers.setdefault(key, Reducer(settings, name))


def find_exchange(owner: Any) -> GradientExchange:
    """The exchange behind a tape, an optimizer, or a list of variables.

    Raises:
        ConfigurationError: there is none, or more than one.
    """
    if isinstance(owner, (list, tuple)):
        found = [exchange for reducer in _all for exchange in reducer.find(owner)]
    else:
        inner = getattr(owner, "inner_optimizer", owner)
        reducer = getattr(inner, "_allreduce_grads", None) or getattr(inner, "reducer", None)
        found = reducer.find(None) if isinstance(reducer, Reducer) else []
    if len(found) != 1:
        raise ConfigurationError(
            f"{len(found)} exchanges of compressed gradients belong to this {type(owner).__name__}, expected one: "
            "pass a tape or an optimizer made with a compressor of hvd_gradcomp, or its variables, after the first step"
        )
    return found[0]


def _scope(settings: Settings, first: str) -> str:
    key = (settings.process_set.process_set_id, first)
    _seen[key] += 1
    return "" if _seen[key] == 1 else f"{_seen[key]}."
