"""Progress of a training: a bar where somebody watches, a line for each epoch where the output is kept."""

from __future__ import annotations

import os
import sys
import time

import psutil

_LAUNCHERS = {"horovodrun", "mpirun", "mpiexec", "orterun", "prterun", "orted", "prted"}
_WIDTH = 30


class Progress:
    """Shows how far a training is.

    Args:
        epochs: how many there are.
        steps: how many there are in an epoch.
        label: what is being trained.
        shown: false on the workers that should stay silent.
    """

    def __init__(self, epochs: int, steps: int, label: str, shown: bool) -> None:
        self._epochs = epochs
        self._steps = steps
        self._label = label
        self._shown = shown
        self._bar = shown and output_is_terminal()
        self._done = 0
        self._epoch_loss = 0.0
        self._drawn = 0.0

    def step(self, loss: float) -> None:
        """Count one step of training."""
        self._done += 1
        self._epoch_loss += loss
        epoch, step = divmod(self._done - 1, self._steps)
        last = step + 1 == self._steps
        text = f"epoch {epoch + 1}/{self._epochs}  loss {self._epoch_loss / (step + 1):.4f}"
        if last:
            self._epoch_loss = 0.0
        if self._bar and (last or time.monotonic() > self._drawn + 0.1):
            self._draw(text)
        elif self._shown and last and not self._bar:
            print(f"{self._label}  {text}", flush=True)

    def _draw(self, text: str) -> None:
        self._drawn = time.monotonic()
        finished = self._done == self._epochs * self._steps
        filled = _WIDTH * self._done // (self._epochs * self._steps)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        # The carriage return stands at the end, and all is one write: launchers put their prefix before each piece.
        sys.stdout.write(f"{self._label}  [{bar}]  {text:<32}" + ("\n" if finished else "\r"))
        sys.stdout.flush()


def output_is_terminal() -> bool:
    """Whether a person sees this process's output at once.

    Under a launcher, stdout leads to the launcher: a pipe with Gloo, a pseudo-terminal with Open MPI, whatever the
    user has at the other end. So the launcher's own stdout is looked at (on Linux; elsewhere the answer is no).
    """
    launcher = None
    for parent in psutil.Process().parents():
        if parent.name() in _LAUNCHERS:
            launcher = parent.pid
    if launcher is None:
        return sys.stdout.isatty()
    try:
        return os.readlink(f"/proc/{launcher}/fd/1").startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
    except OSError:
        return False
