"""The state of local SGD in `.keras` files: an asset of the optimizer, which a Keras without this package leaves alone.

Tensors are kept by place: Keras may give a variable another path when it loads it, the order stays.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np

from hvd_gradcomp.engine import Parameter
from hvd_gradcomp.engine.meeting import Meetings
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.feedback.residuals import State
from hvd_gradcomp.tensorflow.keras.replica import values_of
from hvd_gradcomp.tensorflow.keras.saving import is_own, read_asset

_FILE = "hvd_gradcomp_local_sgd.npz"
_COUNTS = ("steps", "since_meeting", "until_meeting")


def write(folder: Path, meetings: Meetings, process_set: hvd.ProcessSet) -> None:
    """Write what the workers have in common, and this worker's residuals with its rank, into `folder`."""
    state, engine = meetings.state_dict(), meetings.reduction.large
    values: dict[str, Any] = {
        f"anchor:{place}": values_of(each) for place, each in enumerate(state["anchors"].values())
    }
    values |= {f"outer:{place}": each for place, each in enumerate(state["outer"] or ())}
    values |= {
        f"kept:{place}:{part}": np.asarray(value)
        for place, parameter in enumerate(engine.parameters)
        for part, value in engine.state.get(parameter.name, {}).items()
    }
    np.savez(
        folder / _FILE,
        counts=np.array([state[name] for name in _COUNTS]),
        worker=np.array([process_set.rank(), process_set.size()]),
        step=np.array(engine.step),
        policy=np.array(engine.policy_state),
        sizes=np.array([each.size for each in engine.parameters]),
        **values,
    )


def read(filepath: Any) -> Saved:
    """What `write` left in the model file `filepath`.

    Raises:
        ConfigurationError: there is nothing of it.
    """
    data = read_asset(filepath, _FILE)
    if data is None:
        raise ConfigurationError(
            f"{filepath} holds no state of local SGD: expected a .keras file that model.save() wrote while this "
            "callback was in use. To begin anew with the weights in it, load the model alone"
        )
    with np.load(io.BytesIO(data)) as saved:
        return Saved(str(filepath), {name: saved[name] for name in saved.files})


@dataclass(frozen=True)
class Saved:
    """What one file holds."""

    filepath: str
    values: dict[str, np.ndarray]

    def common(self, names: Sequence[str]) -> dict[str, Any]:
        """What `Meetings.state_dict` gave, for parameters that are called `names` now.

        Raises:
            ConfigurationError: there are more or fewer of them.
        """
        anchors = self._numbered("anchor:")
        if anchors and len(anchors) != len(names):
            raise ConfigurationError(
                f"{self.filepath} was saved for {len(anchors)} trainable variables, this model has {len(names)}: load "
                "the model from the same file"
            )
        return {
            **dict(zip(_COUNTS, self.values["counts"].tolist(), strict=True)),
            "anchors": dict(zip(names, anchors, strict=True)) if anchors else {},
            "outer": self._numbered("outer:") or None,
        }

    def kept(
        self, parameters: Sequence[Parameter], process_set: hvd.ProcessSet
    ) -> tuple[State, int, list[float]] | None:
        """This worker's residuals, the step and the policy's memory; None, with a warning, if they are another's.

        Raises:
            ConfigurationError: they belong to other parameters.
        """
        if not is_own(self.values["worker"], self.filepath, process_set):
            return None
        sizes = [each.size for each in parameters]
        if self.values["sizes"].tolist() != sizes:
            raise ConfigurationError(
                f"{self.filepath} holds residuals of {self.values['sizes'].tolist()} elements, the changes of {sizes} "
                "are compressed: give the compression and dense_below that it was saved with"
            )
        state: State = {}
        for key, value in self.values.items():
            kind, _, rest = key.partition(":")
            if kind == "kept":
                place, _, part = rest.partition(":")
                state.setdefault(parameters[int(place)].name, {})[part] = value.copy()
        return state, int(self.values["step"]), self.values["policy"].tolist()

    def _numbered(self, prefix: str) -> list[np.ndarray]:
        count = sum(key.startswith(prefix) for key in self.values)
        return [self.values[f"{prefix}{place}"] for place in range(count)]
