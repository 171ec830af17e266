"""What goes wrong in a job is found soon, and said on every worker. These tests launch jobs of their own.

One job goes through all scenarios that leave Horovod working; a worker that dies ends its job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
from launching import environment

pytestmark = pytest.mark.timeout(2 * 180)

WORKERS = 3
#: Within these seconds every worker has to know.
LIMIT = 10
#: What a job may take in all before it counts as hanging.
JOB_LIMIT = 150

#: Scenarios in which the last worker differs -> what the others are told.
DIFFERENCES = {
    "ratios_differ": r"rank 2 has compression = .*ratio=0.02",
    "one_adds": "rank 2 has compression = 'fp16'",
    "thresholds_differ": r"rank 2 has .*dense_below=2000",
    "one_threshold_is_above_everything": r"rank 2 has .*dense_below=1000000",
    "operations_differ": "rank 2 has op = 'sum'",
    "groups_differ": "rank 2 has buckets",
    "shapes_differ": "rank 2 has buckets",
    "one_lacks_a_parameter": "rank 2 has buckets",
}
#: Scenarios -> the ranks with a compression of Horovod's own.
STOCK = {"one_is_stock": {2}, "all_but_one_are_stock": {0, 1}, "one_sends_all": set()}
CORRUPT = ("corrupt_payload", "short_payload")
JOIN_WORKS = ("join_fp16", "join_none")
# Jobs of their own: what errors leave waiting in Horovod would seem to be complete when a worker joins.
JOBS = (
    [*JOIN_WORKS, "join_before_allreduce"],
    [*DIFFERENCES, "layouts_differ", *STOCK, *CORRUPT, "all_is_well"],
)

#: Lets four workers of this machine act as two nodes of two.
TWO_NODES = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HVD_GRADCOMP_NODES": "2,2"}

Outcomes = dict[str, list[dict[str, Any]]]


def launch(
    scenarios: list[str], folder: Path, over: str, workers: int = WORKERS, outlived: bool = False, **variables: str
) -> tuple[int, Outcomes]:
    """Run scenarios; the launcher's status, and how each ended on each worker ({} where it could not say).

    What the job has printed is in `folder / "log"`. With `outlived` the launcher hears of a worker's death only when
    all have come to an end.
    """
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), f"--{over}", "-np", str(workers)]
    script = str(Path(__file__).with_name("scenarios.py"))
    if outlived:
        horovodrun += [sys.executable, str(Path(__file__).with_name("outlived.py")), str(folder), str(workers)]
    log = folder / "log"
    status = -1
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*horovodrun, sys.executable, script, str(folder), *scenarios],
            env={**environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=JOB_LIMIT)
        except subprocess.TimeoutExpired:
            # Workers that hang are not ended by the launcher's end alone.
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            subprocess.run(["pkill", "-KILL", "-f", f"{script} {folder}"], check=False)
            process.kill()
            process.wait(timeout=10)
    print(log.read_text(errors="replace")[-6000:])
    found = {
        name: [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        for name in scenarios
        for paths in [[folder / f"{name}-{rank}.json" for rank in range(workers)]]
    }
    return status, found


LAUNCHERS = ["mpi", "gloo"] if hvd.mpi_built() else ["gloo"]


@pytest.fixture(scope="module", params=LAUNCHERS)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    found: Outcomes = {}
    for all_scenarios in JOBS:
        status, ended = launch(all_scenarios, tmp_path_factory.mktemp(request.param), request.param)
        assert status != -1, f"a job with {all_scenarios} did not end by itself"
        found |= ended
    return found


def assert_failed(outcome: dict[str, Any], error: str, message: str) -> None:
    assert outcome, "this worker did not come to an end"
    assert outcome["error"] == error, outcome
    assert re.search(message, outcome["message"]), outcome["message"]
    assert outcome["seconds"] < LIMIT


@pytest.mark.parametrize("scenario", DIFFERENCES)
def test_settings_that_differ_are_named_on_every_worker(scenario: str, outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes[scenario]):
        # Each worker names those that differ from itself.
        assert_failed(outcome, "ConfigurationError", DIFFERENCES[scenario] if rank != 2 else "rank 0 has .*rank 1 has")


def test_layouts_that_differ_are_an_error_on_every_worker(outcomes: Outcomes) -> None:
    for outcome in outcomes["layouts_differ"]:
        assert_failed(outcome, "ConfigurationError", r"layouts_differ\.table.* sparse on some workers")


@pytest.mark.parametrize("scenario", STOCK)
def test_a_worker_that_does_not_compress_is_an_error_on_every_worker(scenario: str, outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes[scenario]):
        if rank in STOCK[scenario]:
            assert_failed(outcome, "HorovodInternalError", "Mismatched")
        else:
            assert_failed(outcome, "ConfigurationError", r"Mismatched.*Some worker does not compress")


@pytest.mark.parametrize("scenario", CORRUPT)
def test_a_corrupt_payload_names_the_rank_on_every_worker(scenario: str, outcomes: Outcomes) -> None:
    for outcome in outcomes[scenario]:
        assert_failed(outcome, "PayloadError", "rank 1 sent")


def test_an_allreduce_of_payloads_after_a_join_is_an_error(outcomes: Outcomes) -> None:
    """For the workers that go on; the one that has joined goes on when they have joined too."""
    for outcome in outcomes["join_before_allreduce"][:2]:
        assert_failed(outcome, "UnsupportedError", "no process set holds exactly")
    assert outcomes["join_before_allreduce"][2].get("error") == ""


@pytest.mark.parametrize("over", LAUNCHERS)
def test_a_join_where_payloads_are_gathered_ends_the_job(over: str, tmp_path: Path) -> None:
    """The worker that calls it is told why, before it joins; its end is that of the others, who wait for nothing."""
    started = time.monotonic()
    status, outcomes = launch(["join_gather"], tmp_path, over)
    assert time.monotonic() - started < JOB_LIMIT
    assert status not in (0, -1)
    *others, joins = outcomes["join_gather"]
    assert_failed(joins, "UnsupportedError", r"hvd\.join\(\) was called .* payloads of topk")
    for outcome in others:
        # The launcher may end them first.
        assert outcome.get("error", "HorovodInternalError") == "HorovodInternalError"


@pytest.mark.parametrize("scenario", [*JOIN_WORKS, "all_is_well"])
def test_join_works_where_horovod_adds(scenario: str, outcomes: Outcomes) -> None:
    assert [outcome.get("error") for outcome in outcomes[scenario]] == ["", "", ""]


@pytest.mark.parametrize(("scenario", "over"), [("killed", LAUNCHERS[0]), ("left", LAUNCHERS[-1])])
def test_a_worker_that_dies_in_the_middle_of_a_step_ends_the_job(scenario: str, over: str, tmp_path: Path) -> None:
    started = time.monotonic()
    status, outcomes = launch([scenario], tmp_path, over)
    assert time.monotonic() - started < JOB_LIMIT
    assert status != 0
    assert not any(outcome.get("error") == "" for outcome in outcomes[scenario]), "a worker went on without the others"


@pytest.mark.parametrize("collective", ["scatter_reduce", "hierarchical"])
def test_a_worker_that_dies_between_two_rounds_ends_the_others_by_an_error_of_horovod(
    collective: str, tmp_path: Path
) -> None:
    scenario = f"killed_{collective}"
    status, outcomes = launch([scenario], tmp_path, "gloo", workers=4, outlived=True, **TWO_NODES)
    assert status not in (-1, 0)
    *others, dead = outcomes[scenario]
    assert not dead
    said = re.findall(r"\[(\d)\]: Horovod background loop uncaught exception", (tmp_path / "log").read_text())
    assert set(said) == {"0", "1", "2"}
    for outcome in others:
        # With more than one process set Horovod ends the process after that, as it does without this package.
        if outcome or collective == "scatter_reduce":
            assert_failed(outcome, "HorovodInternalError", "")


@pytest.mark.skipif("mpi" not in LAUNCHERS, reason="Horovod was built without MPI")
@pytest.mark.parametrize("collective", ["scatter_reduce", "hierarchical"])
def test_a_worker_that_dies_between_two_rounds_ends_the_job_over_mpi(collective: str, tmp_path: Path) -> None:
    """mpirun ends the others, which would not notice: MPI does not say that a worker is gone."""
    scenario = f"killed_{collective}"
    status, outcomes = launch([scenario], tmp_path, "mpi", workers=4, **TWO_NODES)
    assert status not in (-1, 0)
    assert not any(outcome.get("error") == "" for outcome in outcomes[scenario]), "a worker went on without the others"


@pytest.mark.parametrize("launcher", [[], ["horovodrun", "--gloo", "-np", "1"]], ids=["alone", "horovodrun"])
def test_one_worker_trains_as_without_horovod(launcher: list[str]) -> None:
    script = str(Path(__file__).with_name("one_worker.py"))
    finished = subprocess.run(
        [*launcher, sys.executable, script], env=environment(), capture_output=True, text=True, timeout=JOB_LIMIT
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "one worker: fine" in finished.stdout


def test_import_without_registration() -> None:
    """HVD_GRADCOMP_REGISTER=0 leaves Horovod's classes alone; the package's own optimizer works all the same."""
    script = """
import horovod.torch as hvd
from horovod.torch import optimizer as stock
before = dict(vars(stock._DistributedOptimizer)), dict(vars(stock._DistributedAdasumOptimizer))
import hvd_gradcomp.torch as hg
import torch
hvd.init()
model = torch.nn.Linear(50, 40)
optimizer = hg.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), compression=hg.TopKInt8)
assert hg.counters(optimizer).total.sent_bytes == 0
assert before == (dict(vars(stock._DistributedOptimizer)), dict(vars(stock._DistributedAdasumOptimizer)))
hg.register()
assert before[0] != dict(vars(stock._DistributedOptimizer))
"""
    finished = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment(), "HVD_GRADCOMP_REGISTER": "0"},
        capture_output=True,
        text=True,
        timeout=JOB_LIMIT,
    )
    assert finished.returncode == 0, finished.stderr
