"""What changes while training runs: how much is sent, decided alike on all workers. Numbers only, no arrays."""

from hvd_gradcomp.policy.accordion import Accordion
from hvd_gradcomp.policy.base import Observed, Policy, State
from hvd_gradcomp.policy.gravac import GraVAC
from hvd_gradcomp.policy.schedules import ByEpoch, ByFunction, Exponential, Piecewise, Schedule

__all__ = [
    "Accordion",
    "ByEpoch",
    "ByFunction",
    "Exponential",
    "GraVAC",
    "Observed",
    "Piecewise",
    "Policy",
    "Schedule",
    "State",
]
