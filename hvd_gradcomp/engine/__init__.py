"""The one path of a gradient, the same for every framework: residual, compressor, collective, decode, average."""

from hvd_gradcomp.engine.buckets import Bucket, Parameter, plan_buckets
from hvd_gradcomp.engine.engine import Engine

__all__ = ["Bucket", "Engine", "Parameter", "plan_buckets"]
