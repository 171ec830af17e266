"""Gradient compression for Horovod: compressors, error feedback and compressed exchange.

Import the door of your framework: `hvd_gradcomp.torch`. This module imports no framework.
"""

__version__ = "0.1.0"
