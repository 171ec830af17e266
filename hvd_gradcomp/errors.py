"""The errors a user of this package can meet; each message says what was given, what was expected and what to do."""

from __future__ import annotations


class GradcompError(Exception):
    """Base of all errors raised by hvd_gradcomp."""


class PayloadError(GradcompError):
    """A payload's bytes are not what a worker of this job could have sent (corrupt, truncated, another format)."""


class ConfigurationError(GradcompError, ValueError):
    """Options that cannot work, or that differ between the workers."""


class NonFiniteError(GradcompError, ValueError):
    """A compressor was handed NaN or infinity."""


class UnsupportedError(GradcompError, RuntimeError):
    """The operation exists in Horovod but has no meaning with this compressor."""
