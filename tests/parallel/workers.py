"""How many workers this job has, before Horovod has started."""

from __future__ import annotations

import os

WORKERS = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
