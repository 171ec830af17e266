"""What a worker keeps of the gradients that it did not send, and how it comes back into the next ones."""

from hvd_gradcomp.feedback.memory import ErrorFeedback, Memory, NoMemory
from hvd_gradcomp.feedback.momentum import Momentum, MomentumCorrection
from hvd_gradcomp.feedback.residuals import mean_residuals, policy_from, residuals_from
from hvd_gradcomp.feedback.shares import whole_parts

__all__ = [
    "ErrorFeedback",
    "Memory",
    "Momentum",
    "MomentumCorrection",
    "NoMemory",
    "mean_residuals",
    "policy_from",
    "residuals_from",
    "whole_parts",
]
