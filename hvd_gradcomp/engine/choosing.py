"""Which exchange a bucket takes with `collective="auto"`: the cheapest by the cost model, the same on all workers.

The model's formulas are in `policy/cost.py`. What it is told of the network is measured once, when the workers have
agreed on their settings, or configured, and averaged over the workers, so that all choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.collectives import Transport, agree, configured_network, measure
from hvd_gradcomp.engine.nodes import Nodes
from hvd_gradcomp.ops import Array, ops_for
from hvd_gradcomp.policy.cost import FREE, Links, Network, Topology, allgather, dense_allreduce, hierarchical
from hvd_gradcomp.policy.cost import scatter_reduce as by_owners


@dataclass(frozen=True)
class Chooser:
    """What choices go by.

    Attributes:
        topology: which workers share a node.
        links: the networks between and within nodes.
        nodes: how a hierarchical exchange would go; None where it cannot.
    """

    topology: Topology
    links: Links
    nodes: Nodes | None

    def cheapest(self, payload: float, dense: float, may_add: bool) -> str:
        """One of "dense", "allgather", "scatter_reduce" and "hierarchical".

        Args:
            payload: bytes of the bucket, compressed, from one worker.
            dense: bytes of the bucket as it is.
            may_add: whether gradients may be added before they are compressed.
        """
        costs = {
            "dense": dense_allreduce(dense, self.topology, self.links),
            "allgather": allgather(payload, self.topology, self.links),
            "scatter_reduce": by_owners(payload, self.topology, self.links),
        }
        if self.nodes is not None and may_add:
            across = self.nodes.collective
            costs["hierarchical"] = hierarchical(payload, dense, self.topology, self.links, across=across)
        return min(costs, key=lambda way: costs[way].seconds)


def make_chooser(transport: Transport, nodes: Nodes, name: str, like: Array) -> Chooser:
    """Measure, unless it was configured, and agree. A collective call.

    Args:
        name: of the collectives.
        like: an array on the device that collectives use.
    """
    ops = ops_for(like)
    networks = list(configured_network())
    if not networks:
        networks.append(measure(ops, transport, f"{name}.network", like))
        if nodes.is_useful:
            networks.append(measure(ops, nodes.local, f"{name}.node", like))
    if len(networks) == 1:
        networks.append(networks[0] if len(nodes.sizes) == 1 else (FREE.latency_s, FREE.bytes_per_s))
    # Nothing costs nothing: what is zero or infinite stays so, the same on all workers.
    told = [number for network in networks for number in network if 0 < number < float("inf")]
    agreed = iter(agree(ops, transport, told, f"{name}.agreed", like))
    between, within = (
        Network(*(next(agreed) if 0 < number < float("inf") else number for number in network)) for network in networks
    )
    return Chooser(Topology(nodes.sizes), Links(between, within), nodes if nodes.is_useful else None)
