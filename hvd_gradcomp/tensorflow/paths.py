"""What a variable is called: in collectives, counters and checkpoints, the same on every worker and in every run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_ATTRIBUTE = "_hvd_gradcomp_path"


def tensorflow_variable(variable: Any) -> tf.Variable:
    """The `tf.Variable` behind a Keras 3 variable, remembering its path; any other variable as it is."""
    if isinstance(variable, tf.Variable) or not hasattr(variable, "path"):
        return variable
    inner = variable.value
    setattr(inner, _ATTRIBUTE, variable.path)
    return inner


def paths_of(variables: Sequence[tf.Variable]) -> list[str]:
    """A distinct path for each, in order: Keras's path, or the variable's name, with a number where it repeats."""
    seen: Counter[str] = Counter()
    paths = []
    for variable in variables:
        path = getattr(variable, _ATTRIBUTE, None) or variable.name.partition(":")[0]
        seen[path] += 1
        paths.append(path if seen[path] == 1 else f"{path}_{seen[path] - 1}")
    return paths


def node_name(name: str) -> str:
    """`name` as the name of a node in a graph, without a scope."""
    return re.sub(r"[^A-Za-z0-9_.]", ".", name)
