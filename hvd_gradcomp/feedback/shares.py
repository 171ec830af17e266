"""Shares: which elements of a parameter a worker owns, and state that is kept for these elements only.

Where an exchange goes through owners, element i of a parameter belongs to owner (i + shift) mod owners: interleaved, so
that every owner has a part of every layer and none owns those with large gradients. The shift follows from the
parameter's name, so that tiny parameters do not all belong to the first owner. Ownership is a matter of the parameter
alone: it survives other buckets. A part of the state that is kept for a share says so in its name, "residual_1_of_4",
and can be made whole again for an exchange of another kind, another number of owners, or a checkpoint.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

from hvd_gradcomp.ops import Array, Ops

_SHARED = re.compile(r"(\w+?)_(\d+)_of_(\d+)")


def start_of(name: str, owner: int, owners: int) -> int:
    """The first element of parameter `name` that belongs to `owner`; every `owners`-th from there on does."""
    return (owner - zlib.crc32(name.encode())) % owners


def share_size(name: str, size: int, owner: int, owners: int) -> int:
    """How many of the parameter's `size` elements belong to `owner`; may be none."""
    return len(range(start_of(name, owner, owners), size, owners))


def share_of(ops: Ops, name: str, x: Array, owner: int, owners: int) -> Array:
    """The elements of `x` (n,) that belong to `owner`, in memory of their own."""
    # A copy would keep the stride of a single element, which then cannot be seen as bytes.
    return ops.concat([x[start_of(name, owner, owners) :: owners]])


def join_shares(ops: Ops, name: str, shares: Sequence[Array], size: int) -> Array:
    """The parameter's `size` elements from the shares of all owners, in their order."""
    owners = len(shares)
    by_start = sorted(range(owners), key=lambda owner: start_of(name, owner, owners))
    ordered = [shares[owner] for owner in by_start]
    rows = -(-size // owners)
    if rows <= 1:
        return ops.concat([share for share in ordered if len(share)])
    # All are equally long, or one element shorter.
    return ops.interleave([ops.pad(share, rows) for share in ordered])[:size]


def shared_part(part: str, owner: int, owners: int) -> str:
    """The name of a part of the state that is kept for one share."""
    return f"{part}_{owner}_of_{owners}"


def plain_part(part: str) -> str:
    """The name of the part that `part` is kept of, for one share or for all."""
    found = _SHARED.fullmatch(part)
    return plain_part(found[1]) if found else part


def whole_parts(ops: Ops, name: str, size: int, parts: Mapping[str, Array], but: str = "") -> Mapping[str, Array]:
    """`parts` of the state of parameter `name` with what is kept for shares added to the parts of full length.

    Args:
        parts: part -> values; not changed.
        but: the ending, "_1_of_4", of those that stay as they are.
    """
    shared = [part for part in parts if _SHARED.fullmatch(part) and not (but and part.endswith(but))]
    if not shared:
        return parts
    whole = {part: values for part, values in parts.items() if part not in shared}
    for part in shared:
        plain, added = _whole(ops, name, size, part, parts[part])
        whole[plain] = ops.accumulate(added, whole[plain]) if plain in whole else added
    return whole


def _whole(ops: Ops, name: str, size: int, part: str, values: Array) -> tuple[str, Array]:
    """The plain name of a part that is kept for a share (or a share of that), and its values among `size` elements."""
    found = _SHARED.fullmatch(part)
    if found is None:
        return part, values
    owner, owners = int(found[2]), int(found[3])
    shares = [ops.zeros(share_size(name, size, each, owners), "float32", values) for each in range(owners)]
    plain, shares[owner] = _whole(ops, name, len(shares[owner]), found[1], values)
    return plain, join_shares(ops, name, shares, size)


def own_parts(parts: Mapping[str, Array], owner: int, owners: int) -> dict[str, Array]:
    """What is kept for the share of `owner`, under the plain names of the parts."""
    ending = shared_part("", owner, owners)
    return {part.removesuffix(ending): values for part, values in parts.items() if part.endswith(ending)}
