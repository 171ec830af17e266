"""Which workers share a node, and the process sets in which only some of the workers meet."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from hvd_gradcomp.errors import ConfigurationError, UnsupportedError

#: Overrides who shares a node: the number of workers on each, in the order of ranks, such as "2,2".
NODES_VARIABLE = "HVD_GRADCOMP_NODES"
#: Bytes of a node's key.
KEY_BYTES = 8


def node_key(rank: int, workers: int) -> bytes:
    """`KEY_BYTES` bytes, the same for workers of one node: by its host name, or by `HVD_GRADCOMP_NODES`.

    Args:
        rank: of this worker in the whole job.
        workers: of the whole job.

    Raises:
        ConfigurationError: the variable is set to something that does not fit the job.
    """
    text = os.environ.get(NODES_VARIABLE, "")
    if not text:
        return hashlib.blake2b(socket.gethostname().encode(), digest_size=KEY_BYTES).digest()
    sizes = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if min(sizes) < 1 or sum(sizes) != workers:
        raise ConfigurationError(
            f"{NODES_VARIABLE}={text!r} must give the number of workers on each node, {workers} in all, such as "
            f"{f'{workers // 2},{workers - workers // 2}'!r}"
        )
    node = sum(end <= rank for end in accumulate(sizes))
    return node.to_bytes(KEY_BYTES, "little")


def nodes_of(keys: bytes) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node's workers from all workers' keys, which an allgather has brought."""
    found: dict[bytes, list[int]] = {}
    for rank in range(len(keys) // KEY_BYTES):
        found.setdefault(keys[rank * KEY_BYTES : (rank + 1) * KEY_BYTES], []).append(rank)
    return tuple(map(tuple, found.values()))


def process_set_of(
    groups: Sequence[Sequence[int]],
    rank: int,
    known: Callable[[], Mapping[int, Sequence[int]]],
    add: Callable[[list[int]], Any],
    everyone: bool,
) -> int:
    """The number of the process set of that one of `groups` which `rank` is in; sets that are missing are made.

    Args:
        groups: ranks in the job, ascending. One of a single worker is a process set too: if that worker began fewer
            operations than the rest, those without a name would no longer match.
        known: gives number -> ranks of the process sets that exist.
        add: makes one; a collective call of all workers of the job.
        everyone: whether all workers of the job make this call.

    Raises:
        UnsupportedError: some are missing and cannot be made.
    """
    missing = [list(group) for group in groups if list(group) not in [list(each) for each in known().values()]]
    for group in missing:
        advice = (
            f"the process sets {[list(each) for each in groups]} are needed for a hierarchical exchange: set "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1 or call hvd.init(process_sets='dynamic'), so that they can be made, or "
            "pass them to hvd.init(process_sets=[...]) yourself"
        )
        if not everyone:
            raise UnsupportedError(f"{advice}. (Inside a process set they cannot be made: the other workers must help)")
        try:
            add(group)
        except ValueError as error:
            raise UnsupportedError(f"Horovod said: {error}; {advice}") from error
    return next((number for number, ranks in known().items() if rank in ranks and list(ranks) in map(list, groups)), -1)
