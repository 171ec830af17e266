"""Workers compare their settings before the first gradient is used, so that a difference is an error and not a hang."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

from hvd_gradcomp.errors import ConfigurationError, PayloadError
from hvd_gradcomp.ops import Array, Ops

_LENGTH = struct.Struct("<I")


def settings_message(ops: Ops, settings: Mapping[str, object], like: Array) -> Array:
    """This worker's settings as uint8, for an allgather."""
    text = json.dumps(settings, sort_keys=True).encode()
    return ops.from_host(_LENGTH.pack(len(text)) + text, like)


def compare_settings(ops: Ops, gathered: Array, ranks: Sequence[int], mine: int) -> None:
    """Check that all workers sent what this one sent.

    Args:
        gathered: uint8, what an allgather of `settings_message` returned.
        ranks: the workers' ranks, by which messages call them.
        mine: this worker's place among them.

    Raises:
        ConfigurationError: some did not; the message names each rank and the settings in which it differs.
        PayloadError: some rank's bytes cannot be read; the message names the first such rank.
    """
    data = ops.to_host(gathered)
    messages: list[dict[str, object]] = []
    for rank in ranks:
        message, data = _next_message(data, rank)
        messages.append(message)
    if data:
        raise PayloadError(f"rank {ranks[-1]} sent settings with {len(data)} bytes too many: {_ADVICE}")
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


_ADVICE = "check that all workers run the same version of hvd_gradcomp, then the network and memory of that worker"


def _next_message(data: bytes, rank: int) -> tuple[dict[str, object], bytes]:
    """The settings of `rank`, with which `data` begins, and the rest."""
    length = int.from_bytes(data[: _LENGTH.size], "little")
    text, rest = data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    if not isinstance(message, dict) or len(text) != length:
        raise PayloadError(f"rank {rank} sent settings that cannot be read: {_ADVICE}")
    return message, rest
