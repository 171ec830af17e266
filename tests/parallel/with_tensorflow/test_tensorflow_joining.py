"""`hvd.join()` is refused where payloads are gathered, before Horovod hears of it."""

from __future__ import annotations

import horovod.tensorflow as hvd
import pytest
from known_gradients import gradients
from tensorflow_workers import assert_same_everywhere, reduced, variables

from hvd_gradcomp.tensorflow import TopKInt8, UnsupportedError


def test_join_is_refused_and_training_goes_on() -> None:
    own = variables()
    reduced(own, gradients(0, hvd.rank()), TopKInt8)
    for join in (hvd.join, hvd.mpi_ops.join):
        with pytest.raises(UnsupportedError, match=r"hvd\.join\(\) was called .*same number of batches"):
            join()
    assert_same_everywhere(list(reduced(own, gradients(1, hvd.rank()), TopKInt8).values()))
