"""Residuals in `.keras` files: an asset of the optimizer, which a Keras without this package leaves alone."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.tensorflow.state import Residuals

_FILE = "hvd_gradcomp_residuals.npz"


def write_residuals(folder: Path, residuals: Residuals, process_set: hvd.ProcessSet) -> None:
    """Write this worker's residuals into `folder`, with its rank, since they are of use to no other worker."""
    state, step = residuals.read()
    if not state:
        return
    worker = [process_set.rank(), process_set.size()] if hvd.is_initialized() else [0, 1]
    sizes = [each.residual.shape.num_elements() for each in residuals.by_path.values()]
    # By place: Keras may give a variable another path when it loads it, the order stays.
    values: dict[str, Any] = {
        f"{place}:{part}": np.asarray(value)
        for place, path in enumerate(residuals.by_path)
        for part, value in state.get(path, {}).items()
    }
    np.savez(
        folder / _FILE,
        worker=np.array(worker),
        sizes=np.array(sizes),
        step=np.array(step),
        policy=np.array(residuals.read_policy()),
        **values,
    )


def read_residuals(filepath: Any, residuals: Residuals, process_set: hvd.ProcessSet) -> None:
    """Give the residuals in the model file `filepath` to `residuals`, if they are this worker's.

    Raises:
        ConfigurationError: they belong to another model.
    """
    data = read_asset(filepath, _FILE)
    if data is None:
        return
    with np.load(io.BytesIO(data)) as saved:
        if not is_own(saved["worker"], filepath, process_set):
            return
        sizes = [each.residual.shape.num_elements() for each in residuals.by_path.values()]
        if saved["sizes"].tolist() != sizes:
            raise ConfigurationError(
                f"{filepath} holds residuals of {saved['sizes'].tolist()} elements, the optimizer compresses gradients "
                f"of {sizes}: load the model with the compression and dense_below that it was saved with"
            )
        state: dict[str, dict[str, np.ndarray]] = {path: {} for path in residuals.by_path}
        for name in saved.files:
            place, _, part = name.partition(":")
            if part:
                state[list(state)[int(place)]][part] = saved[name]
        residuals.write(state, int(saved["step"]), saved["policy"].tolist() if "policy" in saved else ())


def is_own(worker: np.ndarray, filepath: Any, process_set: hvd.ProcessSet) -> bool:
    """Whether residuals of `worker`, a rank and the number of workers, are this worker's; with a warning if not."""
    rank, workers = worker.tolist()
    if (rank, workers) == (process_set.rank(), process_set.size()):
        return True
    warnings.warn(
        f"{filepath} holds the residuals of rank {rank} of {workers}; this is rank {process_set.rank()} of "
        f"{process_set.size()} and starts without what it had not sent yet. Save on every worker, each to a file of "
        "its own, and load that file again, or use residual_state_dict",
        stacklevel=4,
    )
    return False


def read_asset(filepath: Any, file: str) -> bytes | None:
    """The bytes of an asset of the optimizer in a `.keras` file; None where there is none."""
    if not isinstance(filepath, (str, os.PathLike)) or not zipfile.is_zipfile(filepath):
        return None
    with zipfile.ZipFile(filepath) as archive:
        for name in archive.namelist():
            if name.endswith(f"/{file}"):
                return archive.read(name)
    return None
