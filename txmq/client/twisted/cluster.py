"""The client of several brokers that have topics in common, for programs on Twisted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from txmq.client.aio import cluster
from txmq.client.aio.closing import AsyncCloseable
from txmq.client.protocol.awaited.cluster_calls import OneBrokerCalls
from txmq.client.protocol.sender.routing import of_one_broker
from txmq.client.twisted.bridge import Bridge
from txmq.client.twisted.client import Client, register
from txmq.client.twisted.consumer import Consumers
from txmq.client.twisted.deferring import at_once, deferring, iterating, making
from txmq.client.twisted.messages import ReplayPlan, half_message
from txmq.client.twisted.reader import Readers
from txmq.client.twisted.transaction import TransactionCalls
from txmq.client.twisted.typed import TypedTopicCalls

if TYPE_CHECKING:  # for programs that have a database
    from twisted.internet.defer import Deferred

    from txmq.client.twisted.client import Checker


class Cluster(TransactionCalls, TypedTopicCalls, OneBrokerCalls, AsyncCloseable):
    """A client of several brokers, for the reactor's thread.

    `txmq.twisted.connect` makes it from a sequence of URLs. Each broker has a log of
    its own. The partitions of a topic are numbered through, those of the first broker
    first, and a key always has the same partition. Messages without a key go to a
    broker that is there. Receipts and messages have the number that the partition has
    at its broker.

    A log that operators add to those of the URLs is found while the client runs: it
    gets messages without a key, and keys of topics that are made later, and consumers
    read it, too.

    The calls are those of Client. Some concern one broker only and raise
    LocalProtocolError here; `clients` has the client of each broker for them, in the
    order of the URLs, and then of those that were found.
    """

    _awaited: cluster.Cluster

    def __init__(self, bridge: Bridge, awaited: cluster.Cluster) -> None:
        self._bridge, self._awaited = bridge, awaited
        self._clients: tuple[Client, ...] = ()

    @property
    def clients(self) -> tuple[Client, ...]:
        """The client of each broker."""
        found = self._awaited.clients[len(self._clients) :]
        self._clients += tuple(Client(self._bridge, one) for one in found)
        return self._clients

    send = deferring(cluster.Cluster.send)
    send_batch = deferring(cluster.Cluster.send_batch)
    send_many = deferring(cluster.Cluster.send_many)
    send_one_way = at_once(cluster.Cluster.send_one_way)
    half = making(cluster.Cluster.half, half_message)
    flush = deferring(cluster.Cluster.flush)
    read = deferring(cluster.Cluster.read)
    recall = deferring(cluster.Cluster.recall)
    find = iterating(cluster.Cluster.find)
    letters = iterating(cluster.Cluster.letters)
    audit = iterating(cluster.Cluster.audit)
    trace = deferring(cluster.Cluster.trace)
    consumer = making(cluster.Cluster.consumer, Consumers)
    reader = making(cluster.Cluster.reader, Readers)

    def plan(self, name: str, broker: int = 0) -> ReplayPlan:
        """Return a replay plan of one of the brokers, by its number in the URLs: each
        has plans of its own letters.
        """
        return self.clients[broker].plan(name)

    def log_id(self) -> NoReturn:
        """Each broker has a log of its own: `client.log_id` of each of `clients`."""
        raise of_one_broker("log_id()")

    def register_checker(self, name: str, checker: Checker) -> None:
        """Let this process decide half transactions of all brokers.

        See `Client.register_checker`.
        """
        register(self._bridge, self._awaited, name, checker)

    def close(self) -> Deferred[None]:
        """Close the clients of all brokers, their consumers and readers first."""
        return self._bridge.close(self._awaited.close)
