"""How payloads meet: what an exchange asks of a transport, and the exchanges made of such requests.

An exchange is a generator: it yields a request, receives what the collective returned, and may yield the next. The
engine starts each request under the bucket's name and drives all workers' exchanges in the same order, so exchanges of
several rounds cannot deadlock. No framework is imported here; a door hands in the transport.
"""

from hvd_gradcomp.collectives.choice import moves_fewer_bytes
from hvd_gradcomp.collectives.measuring import agree, configured_network, measure
from hvd_gradcomp.collectives.summing import add
from hvd_gradcomp.collectives.topology import node_key, nodes_of, process_set_of
from hvd_gradcomp.collectives.transport import Allgather, Allreduce, Alltoall, Confirm, Exchange, Request, Transport

__all__ = [
    "Allgather",
    "Allreduce",
    "Alltoall",
    "Confirm",
    "Exchange",
    "Request",
    "Transport",
    "add",
    "agree",
    "configured_network",
    "measure",
    "moves_fewer_bytes",
    "node_key",
    "nodes_of",
    "process_set_of",
]
