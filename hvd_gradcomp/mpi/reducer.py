"""Compressed averages of numpy arrays over the workers of an MPI communicator, step after step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.compressors.base import as_compressor
from hvd_gradcomp.engine import Parameter
from hvd_gradcomp.engine.reduction import Reduction
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback import mean_residuals, policy_from, residuals_from
from hvd_gradcomp.mpi.transport import MPITransport
from hvd_gradcomp.ops import backend
from hvd_gradcomp.telemetry import Counters

_KINDS = ("float16", "float32", "float64")


class Reducer:
    """Averages named arrays over the workers, compressed, with error feedback from step to step.

    The arrays of the first call say what will be exchanged: names, shapes and dtypes are the same on all workers (the
    order is not) and in all later calls.

    Args:
        compression: a compressor of this package.
        comm: the workers; all of MPI.COMM_WORLD by default. It is duplicated, which every worker of it has to do.
        average: divide the sum by the number of workers.

    Raises:
        ConfigurationError: `compression` is no compressor of this package.
    """

    def __init__(
        self, compression: Compressor | type[Compressor], comm: MPI.Intracomm | None = None, *, average: bool = True
    ) -> None:
        compressor = as_compressor(compression)
        if compressor is None:
            raise ConfigurationError(f"compression must be a compressor of hvd_gradcomp, got {compression!r}")
        self._compressor = compressor
        self._average = average
        self._transport = MPITransport((MPI.COMM_WORLD if comm is None else comm).Dup())
        self._reduction: Reduction | None = None
        self._shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        self._loaded: Any = None

    @property
    def counters(self) -> Counters:
        """What this worker sent so far, by bucket; empty before the first call of `reduce`."""
        return self._reduction.counters if self._reduction else Counters()

    @property
    def residuals(self) -> Mapping[str, np.ndarray]:
        """Array name -> float32, flat: what this worker has not sent yet. To read."""
        return self._reduction.large.residuals if self._reduction else {}

    def reduce(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The average (or sum) over the workers of what they sent of `arrays`, the same bits on each of them.

        Args:
            arrays: name -> float16, float32 or float64 of any shape; not changed. Added up as float32.

        Returns:
            Shapes and dtypes as given. NaN throughout if some worker's arrays held NaN or infinity (as float32), in
            which case no residual changes.

        Raises:
            ConfigurationError: other names, shapes or dtypes than in the first call, or than other workers have.
            PayloadError: some rank sent corrupt bytes.
        """
        reduction = self._reduction or self._begin(arrays)
        found = {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
        if found != self._shapes:
            wrong = sorted(
                name for name in found.keys() | self._shapes.keys() if found.get(name) != self._shapes.get(name)
            )
            raise ConfigurationError(
                f"the arrays {wrong} have other shapes or dtypes than in the first call, or are missing or new: "
                f"expected {[self._shapes.get(name) for name in wrong]}, got {[found.get(name) for name in wrong]}"
            )
        results = reduction.reduce({name: np.array(array, np.float32) for name, array in arrays.items()})
        return {
            name: results[name].reshape(array.shape).astype(array.dtype, copy=False) for name, array in arrays.items()
        }

    def state_dict(self) -> dict[str, object]:
        """What the workers have not sent yet, as their mean, to save. Collective; the same on every worker.

        Raises:
            ConfigurationError: nothing was reduced yet.
        """
        if self._reduction is None:
            raise ConfigurationError("nothing to save: reduce() was not called yet")
        engine, totals = self._reduction.large, {}
        shared: dict[str, dict[str, np.ndarray]] = {}
        for parameter in engine.parameters:
            parts = self._compressor.of(parameter.name, parameter.shape).memory.parts
            own = engine.state.get(parameter.name, {})
            totals[parameter.name] = {
                part: self._sum(own.get(part, np.zeros(parameter.size, np.float32))) for part in parts
            }
            shared[parameter.name] = {part: value for part, value in own.items() if part not in parts}
        return mean_residuals(
            backend("numpy"),
            totals,
            self._transport.workers,
            shared=shared,
            step=engine.step,
            policy=engine.policy_state,
        )

    def load_state_dict(self, state: Any) -> None:
        """Give this worker what was saved by `state_dict`; on every worker, before or between calls of `reduce`.

        Raises:
            ConfigurationError: it is no such state, or belongs to other arrays (then told by the first `reduce`).
        """
        self._loaded = state
        residuals_from(state, {})
        if self._reduction:
            self._load(self._reduction)

    def _begin(self, arrays: Mapping[str, np.ndarray]) -> Reduction:
        wrong = {name: str(array.dtype) for name, array in arrays.items() if str(array.dtype) not in _KINDS}
        if wrong or not all(array.size for array in arrays.values()):
            raise ConfigurationError(
                f"expected arrays with elements, of dtypes {', '.join(_KINDS)}; got {wrong or 'an empty one'}"
            )
        parameters = [
            Parameter(name, arrays[name].size, str(arrays[name].dtype), arrays[name].shape) for name in sorted(arrays)
        ]
        reduction = Reduction(self._compressor, parameters, self._transport, average=self._average)
        if parameters:
            # First of all, so that a difference is told as what it is, before collectives of different sizes meet.
            reduction.large.begin_agreement(np.zeros(0, np.float32))
            reduction.large.conclude_agreement()
        if self._loaded is not None:
            self._load(reduction)
        self._shapes = {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
        self._reduction = reduction
        return reduction

    def _load(self, reduction: Reduction) -> None:
        found, step = residuals_from(self._loaded, {each.name: each.size for each in reduction.large.parameters})
        copied = {name: {part: np.array(value) for part, value in parts.items()} for name, parts in found.items()}
        reduction.large.load_state(copied, step, policy_from(self._loaded))
        self._loaded = None

    def _sum(self, values: np.ndarray) -> np.ndarray:
        total = np.empty_like(values)
        self._transport.comm.Allreduce(values, total)
        return total
