"""A payload: the frames of one bucket from one worker, and the header by which every receiver checks them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_gradcomp.errors import ConfigurationError, GradcompError, PayloadError, UnsupportedError
from hvd_gradcomp.ops import Array, Ops
from hvd_gradcomp.wire.parts import ALIGNMENT, Reader, write

MAGIC = b"HG"
VERSION = 1
#: magic, version, flags, fingerprint of the configuration, bytes of the whole payload
HEADER = struct.Struct("<2sBBII")
CHECKSUM = struct.Struct("<I")
SUMS = struct.Struct("<II")
JOIN_ADVICE = (
    "a worker that has joined cannot take part in an exchange of payloads. Give every worker the same number of "
    "batches (repeat or drop the last ones), or use compression=NoCompression or FP16, which join supports"
)
_HEADER_BYTES = HEADER.size + CHECKSUM.size
_NON_FINITE = 1
_REFUSAL = 2
_ERRORS: dict[str, type[GradcompError]] = {
    each.__name__: each for each in (PayloadError, ConfigurationError, UnsupportedError)
}


@dataclass(frozen=True)
class Received:
    """One worker's payload after its checks: a reader over its frames, or word that its gradient was not finite.

    Or word that it has met an error, where workers exchange once more what they have made of each other's payloads.
    """

    rank: int
    frames: Reader
    non_finite: bool
    refusal: bool = False

    def error(self) -> GradcompError:
        """The error that the worker reports by a refusal."""
        kind, _, message = self.frames.ops.to_host(self.frames.data).rstrip(b"\0").decode().partition(": ")
        return _ERRORS.get(kind, PayloadError)(f"rank {self.rank} reports: {message}")


def write_payload(ops: Ops, frames: Sequence[Array], fingerprint: int, like: Array, non_finite: bool = False) -> Array:
    """The payload of `frames` (uint8 arrays), as uint8 on the device of `like`.

    Args:
        fingerprint: 32 bits that stand for the configuration; receivers compare it with their own.
        non_finite: the gradient held NaN or infinity, and no frames are sent.
    """
    body = ops.concat(list(frames)) if frames else ops.zeros(0, "uint8", like)
    return _payload(ops, body, fingerprint, like, _NON_FINITE if non_finite else 0)


def write_refusal(ops: Ops, error: GradcompError, fingerprint: int, like: Array) -> Array:
    """The payload of a worker that cannot go on, for others that wait for one: the same error for all of them."""
    body = ops.pad(ops.from_host(f"{type(error).__name__}: {error}".encode(), like), ALIGNMENT)
    return _payload(ops, body, fingerprint, like, _REFUSAL)


def _payload(ops: Ops, body: Array, fingerprint: int, like: Array, flags: int) -> Array:
    header = HEADER.pack(MAGIC, VERSION, flags, fingerprint, _HEADER_BYTES + len(body))
    checksum = CHECKSUM.pack(_checksum(ops, header, body))
    return write(ops, like, header + checksum, body)


def split_payloads(ops: Ops, gathered: Array, ranks: Sequence[int], fingerprint: int) -> list[Received]:
    """The payloads of all workers out of their concatenation in rank order.

    Args:
        gathered: uint8, what an allgather of payloads returned.
        ranks: the workers' ranks, by which messages call them.
        fingerprint: of this worker's configuration.

    Raises:
        PayloadError: some rank's bytes are corrupt or of another format; the message names the rank.
        UnsupportedError: some rank has left the job by `hvd.join()`; the message names the rank.
        GradcompError: some rank reports an error of its own (`write_refusal`).
        ConfigurationError: some ranks sent a payload of another configuration; the message names them.
    """
    payloads: list[Received] = []
    differing: list[int] = []
    reader = Reader(ops, gathered)
    for place, rank in enumerate(ranks):
        try:
            found, received = _read_payload(reader, rank, ranks[place - 1] if place else None)
        except PayloadError as error:
            raise PayloadError(
                f"rank {rank} sent a corrupt payload: {error}. All workers stop here, before a wrong gradient is used; "
                "check that all run the same version of hvd_gradcomp, then the network and memory of that worker"
            ) from None
        if found != fingerprint:
            differing.append(rank)
        payloads.append(received)
    if reader.left:
        raise PayloadError(f"rank {ranks[-1]} sent {reader.left} bytes too many")
    for each in payloads:
        if each.refusal:
            raise each.error()
    if differing:
        raise ConfigurationError(
            f"ranks {differing} sent gradients compressed with other settings than this worker's: "
            "give every worker the same compression, parameters and Horovod options"
        )
    return payloads


def _read_payload(reader: Reader, rank: int, before: int | None) -> tuple[int, Received]:
    ops = reader.ops
    head = ops.to_host(reader.bytes(_HEADER_BYTES))
    magic, version, flags, fingerprint, length = HEADER.unpack(head[: HEADER.size])
    # Where a payload ends is known from its header alone, so bytes too many would be found in the next header.
    other = "" if before is None else f" (or rank {before} sent more bytes than its header says)"
    if not any(head):
        raise UnsupportedError(
            f"rank {rank} sent zeros{other}, as Horovod does for a worker that has called hvd.join(): {JOIN_ADVICE}"
        )
    if magic != MAGIC:
        raise PayloadError(f"it begins with {magic!r} instead of {MAGIC!r}{other}")
    if version != VERSION:
        raise PayloadError(f"it has format version {version}, this is version {VERSION}{other}")
    body = reader.bytes(length - _HEADER_BYTES)
    if len(body) % 4 or CHECKSUM.unpack(head[HEADER.size :])[0] != _checksum(ops, head[: HEADER.size], body):
        raise PayloadError("its checksum does not match")
    return fingerprint, Received(rank, Reader(ops, body), bool(flags & _NON_FINITE), bool(flags & _REFUSAL))


def _checksum(ops: Ops, header: bytes, body: Array) -> int:
    """32 bits for everything: the CRC-32 of the header and two sums over the body.

    The second sum runs over words that begin half a word later: in one sum alone, changes to the upper bits of two
    words would cancel out, as 2**31 times an even number is nothing. Sums added to the checksum as they are, without a
    CRC, would not show a number that is added to both the first word and the checksum.
    """
    sums = (ops.checksum(part) if len(part) else 0 for part in (body, body[2:-2]))
    return zlib.crc32(header + SUMS.pack(*sums))
