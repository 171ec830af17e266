"""The command `hvd-gradcomp`: what it can do, and its arguments. Each command is in a file of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hvd_gradcomp.cli import plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hvd-gradcomp", description="Gradient compression for Horovod.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan.add_arguments(commands.add_parser("plan", help=plan.SUMMARY, description=plan.DESCRIPTION))
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status
