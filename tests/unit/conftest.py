"""Settings and fixtures of the one-process tests; helpers with names of their own are in the modules beside."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch
from arrays import BACKENDS
from hypothesis import Phase

from hvd_gradcomp.ops import Ops, backend

# The same examples in every run, so that a change and not the dice makes a test fail, and no search for a smaller
# example, which may take minutes. To look for new examples and small ones: HYPOTHESIS_PROFILE=explore pytest tests/unit
hypothesis.settings.register_profile(
    "same", derandomize=True, deadline=None, database=None, phases=(Phase.explicit, Phase.generate)
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=300, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Simulated workers are threads of this process already.
torch.set_num_threads(1)


@pytest.fixture(params=BACKENDS, scope="session")
def ops(request: pytest.FixtureRequest) -> Ops:
    """The primitives of each backend in turn."""
    return backend(request.param)
