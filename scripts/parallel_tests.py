"""Run tests/parallel with pytest inside horovodrun: 2 and 4 workers, over MPI and over Gloo.

Each folder of tests runs in a launch of its own: Horovod has a core for each framework, and two cores in a process that
both run over Gloo are slow and hang now and then.

Every worker runs the same pytest command and writes to a file of its own. Rank 0's output is shown as it comes; of the
other workers, only those that failed are shown, in full, when the run is over. Nothing here can hang: pytest-timeout
ends a process whose test sits in a collective for too long, and a run as a whole has a limit as well.

What this script does not do: run the tests of one process (plain pytest does).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# How long a worker that has failed waits for the others to finish, so that the launcher, which stops all workers as
# soon as one fails, does not cut their reports short.
GRACE_SECONDS = 10


@dataclass(frozen=True)
class Run:
    """One launch of all the tests."""

    workers: int
    launcher: str  # "mpi" or "gloo"
    tests: str

    def __str__(self) -> str:
        over = "MPI" if self.launcher == "mpi" else "Gloo"
        return f"{self.workers} workers over {over}, {Path(self.tests).stem}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--np", type=int, action="append", help="number of workers, may be repeated (default: 2 and 4)")
    parser.add_argument("--over", choices=("mpi", "gloo"), action="append", help="may be repeated (default: both)")
    parser.add_argument("--tests", action="append", help="folder or file, may be repeated (default: all)")
    parser.add_argument("--test-timeout", type=float, default=60, help="seconds for a test (default: %(default)s)")
    parser.add_argument("--run-timeout", type=float, default=900, help="seconds for a run (default: %(default)s)")
    parser.add_argument("pytest", nargs="*", help="after --: more arguments for pytest")
    arguments = parser.parse_args()

    launchers = arguments.over or ["mpi", "gloo"]
    if "mpi" in launchers and not built_with_mpi():
        say("SKIPPED: all runs over MPI, because this Horovod was built without it (no Open MPI when it was built)")
        launchers.remove("mpi")
    tests = arguments.tests or sorted(str(path) for path in Path("tests/parallel").glob("with_*"))
    sizes = arguments.np or [2, 4]
    runs = [Run(workers, over, each) for over in launchers for workers in sizes for each in tests]

    command = ["-v", f"--timeout={arguments.test_timeout}", "--timeout-method=thread"]
    # The workers share a folder: none may keep pytest's cache there.
    command += ["-p", "no:cacheprovider", *arguments.pytest]
    results = {run: execute(run, command, arguments.run_timeout) for run in runs}

    for run, problem in results.items():
        say(f"{run}: {problem or 'passed'}")
    if not results or any(results.values()):
        sys.exit(1)


def say(text: str) -> None:
    print(f"parallel_tests: {text}", flush=True)


def built_with_mpi() -> bool:
    question = "import horovod.torch as hvd, sys; sys.exit(not hvd.mpi_built())"
    return subprocess.run([sys.executable, "-c", question]).returncode == 0


def execute(run: Run, pytest_arguments: list[str], limit: float) -> str:
    """Launch one run and show its output; returns what went wrong, or an empty text."""
    pytest_arguments = [run.tests, *pytest_arguments]
    say(f"{run}: pytest {' '.join(pytest_arguments)}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="parallel_tests-") as folder_name:
        folder = Path(folder_name)
        horovodrun = [str(Path(sys.executable).with_name("horovodrun")), f"--{run.launcher}", "-np", str(run.workers)]
        worker = [sys.executable, str(Path(__file__).resolve()), "--worker", folder_name, str(run.workers)]
        launcher_log = folder / "launcher.log"
        with launcher_log.open("wb") as sink:
            # A process group of its own, so that the launcher and all workers can be ended together.
            process = subprocess.Popen(
                [*horovodrun, *worker, *pytest_arguments],
                env=worker_environment(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            problem = follow(process, folder, started + limit)
        seconds = time.monotonic() - started

        failed = [rank for rank in range(run.workers) if exit_status(folder, rank) != "0"]
        for rank in failed:
            log = folder / f"rank-{rank}.log"
            if rank > 0 and log.exists():
                say(f"{run}: output of rank {rank}, {describe_status(exit_status(folder, rank))}:")
                print(log.read_text(errors="replace"), flush=True)
        if failed or problem or process.returncode:
            say(f"{run}: what the launcher said:")
            print(launcher_log.read_text(errors="replace"), flush=True)
        if not problem and failed:
            problem = "; ".join(f"rank {rank} {describe_status(exit_status(folder, rank))}" for rank in failed)
        if not problem and process.returncode:
            problem = f"every rank passed, but horovodrun ended with status {process.returncode}"
        say(f"{run}: {'FAILED, ' + problem if problem else 'passed'} after {seconds:.0f} s")
        return f"FAILED, {problem}" if problem else ""


def worker_environment() -> dict[str, str]:
    """The environment of launcher and workers; what the caller has set wins."""
    defaults = {
        # One thread a worker: tests run more workers than there are cores.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # An idle MPI process that does not yield takes its core away from the worker that it waits for.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Gloo's 30 seconds are not enough where workers wait for a core; a test has a limit of its own.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
        # Name the tensor that a worker waits for, well before its test runs out of time.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
        "PYTHONUNBUFFERED": "1",
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**defaults, **os.environ, "PATH": path}


def follow(process: subprocess.Popen[bytes], folder: Path, deadline: float) -> str:
    """Show rank 0's output as it grows until the launcher ends; end it at the deadline and say so."""
    log = folder / "rank-0.log"
    position = 0
    problem = ""
    while True:
        ended = process.poll() is not None  # asked before reading: what comes after the end of a process is nothing
        if log.exists():
            with log.open("rb") as source:
                source.seek(position)
                piece = source.read()
            position += len(piece)
            sys.stdout.write(piece.decode(errors="replace"))
            sys.stdout.flush()
        if ended:
            return problem
        if time.monotonic() > deadline:
            problem = "it ran past its time limit and was ended"
            end(process, [int(path.read_text()) for path in folder.glob("rank-*.pid")])
        time.sleep(0.2)


def end(process: subprocess.Popen[bytes], workers: list[int]) -> None:
    """End all workers, first in the way that lets them say where they are, and their launcher."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, sign)
        time.sleep(1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def exit_status(folder: Path, rank: int) -> str:
    path = folder / f"rank-{rank}.status"
    return path.read_text() if path.exists() else ""


def describe_status(status: str) -> str:
    if not status:
        return "did not finish (out of time, crashed, or ended by the launcher)"
    return {"0": "passed", "1": "has failed tests", "5": "found no tests"}.get(status, f"ended with pytest's {status}")


def work(folder: Path, workers: int, pytest_arguments: list[str]) -> None:
    """Be one worker: pytest, with everything that this process prints in the file of its rank."""
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    write_whole(folder / f"rank-{rank}.pid", str(os.getpid()))
    # The launcher ends the others when one worker fails: let them say where they were. Into the file itself, because
    # pytest points the descriptors 1 and 2 elsewhere while a test runs.
    faulthandler.register(signal.SIGTERM, file=log, chain=True)

    import pytest  # after the redirection, so that a failing import is in the log

    status = int(pytest.main(pytest_arguments))
    sys.stdout.flush()
    faulthandler.unregister(signal.SIGTERM)
    write_whole(folder / f"rank-{rank}.status", str(status))
    if status:
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and len(list(folder.glob("rank-*.status"))) < workers:
            time.sleep(0.1)
    sys.exit(status)


def write_whole(path: Path, text: str) -> None:
    """Write a file that others wait for: they see nothing or all of it."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(text)
    draft.rename(path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        main()
