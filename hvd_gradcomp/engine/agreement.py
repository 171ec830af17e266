"""Workers compare their settings before the first gradient is used, so that a difference is an error and not a hang."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_gradcomp.errors import ConfigurationError, PayloadError
from hvd_gradcomp.ops import Array, Ops

#: bytes of the text, its checksum
_HEADER = struct.Struct("<II")
# Travel with the settings but need not be equal.
_STEP = "step"
_STATE = "policy"


def settings_message(
    ops: Ops, settings: Mapping[str, object], like: Array, step: int = 0, state: Sequence[float] = ()
) -> Array:
    """This worker's settings, step and the state of its policy as uint8, for an allgather."""
    text = json.dumps({**settings, _STEP: step, _STATE: list(state)}, sort_keys=True).encode()
    return ops.from_host(_HEADER.pack(len(text), zlib.crc32(text)) + text, like)


def compare_settings(ops: Ops, gathered: Array, ranks: Sequence[int], mine: int) -> tuple[int, tuple[float, ...]]:
    """Check that all workers sent the settings that this one sent, and find the step and state from which all go on.

    Args:
        gathered: uint8, what an allgather of `settings_message` returned.
        ranks: the workers' ranks, by which messages call them.
        mine: this worker's place among them.

    Returns:
        The largest step of any worker, and the state of the policy of the first such worker.

    Raises:
        ConfigurationError: some did not; the message names each rank and the settings in which it differs.
        PayloadError: some rank's bytes cannot be read; the message names the first such rank.
    """
    data = ops.to_host(gathered)
    messages: list[dict[str, Any]] = []
    for rank in ranks:
        message, data = _next_message(data, rank)
        messages.append(message)
    if data:
        raise PayloadError(f"rank {ranks[-1]} sent settings with {len(data)} bytes too many: {_ADVICE}")
    steps = [int(message.pop(_STEP)) for message in messages]
    states = [tuple(map(float, message.pop(_STATE))) for message in messages]
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
    return max(steps), states[steps.index(max(steps))]


_ADVICE = "check that all workers run the same version of hvd_gradcomp, then the network and memory of that worker"


def _next_message(data: bytes, rank: int) -> tuple[dict[str, Any], bytes]:
    """The settings of `rank`, with which `data` begins, and the rest."""
    head, rest = data[: _HEADER.size], data[_HEADER.size :]
    length, checksum = _HEADER.unpack(head) if len(head) == _HEADER.size else (1, 0)
    text, rest = rest[:length], rest[length:]
    if len(text) != length or zlib.crc32(text) != checksum:
        raise PayloadError(f"rank {rank} sent settings that cannot be read: {_ADVICE}")
    message: dict[str, Any] = json.loads(text)
    return message, rest
