"""The command `hvd-gradcomp plan` as far as it needs no workers: models, wrong arguments, the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_gradcomp.cli import main
from hvd_gradcomp.cli.plan import as_json, as_text, load_model
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.policy.cost import Links, Network, Topology
from hvd_gradcomp.policy.planner import Compute, Machines, Method, Sending, rank

FACTORY = """
class Parameter:
    def __init__(self, *shape):
        self.shape, self.requires_grad = shape, True

class Module:
    def parameters(self):
        return [Parameter(3, 4), Parameter(4)]

def make():
    return Module()

def make_with_inputs():
    return Module(), 7

def wrong():
    return 5
"""


def test_a_model_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "factory.py"
    file.write_text(FACTORY)
    model = load_model(f"{file}:make")
    assert (model.shapes, model.inputs) == ([(3, 4), (4,)], ())
    assert load_model(f"{file}:make_with_inputs").inputs == (7,)
    assert len(load_model("gpt2").shapes) == 148
    for text, message in (
        ("resnet", "expected resnet50, vgg16"),
        (f"{file}x:make", "there is no file"),
        (f"{file}:other", "has no function 'other'"),
        (f"{file}:wrong", "returned a int"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load_model(text)


def test_wrong_arguments_end_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "resnet"]) == 2
    assert main(["plan", "--methods", "topq"]) == 2
    errors = capsys.readouterr().err
    assert "no model is called 'resnet'" in errors
    assert "topq" in errors
    for wrong in (["plan", "--step-ms", "-1"], ["plan", "--step-ms", "fast"], []):
        with pytest.raises(SystemExit):
            main(wrong)


def test_the_table_and_its_json() -> None:
    links = Links(Network(1e-3, 1e8))
    machines = Machines(Topology.even(4), dict.fromkeys(("allreduce", "allgather", "alltoall"), links))
    dense = Method("dense", "allreduce", (Sending(1e8, (("allreduce", 1e8),)),))
    topk = Method("topk", "allgather", (Sending(1e8, (("allgather", 5e5),)),), 0.02, 0.01)
    compute = Compute(0.1, 0.2)
    text = as_text("resnet50", machines, compute, rank([dense, topk], machines, compute))
    header, first, second = text.splitlines()[-5:-2]
    assert header.split() == ["method", "collective", "bytes", "compress", "network", "exchange", "step", "speed-up"]
    # 3 payloads of 0.5 MB at 100 MB/s and 1 ms; and 1.5 gradients.
    assert " ".join(first.split()) == "topk allgather 0.50% 30.0 ms 16.0 ms 46.0 ms 346.0 ms 5.21×"
    assert " ".join(second.split()) == "dense allreduce 100.00% 0.0 ms 1501.0 ms 1501.0 ms 1801.0 ms 1.00×"
    assert text.splitlines()[-1].startswith("topk is best here")
    report = json.loads(as_json("resnet50", machines, None, rank([dense, topk], machines)))
    assert [each["method"] for each in report["methods"]] == ["topk", "dense"]
    assert report["methods"][0]["step_s"] is None
    assert report["networks"]["allgather"] == {"latency_s": 1e-3, "bytes_per_s": 1e8}
