"""The door for PyTorch: compressors that `horovod.torch` accepts wherever it takes `compression=`.

    import horovod.torch as hvd
    from hvd_gradcomp.torch import TopKInt8
    optimizer = hvd.DistributedOptimizer(optimizer, compression=TopKInt8)

Importing this module registers the compressors with Horovod (see `register`); no file of Horovod is changed. Set
HVD_GRADCOMP_REGISTER=0 to import it without, and use its own `DistributedOptimizer` instead.
"""

from __future__ import annotations

import os

from hvd_gradcomp.compressors import (
    BF16,
    DGC,
    FP16,
    QSGD,
    Accordion,
    Adaptive,
    Auto,
    Calibrated,
    Chain,
    Compression,
    Compressor,
    CountSketch,
    Dynamic8,
    GraVAC,
    Int8,
    Linear,
    Natural,
    NoCompression,
    OneBit,
    PowerSGD,
    RandomK,
    Rule,
    Rules,
    ScaledSign,
    Scheduled,
    SharedTernGrad,
    Sign,
    TernGrad,
    Threshold,
    TopK,
    TopKInt8,
    compression_from_spec,
    register_spec,
)
from hvd_gradcomp.errors import ConfigurationError, GradcompError, NonFiniteError, PayloadError, UnsupportedError
from hvd_gradcomp.feedback import ErrorFeedback, Momentum, MomentumCorrection, NoMemory
from hvd_gradcomp.policy import ByEpoch, ByFunction, Exponential, Piecewise
from hvd_gradcomp.policy.local_steps import PostLocal
from hvd_gradcomp.torch.allreduce import Tokens
from hvd_gradcomp.torch.checkpoint import load_residual_state_dict, residual_state_dict
from hvd_gradcomp.torch.local_sgd import DiLoCo, LocalSGD
from hvd_gradcomp.torch.optimizer import DistributedOptimizer, counters, policy_report, register, unregister

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "QSGD",
    "Accordion",
    "Adaptive",
    "Auto",
    "ByEpoch",
    "ByFunction",
    "Calibrated",
    "Chain",
    "Compression",
    "Compressor",
    "ConfigurationError",
    "CountSketch",
    "DiLoCo",
    "DistributedOptimizer",
    "Dynamic8",
    "ErrorFeedback",
    "Exponential",
    "GraVAC",
    "GradcompError",
    "Int8",
    "Linear",
    "LocalSGD",
    "Momentum",
    "MomentumCorrection",
    "Natural",
    "NoCompression",
    "NoMemory",
    "NonFiniteError",
    "OneBit",
    "PayloadError",
    "Piecewise",
    "PostLocal",
    "PowerSGD",
    "RandomK",
    "Rule",
    "Rules",
    "ScaledSign",
    "Scheduled",
    "SharedTernGrad",
    "Sign",
    "TernGrad",
    "Threshold",
    "TopK",
    "TopKInt8",
    "UnsupportedError",
    "compression_from_spec",
    "counters",
    "load_residual_state_dict",
    "policy_report",
    "register",
    "register_spec",
    "residual_state_dict",
    "unregister",
]

Tokens.install()
if os.environ.get("HVD_GRADCOMP_REGISTER", "1") != "0":
    register()
