"""txmq for programs that run on asyncio.

    async with txmq.aio.connect("txmq://127.0.0.1:7650", service="orders") as client:
        receipt = await client.send("orders", b"...", key="o-1")
        async with client.transaction() as tx: ...
        async with await client.consumer("billing", ["orders"]) as consumer:
            async for message in consumer:
                ...
                consumer.ack(message)

Every call is a coroutine, and no module of it needs Twisted. A client belongs to the
event loop that uses it first, and works on uvloop as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack, overload

from txmq.client.aio.client import Client
from txmq.client.aio.cluster import Cluster
from txmq.client.aio.consumer.consumer import Consumer, Consumers
from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import outcome_of
from txmq.client.aio.reader import Reader
from txmq.client.aio.readers import Readers
from txmq.client.aio.transaction.enlisted import EnlistedTransaction
from txmq.client.aio.transaction.half import HalfTransaction
from txmq.client.aio.transaction.postgres import PostgresTransaction
from txmq.client.aio.transaction.transaction import Transaction
from txmq.client.aio.transaction.xa import XaTransaction
from txmq.client.aio.transaction.xa_resource import XaResource
from txmq.client.aio.typed import TypedTopic
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
from txmq.errors import ConfigError
from txmq.model.cluster import ClusterView, NodeView
from txmq.tx.postgres.emit import emit_async as emit

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
    "EnlistedTransaction",
    "ExportedLetters",
    "Found",
    "FoundMessage",
    "Half",
    "HalfMessage",
    "HalfTransaction",
    "ImportedLetters",
    "NodeView",
    "PlanStatus",
    "PlannedLetter",
    "PostgresTransaction",
    "Reader",
    "Readers",
    "ReceivedBatch",
    "ReplayPlan",
    "StoredBatch",
    "Trace",
    "Transaction",
    "Trial",
    "TypedTopic",
    "XaResource",
    "XaTransaction",
    "connect",
    "emit",
    "outcome_of",
]


@overload
def connect(url: str, *, service: str | None = None, **options: Unpack[Options]) -> Client: ...


@overload
def connect(
    url: list[str] | tuple[str, ...],
    *,
    service: str | None = None,
    partition_map: Mapping[str, Sequence[int]] | None = None,
    **options: Unpack[Options],
) -> Cluster: ...


def connect(
    url: str | list[str] | tuple[str, ...],
    *,
    service: str | None = None,
    partition_map: Mapping[str, Sequence[int]] | None = None,
    **options: Unpack[Options],
) -> Client | Cluster:
    """Return a client of the broker at `url`, or of several brokers for a sequence of
    URLs.

    It connects when it is first used, on the event loop that runs then. `txmq.connect`
    describes `url`, `service` and `partition_map`,
    `txmq.Options` the options. Raises ConfigError, and
    StoreError where a spool cannot be opened.
    """
    settings = ClientSettings.of(service, **options).at(url)
    if not isinstance(url, str):
        refuse_spool(settings)
        return traced(Cluster(url, settings, partition_map), settings)
    if partition_map is not None:
        raise ConfigError(
            "partition_map",
            "a broker knows its own partitions",
            hint="leave it out, or give a sequence of URLs",
        )
    if settings.spool is not None:
        # The store's modules are for those who have one.
        from txmq.client.aio.spooling import SpoolingClient  # noqa: PLC0415

        return traced(SpoolingClient(url, settings), settings)
    return traced(Client(AioCore(url, settings)), settings)
