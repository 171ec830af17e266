"""What every compressor is: a frozen dataclass of hyper-parameters that keeps Horovod's `Compression` interface.

State (residuals, seeds) lives in the engine, never here, so one compressor may serve any number of optimizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar, overload

from hvd_gradcomp.collectives import Exchange, Transport
from hvd_gradcomp.errors import ConfigurationError, NonFiniteError, UnsupportedError
from hvd_gradcomp.feedback import ErrorFeedback, Memory, NoMemory
from hvd_gradcomp.ops import Array, Ops, ops_for
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.wire.parts import Reader

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Context:
    """What a compressor may know about one call: nothing that it could keep.

    Attributes:
        rank: this worker's rank among `workers`.
        workers: how many workers exchange.
        name: the parameter's name, the same on all workers.
        step: how many exchanges this parameter has had, the same on all workers.
        state: what a value code kept of this tensor in its last step, by part; never to be changed in place.
        kept: where a value code puts what it wants to find there in the next step.
        candidates: what `ops.correct` found in the vector to compress when asked for the compressor's `wanted(size)`.
    """

    rank: int = 0
    workers: int = 1
    name: str = ""
    step: int = 0
    candidates: object = field(default=None, compare=False, repr=False)
    state: Mapping[str, Array] = field(default_factory=dict, compare=False, repr=False)
    kept: dict[str, Array] = field(default_factory=dict, compare=False, repr=False)

    def key(self, seed: int) -> int:
        """64 bits for `Ops.uniform`: draws of this worker's own, new at every step."""
        return _hash(seed, self.name, self.step, self.rank)

    def shared_key(self, seed: int) -> int:
        """64 bits for `Ops.uniform`: draws that all workers make alike, new at every step."""
        return _hash(seed, self.name, self.step)


def _hash(*parts: object) -> int:
    # Python's own hash differs between processes.
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Item:
    """One tensor that goes into an exchange of a method's own.

    Attributes:
        x: float32, shape (n,); its memory may be reused. Not finite on the workers of a step that must be skipped.
        shape: the tensor's shape; None where several tensors were joined or where nobody said.
        context: of this tensor.
        state: part -> what `Sent.state` held after the last step; never to be changed in place.
    """

    x: Array
    shape: tuple[int, ...] | None
    context: Context
    state: Mapping[str, Array]


@dataclass(frozen=True)
class Sent:
    """What came of an `Item`.

    Attributes:
        total: float32 (n,), the sum over the workers of what they sent; the same bits on every worker.
        residual: float32 (n,), the item's `x` minus what this worker sent; None where it sent everything.
        positions: int64, the elements that were sent; None where the method sends every element.
        state: part -> what to keep for the next step, the same bits on every worker.
    """

    total: Array
    residual: Array | None = None
    positions: Array | None = None
    state: Mapping[str, Array] = field(default_factory=dict)


#: What can be compressed as one vector.
GRANULARITIES = ("layer", "bucket", "model")

#: How payloads that cannot be added may meet.
COLLECTIVES = ("allgather", "scatter_reduce", "hierarchical", "auto")


class Door(Protocol):
    """How `compress` and `decompress` reach the workers: one for each framework, registered by its door."""

    def compress(self, compressor: Compressor, tensor: Any) -> tuple[Any, Any]: ...

    def decompress(self, compressor: Compressor, payload: Any, ctx: Any) -> Any: ...


#: Name of the ops backend -> the door that registered for its arrays.
doors: dict[str, Door] = {}


class _ClassOrInstance(Generic[_Result]):
    """A method that also works on the bare class, which then stands for an instance with all defaults."""

    def __init__(self, function: Callable[..., _Result]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Compressor | None, owner: type[Compressor]) -> Callable[..., _Result]:
        compressor = owner() if instance is None else instance
        return self.function.__get__(compressor)


@overload
def as_compressor(compression: type[Compressor]) -> Compressor: ...
@overload
def as_compressor(compression: Compressor) -> Compressor: ...
@overload
def as_compressor(compression: object) -> Compressor | None: ...
def as_compressor(compression: object) -> Compressor | None:
    """The instance that `compression` stands for, or None when it is not one of this package's compressors."""
    if isinstance(compression, type) and issubclass(compression, Compressor):
        return compression()
    return compression if isinstance(compression, Compressor) else None


@dataclass(frozen=True)
class Compressor:
    """Base of all compressors.

    Args:
        memory: what becomes of the part that is not sent; `ErrorFeedback()` by default, `NoMemory()` turns it off.
        dense_below: tensors of fewer elements travel uncompressed, through Horovod's own fused allreduce.
        granularity: what is compressed as one vector: each tensor by itself ("layer"), the tensors of a bucket
            ("bucket", or of each of Horovod's `groups`), or those of the whole model ("model"). Coarser means that
            large gradients anywhere come first, and small tensors cost less; finer that no layer is starved.
        collective: how payloads that cannot be added meet. "allgather": every worker gets all payloads.
            "scatter_reduce": each worker adds up its share of the elements, compresses the sums and sends them to all;
            about two payloads a worker, however many they are. "hierarchical": gradients are added on each node,
            whose workers exchange a share each with the other nodes. "auto": for each bucket what the cost model
            finds cheapest, a dense exchange included. See docs/scaling.md.

    A subclass gives `encode` and `decode_add`; one whose payloads may be added says so (`meets`) and gives `summands`
    and `from_sum` as well; one that needs several rounds of its own gives `exchange`.
    """

    #: How payloads meet. "gather": each worker's payload is decoded; "sum": an allreduce may add the payloads;
    #: "own": the method brings its exchange; "dense": not compressed.
    meets: ClassVar[str] = "gather"
    #: The format in which summands travel, for `meets = "sum"`: "float32", "float16" or "bfloat16".
    sum_kind: ClassVar[str] = "float32"
    #: Whether summands mean something only among workers that agree on the step, such as positions drawn from it.
    draws: ClassVar[bool] = False
    #: Whether `combine` gives something else than the sum, for which a dense exchange cannot stand in.
    votes: ClassVar[bool] = False
    #: The name in a spec string.
    spec_name: ClassVar[str]

    memory: Memory = field(default=ErrorFeedback(), kw_only=True)
    dense_below: int = field(default=1024, kw_only=True)
    granularity: str = field(default="layer", kw_only=True)
    collective: str = field(default="allgather", kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.memory, type) or not isinstance(self.memory, Memory):
            raise ConfigurationError(f"memory must be one such as ErrorFeedback() or NoMemory(), got {self.memory!r}")
        if not isinstance(self.dense_below, int) or self.dense_below < 0:
            raise ConfigurationError(f"dense_below must be a number of elements >= 0, got {self.dense_below!r}")
        if self.granularity not in GRANULARITIES:
            raise ConfigurationError(f"granularity must be one of {GRANULARITIES}, got {self.granularity!r}")
        if self.collective not in COLLECTIVES:
            raise ConfigurationError(f"collective must be one of {COLLECTIVES}, got {self.collective!r}")

    def takes(self, size: int) -> bool:
        """Whether a tensor of `size` elements is handed to the engine, instead of to Horovod as it is."""
        return self.meets != "dense" and size >= (1 if self.memory.is_momentum else max(self.dense_below, 1))

    def without_memory(self) -> Compressor:
        """The same method for a single exchange: nothing comes after it that could make good for it.

        Nor would anything come for which it were worth while to measure which collective is the fastest.
        """
        collective = "allgather" if self.collective == "auto" else self.collective
        return replace(self, memory=NoMemory(), collective=collective)

    def with_collective(self, collective: str) -> Compressor:
        """The same method, whose payloads meet in that way."""
        return replace(self, collective=collective)

    def at(self, step: int) -> Compressor:
        """What this compressor is at exchange number `step` (from 0); itself, unless it follows a schedule."""
        return self

    def of(self, name: str, shape: tuple[int, ...] | None) -> Compressor:
        """What compresses the parameter `name` of that shape; itself, unless it is a set of rules or a policy."""
        return self

    def members(self) -> tuple[Compressor, ...]:
        """All that `of` may return."""
        return (self,)

    def with_ratio(self, ratio: float) -> Compressor:
        """The same method, sending about the fraction `ratio` (0 < ratio <= 1) of the values (or of their bits).

        What was not sent before the change stays in the residual and is sent later.

        Raises:
            ConfigurationError: this method has nothing to set.
        """
        raise ConfigurationError(
            f"{self} has no ratio that a policy or a schedule could change: use it with a sparsifier such as "
            "topk >> int8, or with int8, linear or qsgd, whose number of bits follows the ratio"
        )

    @property
    def learns(self) -> bool:
        """Whether it keeps something of a tensor for the next step, by `Context.kept`."""
        return False

    @property
    def adapts(self) -> Policy | None:
        """The policy that changes the ratio while training runs, if there is one."""
        return None

    # -- for the engine ---------------------------------------------------------------------------------------------

    def encode(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        """Compress one tensor.

        Args:
            x: float32, shape (n,), n >= 1, all finite. Its memory may be reused for the residual.

        Returns:
            The frame (uint8), and the residual (float32, shape (n,)): `x` minus what receivers will decode.
        """
        raise NotImplementedError

    def decode_add(self, ops: Ops, frames: Reader, out: Array) -> Array:
        """Add what the next frame decodes to onto `out`, which may change in place.

        Args:
            out: float32, shape (n,).

        Raises:
            PayloadError: the frame is not one that this compressor could have written for n elements.
        """
        raise NotImplementedError

    def decode_mean(self, ops: Ops, frames: Sequence[Reader], out: Array, divisor: int) -> Array | None:
        """The sum of what the next frame of each reader decodes to, divided by `divisor`, in one pass over `out`.

        Args:
            out: float32, shape (n,), to be overwritten.

        Returns:
            None where there is no such way, or the bytes are wrong: `decode_add` tells which, frame by frame.
        """
        return None

    def wanted(self, size: int) -> int:
        """How many of the largest magnitudes of a tensor of `size` elements `encode` will ask for; 0 for none."""
        return 0

    def combine(self, ops: Ops, total: Array, workers: int) -> Array:
        """What takes the place of the workers' sum, given the sum of what their frames decode to: by default, that sum.

        For methods whose workers vote, which set `votes`. Where the engine averages, it divides by the worker count
        afterwards.

        Args:
            total: float32, shape (n,); may change in place. The same bits on every worker.
        """
        return total

    def summands(self, ops: Ops, x: Array, context: Context) -> tuple[Array, Array]:
        """What to add over the workers (float32, exact in `sum_kind`, shape (m,)), and the residual (shape (n,))."""
        raise NotImplementedError

    def from_sum(self, ops: Ops, total: Array, size: int, context: Context) -> Array:
        """The sum of the workers' tensors (float32, shape (size,)) from the sum of their summands (shape (m,))."""
        raise NotImplementedError

    def expected_bytes(self, size: int) -> float:
        """About how many bytes `encode` gives for a tensor of `size` elements, headers left out."""
        raise NotImplementedError

    def positions_sent(self, ops: Ops, frame: Array | None, like: Array, context: Context) -> Array | None:
        """The elements that `encode` or `summands` has just sent, for memories that treat them apart from the rest.

        Args:
            frame: what `encode` returned; None after `summands`.
            like: an array of the tensor's length.

        Returns:
            int64, distinct; None where every element is sent.
        """
        return None

    def exchange(self, ops: Ops, items: Sequence[Item], transport: Transport) -> Exchange[list[Sent] | None]:
        """The exchange of the tensors of one bucket, for `meets = "own"`: yields requests, receives their results.

        All workers must yield the same kinds and sizes of requests in the same order, whatever their values are; so
        whether to go on may depend on results only, never on `items`. See `rounds.Marks`.

        Returns:
            For each item what became of it; None where some worker's values were not finite.
        """
        raise NotImplementedError

    # -- Horovod's Compression interface ----------------------------------------------------------------------------

    @_ClassOrInstance
    def compress(self: Compressor, tensor: Any) -> tuple[Any, Any]:
        """Horovod's interface: what to hand to a collective for `tensor`, and the context to decompress it.

        On workers of a Horovod job what is handed out is a small token of ones; the payload travels in `decompress`.
        Elsewhere (no Horovod running) it is the payload itself, and nothing is exchanged.

        Raises:
            NonFiniteError: the tensor holds NaN or infinity.
        """
        ops = ops_for(tensor)
        door = doors.get(ops.name)
        return door.compress(self, tensor) if door else encode_locally(self, ops, tensor)

    @_ClassOrInstance
    def decompress(self: Compressor, payload: Any, ctx: Any) -> Any:
        """The reverse of `compress`; with `ctx` None `payload` is a finished result and is returned as it is."""
        if ctx is None:
            return payload
        door = doors.get(ops_for(payload).name)
        return door.decompress(self, payload, ctx) if door else decode_locally(self, payload, ctx)

    # -- looks ------------------------------------------------------------------------------------------------------

    def __rshift__(self, code: object) -> Compressor:
        raise ConfigurationError(
            f"{self} >> {code}: {self} does not select values, as TopK does, so nothing can be coded after it"
        )

    def __str__(self) -> str:
        return call_spec(self)


def call_spec(part: Compressor | Memory) -> str:
    """The spec of a dataclass: its name, and the fields that differ from their defaults."""
    changed = []
    # The options that all compressors share stand last, as they do in a call.
    for item in sorted(fields(part), key=lambda each: bool(each.kw_only)):
        value = getattr(part, item.name)
        if value != item.default:
            text = call_spec(value) if isinstance(value, Memory) else _literal(value)
            changed.append(f"{item.name}={text}")
    return f"{part.spec_name}({', '.join(changed)})" if changed else part.spec_name


def _literal(value: object) -> str:
    """A value as specs spell it: words without quotes."""
    return value if isinstance(value, str) and value.isidentifier() else repr(value)


@dataclass(frozen=True)
class LocalContext:
    """What `decompress` needs to give back a tensor as it came in."""

    size: int
    shape: tuple[int, ...]


def encode_locally(compressor: Compressor, ops: Ops, tensor: Array) -> tuple[Array, LocalContext]:
    """`compress` without workers: the frame of one tensor, and its context."""
    if compressor.meets == "own":
        raise UnsupportedError(
            f"{compressor} has no payload without workers: its {type(compressor).__name__}.exchange adds over them in "
            "several rounds. Call hvd.init() before compress(), in a script that horovodrun starts"
        )
    x = ops.copy(ops.flat32(tensor))
    require_finite(ops, x)
    frame, _ = compressor.encode(ops, x, Context())
    return frame, LocalContext(len(x), tuple(tensor.shape))


def decode_locally(compressor: Compressor, frame: Array, ctx: LocalContext) -> Array:
    """`decompress` without workers: float32 in the shape that was compressed."""
    ops = ops_for(frame)
    reader = Reader(ops, frame)
    x = compressor.decode_add(ops, reader, ops.zeros(ctx.size, "float32", frame))
    reader.end()
    return x.reshape(ctx.shape)


def require_finite(ops: Ops, x: Array) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteError: there is one.
    """
    if not ops.all_finite(x):
        raise NonFiniteError(
            f"the tensor of {len(x)} elements holds NaN or infinity (as float32) and cannot be compressed; "
            "an optimizer passes such a step on as NaN, so that loss scaling can skip it"
        )
