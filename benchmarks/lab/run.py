"""Run a command on hosts of the lab:

sudo .venv/bin/python benchmarks/lab/run.py --hosts 4 --rate 1gbit -- python examples/train.py --epochs 2
"""

from __future__ import annotations

import argparse
import sys

from hosts import Hosts, LabError


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a command as MPI ranks on hosts with shaped links.")
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts (default: %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc spells it (default: %(default)s)")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=600, help="seconds to run at most (default: %(default)s)")
    parser.add_argument("command", nargs="+", help="after --: the command and its arguments")
    arguments = parser.parse_args()
    try:
        with Hosts(arguments.hosts, arguments.rate) as hosts:
            sys.exit(hosts.run(arguments.command, arguments.per_host, arguments.limit))
    except LabError as error:
        sys.exit(f"lab: {error}")


if __name__ == "__main__":
    main()
