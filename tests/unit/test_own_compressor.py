"""docs/own-compressor.md is true: its code, taken from the page, compresses, travels through engines and composes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import array_of, as_numpy, bits_of, gradient
from simulated_cluster import Cluster
from steps import engines_of, parameters_of, step

from hvd_gradcomp.compressors import Compressor, Int8, Sparsifier, TopK, compression_from_spec
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import Ops

PAGE = Path(__file__).parents[2] / "docs" / "own-compressor.md"
CODE, IMPORTS, USES, SPARSIFIER = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


# Once for all tests: a spec name belongs to the class that took it first.
@pytest.fixture(scope="session")
def page() -> dict[str, Any]:
    """The names that the page defines. Its classes belong to no package, as those of a user's script."""
    names: dict[str, Any] = {"__name__": "users_script", "Sparsifier": Sparsifier}
    exec(compile(IMPORTS + CODE + SPARSIFIER, str(PAGE), "exec", dont_inherit=True), names)
    return names


def exchanged(ops: Ops, compressor: Compressor, workers: int = 3) -> tuple[list[np.ndarray], list[np.ndarray], Any]:
    """The workers' gradients, their results after one step, and what the first one has left over."""
    gradients = [gradient("normal", (2000,), (5, rank)) for rank in range(workers)]
    cluster = Cluster(workers)
    engines = engines_of(cluster, compressor, parameters_of([(2000,)]))
    results = step(cluster, engines, ops, [{"p0": each} for each in gradients])
    sent = max(len(each.request.payload) for each in cluster.sent[0])
    return gradients, [each["p0"] for each in results], sent


def test_the_value_code_is_ten_lines(page: dict[str, Any]) -> None:
    body = [line for line in CODE.split("register_spec")[0].splitlines()[2:] if line.strip()]
    assert len(body) == 10


def test_its_bytes_travel_in_the_engine(page: dict[str, Any], ops: Ops) -> None:
    gradients, results, sent = exchanged(ops, page["Fixed8"](limit=4.0))
    assert all(bits_of(each) == bits_of(results[0]) for each in results)
    assert np.allclose(results[0], np.mean(gradients, axis=0), rtol=0, atol=4 / 127 / 2 * 1.001)
    assert 2000 < sent < 2000 + 100


def test_it_composes_in_a_spec(page: dict[str, Any], ops: Ops) -> None:
    compressor = compression_from_spec("topk(ratio=0.05) >> fixed8(limit=5.0)")
    assert compressor == TopK(0.05) >> page["Fixed8"](limit=5.0)
    assert str(compressor) == "topk(ratio=0.05) >> fixed8(limit=5.0)"
    assert compression_from_spec("topk >> fixed8") == TopK() >> page["Fixed8"]
    gradients, results, sent = exchanged(ops, compressor)
    assert sent < 100 * 2.5 + 100
    largest = np.argmax(np.abs(gradients[0]))
    kept = [each[largest] if np.sort(np.abs(each))[-100] <= abs(each[largest]) else 0 for each in gradients]
    assert results[0][largest] == pytest.approx(np.mean(kept), abs=5 / 127)


def test_missing_bytes_are_refused(page: dict[str, Any], ops: Ops) -> None:
    code = page["Fixed8"]()
    payload, context = code.compress(array_of(ops, gradient("normal", (100,), 1)))
    with pytest.raises(PayloadError, match="truncated"):
        code.decompress(payload[:-4], context)


def test_the_sparsifier_sends_each_position_in_its_turn(page: dict[str, Any], ops: Ops) -> None:
    every = page["EveryNth"](n=50)
    gradients, results, _ = exchanged(ops, every)
    expected = np.zeros(2000, np.float32)
    expected[::50] = np.mean(gradients, axis=0)[::50]
    assert np.allclose(results[0], expected, atol=1e-6)
    _, results, _ = exchanged(ops, every >> Int8())
    assert np.allclose(results[0], expected, atol=0.05)


def test_its_residual_is_what_was_cut(page: dict[str, Any], ops: Ops) -> None:
    x = gradient("normal", (100,), 2)
    _, residual = page["Fixed8"](limit=0.5).encode(ops, array_of(ops, x), None)
    beyond = np.abs(x) > 0.5
    assert beyond.any()
    assert np.allclose(as_numpy(residual)[beyond], (x - 0.5 * np.sign(x))[beyond])
