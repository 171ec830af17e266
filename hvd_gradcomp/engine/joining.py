"""`hvd.join()` where payloads are gathered: an error on the worker that calls it, before any worker can wait for it.

Horovod lets a worker that has joined send zeros to allreduces; an allgather it refuses, on all workers, after which a
joined worker's own call fails and what the others have under way can wait for it without end (seen over MPI). So a
worker that has made an optimizer whose payloads are gathered does not get as far as joining. Nothing here is about
compressors whose exchange is an allreduce alone: with those Horovod's join works, and is called as it is. The doors
put `join` in the place of Horovod's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_gradcomp.compressors import Compressor
from hvd_gradcomp.errors import UnsupportedError
from hvd_gradcomp.wire.payload import JOIN_ADVICE

# Of optimizers made in this process, whether or not they still exist: when this worker's is gone, those of others may
# be in the middle of an epoch.
_gathering: dict[Compressor, None] = {}


def watch(compressor: Compressor) -> None:
    """Refuse `hvd.join()` from now on, if `compressor` does not go with it."""
    if not _is_allreduce(compressor):
        _gathering[compressor] = None


def join(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """`hvd.join`, unless an optimizer's payloads are gathered.

    Raises:
        UnsupportedError: they are; Horovod has not been told anything.
    """
    for compressor in _gathering:
        raise UnsupportedError(
            f"hvd.join() was called on a worker whose optimizer exchanges payloads of {compressor}: {JOIN_ADVICE}"
        )
    return original(*args, **kwargs)


def _is_allreduce(compressor: Compressor) -> bool:
    """Whether zeros from a worker that has joined are as good as its gradients, in each exchange."""
    return all(each.meets == "dense" or (each.meets == "sum" and not each.draws) for each in compressor.members())
