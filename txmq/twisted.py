"""txmq for programs that run on Twisted.

    client = txmq.twisted.connect(reactor, "txmq://127.0.0.1:7650", service="orders")
    receipt = await client.send("orders", b"...", key="o-1")
    async with client.transaction() as tx: ...
    consumer = await client.consumer("billing", topics=["orders"])
    async for message in consumer:
        ...
        consumer.ack(message)

    reader = await client.reader("audit", ["orders"], txmq.FileOffsets("offsets"))
    cluster = txmq.twisted.connect(reactor, ["txmq://a:7650", "txmq://b:7650"])

Every call returns a Deferred, which coroutines of Deferreds can await. The client is
that of asyncio: it works on the loop of AsyncioSelectorReactor where that is installed,
else on one in a thread. There is no other difference. To cancel a Deferred cancels the
call. Handlers and checkers are called in the reactor's thread.

A transaction with a database runs its statements in threads of the client:

    async with client.transaction(connection) as tx:    # of psycopg2, or psycopg 3
        await tx.run(insert_order, connection, order)   # a function, called in a thread
        tx.send("orders", b"...", key="o-1")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack, overload

from txmq import aio
from txmq.client.protocol.audit import AuditEntry
from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
from txmq.client.protocol.letter_changes import (
    ChangedLetters,
    ExportedLetters,
    ImportedLetters,
    Trial,
)
from txmq.client.protocol.letters import DeadLetter
from txmq.client.protocol.lives import Trace
from txmq.client.protocol.message_search import FoundMessage
from txmq.client.protocol.plans import PlannedLetter, PlanStatus
from txmq.client.protocol.reader import Found
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.settings import Options
from txmq.client.protocol.transaction.checks import Half
from txmq.client.protocol.transaction.half_message import HalfMessage
from txmq.client.twisted.bridge import Reactor, bridge_of
from txmq.client.twisted.client import Client, finish_sends
from txmq.client.twisted.cluster import Cluster
from txmq.client.twisted.consumer import Consumer, Consumers
from txmq.client.twisted.messages import Job, ReplayPlan
from txmq.client.twisted.reader import Reader, Readers
from txmq.client.twisted.transaction import HalfTransaction, Transaction, XaTransaction
from txmq.client.twisted.typed import TypedTopic
from txmq.model.cluster import ClusterView, NodeView

__all__ = [
    "AuditEntry",
    "ChangedLetters",
    "Client",
    "Cluster",
    "ClusterView",
    "Consumer",
    "Consumers",
    "DeadLetter",
    "DeliveredMessage",
    "ExportedLetters",
    "Found",
    "FoundMessage",
    "Half",
    "HalfMessage",
    "HalfTransaction",
    "ImportedLetters",
    "Job",
    "NodeView",
    "PlanStatus",
    "PlannedLetter",
    "Reader",
    "Readers",
    "ReceivedBatch",
    "ReplayPlan",
    "StoredBatch",
    "Trace",
    "Transaction",
    "Trial",
    "TypedTopic",
    "XaTransaction",
    "connect",
]


@overload
def connect(
    reactor: Reactor, url: str, *, service: str | None = None, **options: Unpack[Options]
) -> Client: ...


@overload
def connect(
    reactor: Reactor,
    url: list[str] | tuple[str, ...],
    *,
    service: str | None = None,
    partition_map: Mapping[str, Sequence[int]] | None = None,
    **options: Unpack[Options],
) -> Cluster: ...


def connect(
    reactor: Reactor,
    url: str | list[str] | tuple[str, ...],
    *,
    service: str | None = None,
    partition_map: Mapping[str, Sequence[int]] | None = None,
    **options: Unpack[Options],
) -> Client | Cluster:
    """Return a client of the broker at `url`, or of several brokers for a sequence of
    URLs.

    It works on this reactor, and connects when it is first used. `txmq.connect`
    describes `url`, `service` and `partition_map`,
    `txmq.client.protocol.settings.Options` the options. Raises ConfigError.
    """
    make: Any = aio.connect  # which of its overloads, `url` decides
    awaited = make(url, service=service, partition_map=partition_map, **options)
    if isinstance(awaited, aio.Cluster):
        return Cluster(bridge_of(reactor, lambda: finish_sends(*awaited.clients)), awaited)
    return Client(bridge_of(reactor, partial(finish_sends, awaited)), awaited)
