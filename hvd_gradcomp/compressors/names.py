"""`Compression`: the methods under Horovod-style names, beside `hvd.Compression.fp16`."""

from __future__ import annotations

from hvd_gradcomp.compressors.adaptive import Accordion, Auto, GraVAC
from hvd_gradcomp.compressors.calibrated import Calibrated
from hvd_gradcomp.compressors.cast import BF16, FP16, NoCompression
from hvd_gradcomp.compressors.dgc import DGC
from hvd_gradcomp.compressors.int8 import Int8
from hvd_gradcomp.compressors.linear import Linear
from hvd_gradcomp.compressors.natural import Natural
from hvd_gradcomp.compressors.nonuniform import Dynamic8
from hvd_gradcomp.compressors.powersgd import PowerSGD
from hvd_gradcomp.compressors.qsgd import QSGD
from hvd_gradcomp.compressors.randomk import RandomK
from hvd_gradcomp.compressors.shared_terngrad import SharedTernGrad
from hvd_gradcomp.compressors.signs import OneBit, ScaledSign, Sign
from hvd_gradcomp.compressors.sketch import CountSketch
from hvd_gradcomp.compressors.terngrad import TernGrad
from hvd_gradcomp.compressors.threshold import Threshold
from hvd_gradcomp.compressors.topk import TopK, TopKInt8


class Compression:
    """The names that specs use, as attributes: `Compression.topk_int8`, or `Compression.powersgd(rank=4)`.

    Each is the class of that method, which stands for an instance with all defaults wherever Horovod takes
    `compression=`. They compose as everywhere: `Compression.dgc(ratio=0.001) >> Compression.fp16`.
    """

    none = NoCompression
    fp16 = FP16
    bf16 = BF16
    int8 = Int8
    linear = Linear
    calibrated = Calibrated
    dynamic8 = Dynamic8
    natural = Natural
    qsgd = QSGD
    terngrad = TernGrad
    terngrad_shared = SharedTernGrad
    sign = Sign
    scaled_sign = ScaledSign
    onebit = OneBit
    topk = TopK
    topk_int8 = TopKInt8
    randomk = RandomK
    threshold = Threshold
    dgc = DGC
    powersgd = PowerSGD
    sketch = CountSketch
    gravac = GraVAC
    accordion = Accordion
    auto = Auto
