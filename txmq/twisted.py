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

Every call returns a Deferred, which coroutines of Deferreds can await. On asyncio, with
AsyncioSelectorReactor installed, convert such a coroutine as a whole:
`await Deferred.fromCoroutine(work()).asFuture(loop)`.

A transaction with a database runs its statements in threads of the client:

    async with client.transaction(connection) as tx:    # a psycopg2 connection
        await tx.run(insert_order, connection, order)   # a function, called in a thread
        tx.send("orders", b"...", key="o-1")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack, overload

from txmq.client.protocol.audit import AuditEntry
from txmq.client.protocol.awaited.plans import ReplayPlan
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
from txmq.client.protocol.settings import ClientSettings, Options, refuse_spool, traced
from txmq.client.protocol.transaction.checks import Half
from txmq.client.protocol.transaction.half_message import HalfMessage
from txmq.client.twisted.client import Client
from txmq.client.twisted.cluster import Cluster
from txmq.client.twisted.consumer.consumer import Consumer, Consumers
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import Reactor
from txmq.client.twisted.reader import Reader, Readers
from txmq.client.twisted.threaded_transaction import (
    ThreadedHalf,
    ThreadedTransaction,
    ThreadedXa,
)
from txmq.client.twisted.transaction import Transaction
from txmq.client.twisted.typed import TypedTopic
from txmq.errors import ConfigError

__all__ = [
    "AuditEntry",
    "ChangedLetters",
    "Client",
    "Cluster",
    "Consumer",
    "Consumers",
    "DeadLetter",
    "DeliveredMessage",
    "ExportedLetters",
    "Found",
    "FoundMessage",
    "Half",
    "HalfMessage",
    "ImportedLetters",
    "PlanStatus",
    "PlannedLetter",
    "Reader",
    "Readers",
    "ReceivedBatch",
    "ReplayPlan",
    "StoredBatch",
    "ThreadedHalf",
    "ThreadedTransaction",
    "ThreadedXa",
    "Trace",
    "Transaction",
    "Trial",
    "TypedTopic",
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
    settings = ClientSettings.of(service, **options).at(url)
    if not isinstance(url, str):
        refuse_spool(settings)
        return traced(Cluster(reactor, url, settings, partition_map), settings)
    if partition_map is not None:
        raise ConfigError(
            "partition_map",
            "a broker knows its own partitions",
            hint="leave it out, or give a sequence of URLs",
        )
    if settings.spool is None:
        return traced(Client(TwistedCore(reactor, url, settings)), settings)
    from txmq.client.twisted.spooling import SpoolingClient  # noqa: PLC0415  # few need it

    return traced(SpoolingClient(reactor, url, settings), settings)
