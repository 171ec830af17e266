"""What workers keep as something to save: by parameter name, as the workers' mean, and back for any number of workers.

An averaged update depends on the workers' residuals (and velocities) through their sum alone. So one mean says all that
matters: given to every worker of a job of any size, it conserves the average of what is still owed to each parameter.
What a method keeps besides, such as the factor of PowerSGD, is the same on all workers and is saved as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops

FORMAT = "hvd_gradcomp residuals 2"

#: parameter name -> part -> values
State = dict[str, dict[str, Array]]


def mean_residuals(
    ops: Ops,
    total: Mapping[str, Mapping[str, Array]],
    workers: int,
    *,
    shared: Mapping[str, Mapping[str, Array]] | None = None,
    step: int = 0,
    policy: Sequence[float] = (),
) -> dict[str, object]:
    """The checkpoint for the sum of what all workers keep.

    Args:
        total: parameter name -> part of the memory ("residual", ...) -> float32 sum over the workers, shape (n,).
        workers: how many workers were summed.
        shared: parameter name -> part -> what the method keeps besides, the same on all workers.
        step: how many exchanges there have been; schedules continue from there.
        policy: what a policy that changes the compression remembers; see `policy_from`.
    """
    mean = {name: {part: value / workers for part, value in parts.items()} for name, parts in total.items()}
    kept = {name: dict(parts) for name, parts in (shared or {}).items()}
    found = {"format": FORMAT, "workers": workers, "step": step, "mean": mean, "shared": kept}
    return {**found, "policy": list(policy)} if policy else found


def residuals_from(checkpoint: object, sizes: Mapping[str, int]) -> tuple[State, int]:
    """What each worker keeps according to a checkpoint made by `mean_residuals`, and the step it belongs to.

    Args:
        checkpoint: what was saved.
        sizes: parameter name -> number of elements, of the parameters that are compressed now.

    Raises:
        ConfigurationError: `checkpoint` is no such checkpoint, or fits other parameters than `sizes`.
    """
    if not isinstance(checkpoint, Mapping) or checkpoint.get("format") != FORMAT:
        raise ConfigurationError(
            f"expected residuals saved by residual_state_dict() (format {FORMAT!r}), "
            f"got {type(checkpoint).__name__} with format {_format_of(checkpoint)!r}"
        )
    state: State = {}
    # Parameters may have been added or frozen since: those that are known keep what was saved for them.
    for name, parts in checkpoint["mean"].items():
        if name not in sizes:
            continue
        for part, value in parts.items():
            if len(value) != sizes[name]:
                raise ConfigurationError(
                    f"the {part} saved for {name!r} has {len(value)} elements, the parameter has {sizes[name]}: "
                    "this checkpoint belongs to another model"
                )
            state.setdefault(name, {})[part] = value
    # A method checks for itself whether what it kept still fits.
    for name, parts in checkpoint["shared"].items():
        if name in sizes:
            state.setdefault(name, {}).update(parts)
    return state, int(checkpoint["step"])


def policy_from(checkpoint: object) -> tuple[float, ...]:
    """What a policy remembers according to a checkpoint that `residuals_from` accepted; () where it says nothing."""
    return tuple(float(each) for each in checkpoint.get("policy", ())) if isinstance(checkpoint, Mapping) else ()


def _format_of(checkpoint: object) -> object:
    return checkpoint.get("format") if isinstance(checkpoint, Mapping) else None
