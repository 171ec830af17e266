"""Hosts on one machine: network namespaces on a bridge, each link shaped to a rate, and Open MPI between them.

The processors are shared, so what this gives is the time on the wire, not more computing. Needs root. What was made
is removed when the context ends, whatever ends it; leftovers of a killed run are removed before the next begins.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

NETWORK = "10.77.0"
PREFIX = "gclab"
AGENT = Path(__file__).with_name("agent.sh")


class LabError(RuntimeError):
    """The lab cannot be set up here; the message says what is missing."""


@dataclass
class Hosts:
    """A context in which `count` hosts exist, each with a link of `rate` (as tc spells it: "100mbit", "1gbit")."""

    count: int
    rate: str

    def __enter__(self) -> Hosts:
        self._check()
        remove_leftovers()
        # Ctrl-C and SIGTERM become exceptions, so that __exit__ runs.
        self._previous = {each: signal.signal(each, _interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove_leftovers()
        for each, handler in self._previous.items():
            signal.signal(each, handler)

    def addresses(self) -> list[str]:
        """The hosts' addresses, host 1 first."""
        return [f"{NETWORK}.{number}" for number in range(1, self.count + 1)]

    def run(
        self, command: Sequence[str], per_host: int = 1, limit: float = 600, environment: dict[str, str] | None = None
    ) -> int:
        """Run `command` as `per_host` MPI ranks on each host, with this process's output; returns its exit status.

        Args:
            limit: seconds after which it is ended; the status is then 124.
            environment: variables for the ranks, besides those of this process.
        """
        places = ",".join(f"{address}:{per_host}" for address in self.addresses())
        subnet = f"{NETWORK}.0/24"
        mpirun = ["mpirun", "-np", str(self.count * per_host), "-H", places, "-bind-to", "none"]
        mpirun += ["-mca", "plm_rsh_agent", str(AGENT), "-mca", "plm_rsh_no_tree_spawn", "1"]
        mpirun += ["-mca", "pml", "ob1", "-mca", "btl", "tcp,self" + (",vader" if per_host > 1 else "")]
        mpirun += ["-mca", "btl_tcp_if_include", subnet, "-mca", "oob_tcp_if_include", subnet]
        mpirun += ["-mca", "mpi_yield_when_idle", "1"]
        variables = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
        variables |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": "30", **(environment or {})}
        for name, value in variables.items():
            mpirun += ["-x", f"{name}={value}"]
        for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
            if name in os.environ:
                mpirun += ["-x", name]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        enter = ["ip", "netns", "exec", f"{PREFIX}1", "unshare", "--uts"]
        first = [*enter, "sh", "-c", f'hostname {self.addresses()[0]}; exec "$@"', "sh"]
        process = subprocess.Popen(
            [*first, *mpirun, *command], env={**os.environ, **root}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _check(self) -> None:
        if not re.fullmatch(r"\d+(\.\d+)?[kmg]?bit", self.rate):
            raise LabError(f"the rate {self.rate!r} is not one that tc reads; examples: 100mbit, 1gbit")
        if not 1 <= self.count <= 64:
            raise LabError(f"{self.count} hosts cannot be made; expected 1 to 64")
        if os.geteuid() != 0:
            raise LabError("the lab makes network namespaces and must run as root (for example with sudo)")
        for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("mpirun", "openmpi-bin")):
            if not shutil.which(program):
                raise LabError(f"{program!r} is not installed; on Debian: apt-get install {package}")

    def _build(self) -> None:
        _do(f"ip link add {PREFIX} type bridge")
        _do(f"ip link set {PREFIX} up")
        shape = f"root tbf rate {self.rate} burst 256kb latency 20ms"
        for number, address in enumerate(self.addresses(), start=1):
            host, port = f"{PREFIX}{number}", f"{PREFIX}p{number}"
            _do(f"ip netns add {host}")
            _do(f"ip link add {port} type veth peer name eth0 netns {host}")
            _do(f"ip link set {port} master {PREFIX} up")
            _do(f"ip -n {host} addr add {address}/24 dev eth0")
            _do(f"ip -n {host} link set eth0 up")
            _do(f"ip -n {host} link set lo up")
            # Both ends, so that sending and receiving are limited each.
            _do(f"tc qdisc add dev {port} {shape}")
            _do(f"tc -n {host} qdisc add dev eth0 {shape}")


def remove_leftovers() -> None:
    """Remove all namespaces, with what runs in them, and the bridge."""
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for host in re.findall(rf"^({PREFIX}\d+)\b", listing, re.MULTILINE):
        for process in subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split():
            subprocess.run(["kill", "-9", process], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "netns", "del", host])
    # Links go with their namespaces, but not at once: the next lab would find their names taken.
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    for name in [*re.findall(rf"\b({PREFIX}p\d+)@", links), PREFIX]:
        subprocess.run(["ip", "link", "del", name], stderr=subprocess.DEVNULL)


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"`{command}` failed: {done.stderr.strip()}; a kernel with network namespaces and tbf is needed")


def _interrupt(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
