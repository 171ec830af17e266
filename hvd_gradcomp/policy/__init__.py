"""What is decided about an exchange: how much is sent as training goes on, what it costs, and which one is best.

Numbers only: nothing is measured or sent here.
"""

from hvd_gradcomp.policy.accordion import Accordion
from hvd_gradcomp.policy.auto import Auto
from hvd_gradcomp.policy.base import Observed, Policy, State
from hvd_gradcomp.policy.gravac import GraVAC
from hvd_gradcomp.policy.schedules import ByEpoch, ByFunction, Exponential, Piecewise, Schedule

__all__ = [
    "Accordion",
    "Auto",
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
