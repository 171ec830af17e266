"""Runs a worker of a job and outlives it: `horovodrun --gloo ... python outlived.py FOLDER WORKERS COMMAND...`.

horovodrun ends all workers within seconds of the death of one, whether or not they have noticed it themselves. For
tests of what they notice, this process stands in for the dead one until all others have come to an end as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

#: Seconds after which the launcher may do what it does.
PATIENCE = 60


def main() -> int:
    folder, workers, *command = sys.argv[1:]
    status = subprocess.run(command, check=False).returncode
    (Path(folder) / f"ended-{os.environ['HOROVOD_RANK']}").touch()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and len(list(Path(folder).glob("ended-*"))) < int(workers):
        time.sleep(0.1)
    return status


if __name__ == "__main__":
    sys.exit(main())
