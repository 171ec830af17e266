"""Workers compare their settings before the first gradient is used, so that a difference is an error and not a hang."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, Ops

#: bytes of the settings, the worker's step
_HEADER = struct.Struct("<IQ")


def settings_message(ops: Ops, settings: Mapping[str, object], step: int, like: Array) -> Array:
    """This worker's settings and step as uint8, for an allgather."""
    text = json.dumps(settings, sort_keys=True).encode()
    return ops.from_host(_HEADER.pack(len(text), step) + text, like)


def compare_settings(ops: Ops, gathered: Array, ranks: Sequence[int], mine: int) -> int:
    """Check that all workers sent the settings that this one sent, and find the step from which all go on.

    Args:
        gathered: uint8, what an allgather of `settings_message` returned.
        ranks: the workers' ranks, by which messages call them.
        mine: this worker's place among them.

    Returns:
        The largest step of any worker.

    Raises:
        ConfigurationError: some did not; the message names each rank and the settings in which it differs.
    """
    data = ops.to_host(gathered)
    messages: list[dict[str, object]] = []
    steps: list[int] = []
    while data:
        length, step = _HEADER.unpack(data[: _HEADER.size])
        messages.append(json.loads(data[_HEADER.size : _HEADER.size + length]))
        steps.append(step)
        data = data[_HEADER.size + length :]
    own = messages[mine]
    differences = [
        f"rank {rank} has {key} = {theirs.get(key)!r}, rank {ranks[mine]} has {own.get(key)!r}"
        for rank, theirs in zip(ranks, messages, strict=True)
        for key in sorted(own.keys() | theirs.keys())
        if theirs.get(key) != own.get(key)
    ]
    if differences:
        raise ConfigurationError(
            f"workers were given different settings: {'; '.join(differences)}. "
            "Give every worker the same compression, parameters and Horovod options"
        )
    return max(steps)
