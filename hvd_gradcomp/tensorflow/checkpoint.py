"""What users may ask about an exchange: its counters, its residuals as variables or for a job of another size."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_gradcomp.collectives import Allreduce
from hvd_gradcomp.engine import Engine
from hvd_gradcomp.feedback import mean_residuals, policy_from, residuals_from, whole_parts
from hvd_gradcomp.feedback.residuals import State
from hvd_gradcomp.ops import Array, backend, ops_for
from hvd_gradcomp.telemetry import Counters
from hvd_gradcomp.tensorflow.host import exact_floats
from hvd_gradcomp.tensorflow.paths import paths_of, tensorflow_variable
from hvd_gradcomp.tensorflow.reducer import find_exchange
from hvd_gradcomp.tensorflow.state import Residuals


def counters(owner: Any) -> Counters:
    """What this worker has sent so far for `owner`: a tape, an optimizer, or the list of variables of either.

    Raises:
        ConfigurationError: no exchange of compressed gradients belongs to it, or there was no step yet.
    """
    return find_exchange(owner).engine.counters


def policy_report(owner: Any) -> dict[str, float]:
    """What the policy of `owner` has decided for the next step, and why; the same on all workers.

    For GraVAC "ratio", "factor" and "gain", for Accordion "ratio", "critical" and "norm", for schedules "ratio"; {}
    where the compressor has no policy.

    Args:
        owner: see `counters`.

    Raises:
        ConfigurationError: see `counters`.
    """
    engine = find_exchange(owner).engine
    return engine.adaptation.report(engine.step)


def residuals(variables: Sequence[Any]) -> Residuals:
    """The residuals of `variables` on this worker, to be given to `tf.train.Checkpoint` before or after the first step.

        checkpoint = tf.train.Checkpoint(model=model, residuals=residuals(model.trainable_variables))

    Each worker has residuals of its own and writes a checkpoint of its own.
    """
    inner = [tensorflow_variable(each) for each in variables]
    named = zip(inner, paths_of(inner), strict=True)
    usable = [(each, path) for each, path in named if each.dtype.is_floating and each.shape.is_fully_defined()]
    return Residuals([each for each, _ in usable], [path for _, path in usable])


def residual_state_dict(owner: Any) -> dict[str, object]:
    """What the workers keep, by path, as numpy arrays: a checkpoint that serves any number of workers.

    That is the mean of their residuals and of whatever else the memory keeps (velocities), what a method keeps besides
    (the factors of PowerSGD), the step that schedules go by, and what a policy has found out. A collective call: every
    worker of the process set must make it, between two steps; each gets the same values. With averaged gradients the
    mean says all that is still owed to the variables; for op=Sum it does so as long as the number of workers stays the
    same.

    Args:
        owner: see `counters`.

    Raises:
        ConfigurationError: see `counters`.
    """
    exchange = find_exchange(owner)
    with exact_floats():
        state, step = exchange.residuals.read()
        return mean_state(exchange.engine, state, step, exchange.residuals.read_policy())


def load_residual_state_dict(variables: Sequence[Any], state: Any) -> None:
    """Give this worker the mean residual saved by `residual_state_dict`, whatever the number of workers is now.

    Every worker must load it: where rank 0 alone reads the checkpoint, pass on `hvd.broadcast_object(state)`.

    Args:
        variables: whose gradients are compressed; others among them are left alone.
        state: what was saved; None, for a checkpoint without residuals, gives a warning and starts from zero.

    Raises:
        ConfigurationError: `state` is something else, or belongs to another model.
    """
    target = residuals(variables)
    if state is None:
        warnings.warn(
            "the checkpoint holds no residuals: training starts again without what had not been sent when it was saved",
            stacklevel=2,
        )
        target.write({}, 0)
        return
    sizes = {path: each.residual.shape.num_elements() for path, each in target.by_path.items()}
    found, step, policy = state_from(state, sizes)
    target.write(found, step, policy)


def mean_state(
    engine: Engine, state: Mapping[str, Mapping[str, Array]], step: int, policy: Sequence[float]
) -> dict[str, object]:
    """The mean over the workers of what an engine keeps, in numpy arrays. Collective.

    Args:
        engine: whose parameters they are.
        state: what this worker keeps, as `Engine.state`.
        step: how many exchanges there have been.
        policy: what a policy remembers.
    """
    transport = engine.transport
    totals: dict[str, dict[str, np.ndarray]] = {}
    shared = {}
    for parameter in engine.parameters:
        parts = state.get(parameter.name, {})
        own = whole_parts(ops_for(next(iter(parts.values()))), parameter.name, parameter.size, parts) if parts else {}
        memory = engine.compressor.of(parameter.name, parameter.shape).memory
        for part in memory.parts:
            mine = np.asarray(own.get(part, np.zeros(parameter.size, np.float32)))
            total = transport.wait(transport.start(Allreduce(mine, "float32"), f"{parameter.name}.{part}"))
            totals.setdefault(parameter.name, {})[part] = total
        others = {part: np.asarray(value) for part, value in own.items() if part not in memory.parts}
        if others:
            shared[parameter.name] = others
    return mean_residuals(backend("numpy"), totals, transport.workers, shared=shared, step=step, policy=policy)


def state_from(state: Any, sizes: Mapping[str, int]) -> tuple[State, int, tuple[float, ...]]:
    """What `mean_state` gave, as state of an engine, the step it belongs to and what its policy knew.

    Args:
        sizes: parameter name -> its elements; others are left out, with a warning.

    Raises:
        ConfigurationError: it is something else, or belongs to another model.
    """
    found, step = residuals_from(state, sizes)
    unknown = sorted(set(state["mean"]) - set(sizes))
    if unknown:
        warnings.warn(
            f"the checkpoint holds residuals of {unknown}, which are none of {sorted(sizes)}: they are left out. Keras "
            "names variables after the models around them, so build the model as it was built when this was saved",
            stacklevel=2,
        )
    copies = {path: {part: np.array(value) for part, value in parts.items()} for path, parts in found.items()}
    return copies, step, policy_from(state)
