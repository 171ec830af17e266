"""Residuals as something to save: by parameter name, as the workers' mean, and back for any number of workers.

An averaged update depends on the workers' residuals through their sum alone. So one mean says all that matters: given
to every worker of a job of any size, it conserves the average of what is still owed to each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops

FORMAT = "hvd_gradcomp residuals 1"


def mean_residuals(ops: Ops, total: Mapping[str, Array], workers: int) -> dict[str, object]:
    """The checkpoint for the sum of all workers' residuals.

    Args:
        total: parameter name -> float32 sum over the workers, shape (n,).
        workers: how many workers were summed.
    """
    return {"format": FORMAT, "workers": workers, "mean": {name: value / workers for name, value in total.items()}}


def residuals_from(checkpoint: object, sizes: Mapping[str, int]) -> dict[str, Array]:
    """The residual of each parameter from a checkpoint made by `mean_residuals`.

    Args:
        checkpoint: what was saved.
        sizes: parameter name -> number of elements, of the parameters that keep a residual now.

    Raises:
        ConfigurationError: `checkpoint` is no such checkpoint, or fits other parameters than `sizes`.
    """
    if not isinstance(checkpoint, Mapping) or checkpoint.get("format") != FORMAT:
        raise ConfigurationError(
            f"expected residuals saved by residual_state_dict() (format {FORMAT!r}), "
            f"got {type(checkpoint).__name__} with format {_format_of(checkpoint)!r}"
        )
    mean = checkpoint["mean"]
    # Parameters may have been added or frozen since: those that are known keep their residual.
    for name, value in mean.items():
        if name in sizes and len(value) != sizes[name]:
            raise ConfigurationError(
                f"the residual saved for {name!r} has {len(value)} elements, the parameter has {sizes[name]}: "
                "this checkpoint belongs to another model"
            )
    return {name: value for name, value in mean.items() if name in sizes}


def _format_of(checkpoint: object) -> object:
    return checkpoint.get("format") if isinstance(checkpoint, Mapping) else None
