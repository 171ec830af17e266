"""When the Triton kernels are chosen: with Triton installed and not turned off; and nothing is imported before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from arrays import bits_of, gradient
from native import REFERENCE
from on_gpu import OnGpu

from hvd_gradcomp.compressors import Context, TopKInt8
from hvd_gradcomp.ops import native, registry, triton
from hvd_gradcomp.ops.triton import library
from hvd_gradcomp.ops.triton.kernels import TritonKernels


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is remembered about Triton forgotten, before and after."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def found(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """Pretend that Triton is installed, or is not."""
    monkeypatch.setattr(library, "find_spec", lambda _: object() if installed else None)


@pytest.mark.parametrize("installed", [True, False])
def test_torch_has_the_layer_where_triton_is_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.delenv(library.SWITCH, raising=False)
    found(monkeypatch, installed)
    chosen = registry.backend.__wrapped__("torch")
    assert isinstance(chosen, TritonKernels) == installed
    assert type(chosen).__name__ == f"{'Triton' * installed}{'Native' * native.available()}TorchOps"
    assert not isinstance(registry.backend.__wrapped__("numpy"), TritonKernels)
    assert ("for CUDA tensors" if installed else "not installed") in triton.status()


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, True)
    monkeypatch.setenv(library.SWITCH, "0")
    assert not isinstance(registry.backend.__wrapped__("torch"), TritonKernels)
    assert "turned off by HVD_GRADCOMP_TRITON=0" in triton.status()


def test_tensors_on_the_cpu_do_not_import_triton() -> None:
    code = (
        "import sys, torch\n"
        "from hvd_gradcomp.compressors import TopKInt8\n"
        "payload, context = TopKInt8.compress(torch.ones(5000))\n"
        "TopKInt8.decompress(payload, context)\n"
        "assert 'triton' not in sys.modules\n"
        "assert 'hvd_gradcomp.ops.triton.kernels' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(library.__file__).parents[3], check=True)


@pytest.mark.usefixtures("fresh")
def test_a_triton_that_cannot_be_imported_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError(f"no {name} today")

    monkeypatch.setattr(library, "import_module", broken)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    x = gradient("normal", (5000,), 0)
    frame, residual = TopKInt8(0.1).encode(REFERENCE, x.copy(), Context())
    with pytest.warns(RuntimeWarning, match=r"without its GPU kernels \(no hvd_gradcomp.ops.triton.steps today\)"):
        found_frame, found_residual = TopKInt8(0.1).encode(OnGpu(), torch.from_numpy(x), Context())
    assert bits_of(found_frame) == bits_of(frame)
    assert np.array_equal(found_residual.numpy(), residual)


@pytest.mark.usefixtures("fresh")
def test_triton_is_not_loaded_behind_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would end this process.
    monkeypatch.setattr(library, "import_module", lambda _: pytest.fail("Triton is loaded"))
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with pytest.warns(RuntimeWarning, match="TensorFlow was imported before Triton"):
        assert library.load() is None
