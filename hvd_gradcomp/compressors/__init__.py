"""The algorithms, one family a file, written once against `ops`; no framework is imported here."""

from hvd_gradcomp.compressors.adaptive import Accordion, Adaptive, Auto, GraVAC, Scheduled
from hvd_gradcomp.compressors.base import Compressor, Context
from hvd_gradcomp.compressors.calibrated import Calibrated
from hvd_gradcomp.compressors.cast import BF16, FP16, NoCompression
from hvd_gradcomp.compressors.chain import Chain, Sparsifier, ValueCode
from hvd_gradcomp.compressors.dgc import DGC
from hvd_gradcomp.compressors.int8 import Int8
from hvd_gradcomp.compressors.linear import Linear
from hvd_gradcomp.compressors.names import Compression
from hvd_gradcomp.compressors.natural import Natural
from hvd_gradcomp.compressors.nonuniform import Dynamic8
from hvd_gradcomp.compressors.powersgd import PowerSGD
from hvd_gradcomp.compressors.qsgd import QSGD
from hvd_gradcomp.compressors.randomk import RandomK
from hvd_gradcomp.compressors.rules import Rule, Rules
from hvd_gradcomp.compressors.shared_terngrad import SharedTernGrad
from hvd_gradcomp.compressors.signs import OneBit, ScaledSign, Sign
from hvd_gradcomp.compressors.sketch import CountSketch
from hvd_gradcomp.compressors.spec import compression_from_spec, register_spec
from hvd_gradcomp.compressors.terngrad import TernGrad
from hvd_gradcomp.compressors.threshold import Threshold
from hvd_gradcomp.compressors.topk import TopK, TopKInt8

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "QSGD",
    "Accordion",
    "Adaptive",
    "Auto",
    "Calibrated",
    "Chain",
    "Compression",
    "Compressor",
    "Context",
    "CountSketch",
    "Dynamic8",
    "GraVAC",
    "Int8",
    "Linear",
    "Natural",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "Rule",
    "Rules",
    "ScaledSign",
    "Scheduled",
    "SharedTernGrad",
    "Sign",
    "Sparsifier",
    "TernGrad",
    "Threshold",
    "TopK",
    "TopKInt8",
    "ValueCode",
    "compression_from_spec",
    "register_spec",
]
