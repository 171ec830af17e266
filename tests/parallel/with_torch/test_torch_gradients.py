"""All the forms in which a gradient comes: dtypes, shapes, memory, sparse ones, and ones that do not come at all."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from known_gradients import SHAPES, Reference, all_gradients, assert_gradients, backward, gradients, parameters
from torch_workers import assert_same_everywhere, optimizer_for, train

from hvd_gradcomp.torch import BF16, FP16, NoCompression, TopKInt8, counters
from hvd_gradcomp.torch.optimizer import exchange_of

COMPRESSION = TopKInt8(ratio=0.05)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    optimizer = optimizer_for(params, COMPRESSION)
    reference = Reference(COMPRESSION)
    for step in range(2):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank(), dtype=dtype))
        optimizer.step()
        assert_gradients(params, reference.step(all_gradients(step, dtype=dtype)), reference)
    assert_same_everywhere(params)


@pytest.mark.parametrize("compression", [NoCompression, FP16, BF16], ids=["none", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_compressors_that_add(compression: Any, dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    optimizer = optimizer_for(params, compression)
    backward(params, gradients(0, hvd.rank(), dtype=dtype))
    optimizer.step()
    for name, p in params.items():
        mean = np.mean([g[name].astype(np.float64) for g in all_gradients(0, dtype=dtype).values()], axis=0)
        assert p.grad is not None
        assert p.grad.dtype == dtype
        torch.testing.assert_close(p.grad.double(), torch.as_tensor(mean), rtol=2e-2, atol=0.3)
    assert_same_everywhere(params)


def test_mixed_dtypes_in_one_bucket() -> None:
    params = {
        name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        for (name, shape), dtype in zip(SHAPES.items(), [*DTYPES, torch.bfloat16], strict=True)
    }
    optimizer = optimizer_for(params, COMPRESSION)
    reference = Reference(COMPRESSION)
    for step in range(2):
        optimizer.zero_grad()
        # bfloat16 is the coarsest: its values are exact in the other formats (float16 for values of this size).
        backward(params, gradients(step, hvd.rank(), dtype=torch.bfloat16))
        optimizer.step()
        assert_gradients(params, reference.step(all_gradients(step, dtype=torch.bfloat16)), reference)
    assert [name for name in counters(optimizer).buckets if name != "dense"] == ["c"]


ODD_SHAPES = {"scalar": (), "one": (1,), "empty": (0,), "empty too": (3, 0, 2), "cube": (2, 3, 4), "large": (2000,)}


@pytest.mark.parametrize("dense_below", [0, 1, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scalars_and_empty_parameters(dense_below: int, dtype: torch.dtype) -> None:
    compression = TopKInt8(ratio=0.05, dense_below=dense_below)
    params = parameters(ODD_SHAPES, dtype)
    optimizer = optimizer_for(params, compression)
    reference = Reference(compression)
    for step in range(2):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank(), ODD_SHAPES, dtype))
        optimizer.step()
        expected = reference.step(all_gradients(step, shapes=ODD_SHAPES, dtype=dtype))
        assert_gradients(params, expected, reference)
    assert_same_everywhere(params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_channels_last_gradients(dtype: torch.dtype) -> None:
    shapes = {"conv": (16, 8, 3, 3), "small": (4, 3, 3, 3)}
    params = {
        name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype).to(memory_format=torch.channels_last))
        for name, shape in shapes.items()
    }
    optimizer = optimizer_for(params, COMPRESSION)
    reference = Reference(COMPRESSION)
    for step in range(2):
        optimizer.zero_grad()
        backward(params, gradients(step, hvd.rank(), shapes, dtype))
        assert not params["conv"].grad.is_contiguous()  # type: ignore[union-attr]
        optimizer.step()
        assert_gradients(params, reference.step(all_gradients(step, shapes=shapes, dtype=dtype)), reference)


def flat_view(flat: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return flat[start : start + int(np.prod(shape))].view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [False, True], ids=["views", "detached views"])
def test_gradients_in_a_buffer_of_the_user(dtype: torch.dtype, hidden: bool) -> None:
    """The result is written into the buffer, and no residual lies there."""
    params = parameters(dtype=dtype)
    flat = torch.zeros(sum(p.numel() for p in params.values()), dtype=dtype)
    start = 0
    for p in params.values():
        view = flat_view(flat, start, tuple(p.shape))
        p.grad = view.detach() if hidden else view
        start += p.numel()
    check_buffer(params, [flat], dtype)


@pytest.mark.parametrize("kind", ["itself", "view", "detached", "numpy"])
def test_gradients_each_in_a_buffer_of_its_own(kind: str) -> None:
    params = parameters()
    buffers = [
        torch.as_tensor(np.zeros(p.numel(), np.float32)) if kind == "numpy" else torch.zeros(p.numel())
        for p in params.values()
    ]
    for index, (name, p) in enumerate(params.items()):
        if kind == "itself":
            buffers[index] = buffers[index].view(SHAPES[name]).clone()
            p.grad = buffers[index]
        elif kind == "view":
            p.grad = buffers[index].view(SHAPES[name])
        elif kind == "detached":
            p.grad = buffers[index].view(SHAPES[name]).detach()
        else:
            array = buffers[index].numpy()
            p.grad = torch.from_numpy(array.reshape(SHAPES[name]))
    check_buffer(params, buffers, torch.float32)


def check_buffer(params: dict[str, torch.nn.Parameter], buffers: list[torch.Tensor], dtype: torch.dtype) -> None:
    optimizer = optimizer_for(params, COMPRESSION)
    reference = Reference(COMPRESSION)
    for step in range(3):
        for buffer in buffers:
            buffer.zero_()
        backward(params, gradients(step, hvd.rank(), dtype=dtype))
        optimizer.step()
        expected = reference.step(all_gradients(step, dtype=dtype))
        assert_gradients(params, expected, reference)
        joined = torch.cat([buffer.reshape(-1) for buffer in buffers])
        gathered = torch.cat([p.grad.reshape(-1) for p in params.values()])  # type: ignore[union-attr]
        assert torch.equal(joined, gathered), "the buffer does not hold the result"
        # What the user does with the buffer afterwards cannot reach a residual.
        for buffer in buffers:
            buffer.fill_(1e6)


def test_results_share_no_memory_with_residuals() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    for step in range(3):
        train(params, optimizer, [step])
        residuals = exchange_of(optimizer).engine.residuals
        assert residuals.keys() == {"a.weight", "b.weight", "c"}
        pieces = [p.grad for p in params.values()] + list(residuals.values())
        addresses = [piece.untyped_storage().data_ptr() for piece in pieces]  # type: ignore[union-attr]
        assert len(set(addresses)) == len(addresses)


def test_a_gradient_kept_from_the_last_step_stays_as_it_is() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    train(params, optimizer, [0])
    kept = {name: p.grad for name, p in params.items()}
    copies = {name: g.clone() for name, g in kept.items()}  # type: ignore[union-attr]
    train(params, optimizer, [1, 2])
    for name, copy in copies.items():
        assert torch.equal(kept[name], copy)  # type: ignore[arg-type]


# -- gradients that do not come ---------------------------------------------------------------------------------------


def some_names(step: int, rank: int) -> list[str]:
    """Which parameters take part on a worker in a step: others on each worker, in some steps none, in some all."""
    random = np.random.default_rng([7, step, rank])
    return [name for name in SHAPES if random.random() < (0.0, 0.5, 0.5, 1.0)[(step + rank) % 4]]


@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_without_a_gradient_on_some_workers(groups: int | None, set_to_none: bool) -> None:
    params = parameters()
    model = torch.nn.ParameterList(params.values())
    optimizer = optimizer_for(params, COMPRESSION, groups=groups)
    reference = Reference(COMPRESSION)
    for step in range(4):
        model.zero_grad(set_to_none=set_to_none)
        mine = gradients(step, hvd.rank())
        backward(params, {name: mine[name] for name in some_names(step, hvd.rank())})
        optimizer.step()
        expected = {
            rank: {name: g if name in some_names(step, rank) else 0 * g for name, g in grads.items()}
            for rank, grads in all_gradients(step).items()
        }
        assert_gradients(params, reference.step(expected), reference)
    assert_same_everywhere(params)


def test_parameters_that_never_get_a_gradient() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    for step in range(2):
        optimizer.zero_grad()
        backward(params, {name: g for name, g in gradients(step, hvd.rank()).items() if name[0] == "a"})
        optimizer.step()
    assert not params["c"].detach().any()
    assert params["a.weight"].detach().any()
    assert_same_everywhere(params)


def test_no_gradient_at_all() -> None:
    params = parameters()
    optimizer = optimizer_for(params, COMPRESSION)
    optimizer.step()
    optimizer.step()
    assert not any(p.detach().any() for p in params.values())


def test_frozen_parameters_take_no_part() -> None:
    params = parameters()
    for name in ("a.weight", "b.bias"):
        params[name].requires_grad_(False)
    optimizer = optimizer_for(params, COMPRESSION)
    reference = Reference(COMPRESSION)
    for step in range(2):
        optimizer.zero_grad()
        free = {
            rank: {name: g for name, g in grads.items() if params[name].requires_grad}
            for rank, grads in all_gradients(step).items()
        }
        backward(params, free[hvd.rank()])
        optimizer.step()
        assert_gradients(params, reference.step(free), reference)
    assert params["a.weight"].grad is None
    assert not params["a.weight"].any()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dense_below", [0, 1024])
def test_parameters_frozen_later_stand_still_and_keep_their_residual(set_to_none: bool, dense_below: int) -> None:
    compression = TopKInt8(ratio=0.05, dense_below=dense_below)
    params = parameters()
    model = torch.nn.ParameterList(params.values())
    optimizer = optimizer_for(params, compression)
    reference = Reference(compression)
    frozen: tuple[str, ...] = ()
    for step in range(6):
        frozen = ("a.weight", "a.bias") if 2 <= step < 4 else ()
        for name, p in params.items():
            p.requires_grad_(name not in frozen)
        model.zero_grad(set_to_none=set_to_none)
        before = {name: params[name].detach().clone() for name in frozen}
        free = {
            rank: {name: g for name, g in grads.items() if name not in frozen}
            for rank, grads in all_gradients(step).items()
        }
        backward(params, free[hvd.rank()])
        optimizer.step()
        # The reference leaves the residuals of parameters that are not mentioned alone.
        assert_gradients(params, reference.step(free), reference)
        for name, value in before.items():
            assert torch.equal(params[name], value), f"{name} is frozen and moved"
    assert_same_everywhere(params)


# -- sparse gradients -------------------------------------------------------------------------------------------------

ROWS, WIDTH = 300, 8


class Sparse(torch.nn.Module):
    """An embedding of 2400 values and a dense layer behind it."""

    def __init__(self, bag: bool = False, sparse: bool = True, max_norm: float | None = None) -> None:
        super().__init__()
        cls = torch.nn.EmbeddingBag if bag else torch.nn.Embedding
        self.table = cls(ROWS, WIDTH, sparse=sparse, max_norm=max_norm)
        self.bag = bag
        torch.manual_seed(1)
        self.head = torch.nn.Linear(WIDTH, 200)
        torch.nn.init.normal_(self.table.weight)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.table(words) if self.bag else self.table(words).mean(dim=1)
        result: torch.Tensor = self.head(found)
        return result


def words(step: int, rank: int) -> torch.Tensor:
    random = np.random.default_rng([step, rank])
    return torch.as_tensor(random.integers(0, ROWS, (4, 5)))


def train_sparse(sparse: bool, compression: Any, absent: tuple[int, ...] = (), **options: Any) -> Sparse:
    """Three steps; the last rank does not look at the table in the steps in `absent`."""
    model = Sparse(bag=options.pop("bag", False), sparse=sparse)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
        **options,
    )
    for step in range(3):
        model.zero_grad()
        for part in range(options.get("backward_passes_per_step", 1)):
            missing = step in absent and hvd.rank() == hvd.size() - 1
            output = model.head(torch.ones(4, WIDTH)) if missing else model(words(10 * step + part, hvd.rank()))
            output.square().mean().backward()
        optimizer.step()
    assert_same_everywhere(dict(model.named_parameters()))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bag": True},
        {"absent": (1,)},
        {"absent": (0, 1)},
        {"absent": (0,), "bag": True, "groups": 1},
        {"op": hvd.Sum},
        {"backward_passes_per_step": 2},
        {"sparse_as_dense": True, "absent": (0, 2)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_sparse_embedding_gradients_give_what_dense_ones_give(options: dict[str, Any]) -> None:
    """With everything sent (ratio 1, no int8) a sparse gradient must train as a dense one does."""
    from hvd_gradcomp.torch import TopK

    everything = TopK(ratio=1.0)
    sparse = train_sparse(True, everything, **dict(options))
    dense = train_sparse(
        False, everything, **{key: value for key, value in options.items() if key != "sparse_as_dense"}
    )
    for (name, p), (_, q) in zip(sparse.named_parameters(), dense.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_a_sparse_gradient_travels_whole_beside_compressed_ones() -> None:
    model = Sparse()
    before = model.table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters(), compression=COMPRESSION
    )
    model(words(0, hvd.rank())).square().mean().backward()
    assert model.table.weight.grad.is_sparse  # type: ignore[union-attr]
    optimizer.step()
    assert model.table.weight.grad.is_sparse  # type: ignore[union-attr]
    touched = torch.unique(torch.cat([words(0, rank).reshape(-1) for rank in range(hvd.size())]))
    moved = (model.table.weight.detach() != before).any(dim=1).nonzero().reshape(-1)
    assert torch.equal(moved, touched)
    assert_same_everywhere(dict(model.named_parameters()))
    assert exchange_of(optimizer).engine.residuals.keys() == {"head.weight"}


def test_sparse_as_dense_is_compressed() -> None:
    model = Sparse()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        compression=COMPRESSION,
        sparse_as_dense=True,
    )
    for step in range(2):
        optimizer.zero_grad()
        model(words(step, hvd.rank())).square().mean().backward()
        optimizer.step()
        assert model.table.weight.grad.is_sparse  # type: ignore[union-attr]
    assert exchange_of(optimizer).engine.residuals.keys() == {"table.weight", "head.weight"}
    assert_same_everywhere(dict(model.named_parameters()))
