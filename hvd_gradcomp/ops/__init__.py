"""Array primitives, one class a framework, imported only when an array of that framework arrives.

Everything above this room is written against `Ops`, and so runs on numpy, torch and TensorFlow without knowing which.
The numpy class is the reference: the others must give the same bytes for the same input.
"""

from hvd_gradcomp.ops.base import Array, Corrected, Ops
from hvd_gradcomp.ops.registry import backend, ops_for

__all__ = ["Array", "Corrected", "Ops", "backend", "ops_for"]
