"""All tensors of a step at once: the large ones by a compressor, the small ones whole. For doors that have no hooks.

Tensors below `dense_below` would lose more time to coding than they save in bytes. Where Horovod's optimizer is behind
a door it fuses them itself; here they share the buckets of a second engine that sends everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_gradcomp.collectives import Transport
from hvd_gradcomp.compressors import Compressor, NoCompression
from hvd_gradcomp.engine.buckets import Parameter
from hvd_gradcomp.engine.engine import Engine
from hvd_gradcomp.errors import ConfigurationError
from hvd_gradcomp.ops import Array, ops_for
from hvd_gradcomp.telemetry import Counters


class Reduction:
    """The exchange of a fixed set of tensors.

    Args:
        compressor: for tensors that it takes.
        parameters: what, in the same order on all workers.
        transport: among whom.
        average: divide the sum by the number of workers.
        options: see `Engine`.
        scope: see `Engine`.

    Attributes:
        large: the engine of the tensors that are compressed; the state of error feedback is in it.
        small: the engine of all others.
        counters: of both, by bucket.
    """

    def __init__(
        self,
        compressor: Compressor,
        parameters: Sequence[Parameter],
        transport: Transport,
        *,
        average: bool = True,
        options: Mapping[str, object] | None = None,
        scope: str = "",
    ) -> None:
        taken = [each for each in parameters if compressor.of(each.name, each.shape).takes(each.size)]
        others = [each for each in parameters if each not in taken]
        options = {"dense_below": compressor.dense_below, **(options or {})}
        self.large = Engine(compressor, taken, transport, average=average, options=options, scope=f"{scope}large:")
        self.small = Engine(NoCompression(), others, transport, average=average, scope=f"{scope}small:")
        self.counters: Counters = self.large.counters
        self.small.counters = self.counters
        self._taken = {each.name for each in taken}
        self._names = {each.name for each in parameters}

    def reduce(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The average (or sum) over the workers of what they send of `tensors`. Every worker makes the call.

        Args:
            tensors: all of them, any shapes, float dtypes; their memory is the engines' from now on.

        Returns:
            float32, flat; NaN throughout where any worker's values were not finite, and then no state changes.

        Raises:
            ConfigurationError: these are other tensors, or workers were given different settings.
            PayloadError: some rank sent corrupt bytes.
        """
        if tensors.keys() != self._names:
            raise ConfigurationError(
                f"expected the tensors that were there at first: missing {sorted(self._names - tensors.keys())}, "
                f"unknown {sorted(tensors.keys() - self._names)}"
            )
        # By name, since workers may have put them together in any order.
        for name in sorted(tensors):
            (self.large if name in self._taken else self.small).submit(name, tensors[name])
        results = self.small.finish()
        usable = _all_finite(results)
        found = self.large.finish(usable)
        if not (usable and _all_finite(found)):
            results = {name: each * float("nan") for name, each in results.items()}
        return results | found


def _all_finite(arrays: Mapping[str, Array]) -> bool:
    return all(ops_for(each).all_finite(each) for each in arrays.values())
