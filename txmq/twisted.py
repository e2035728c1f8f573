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

Every call gives a Deferred, which coroutines of Deferreds can await. On asyncio, with
AsyncioSelectorReactor installed, hand such a coroutine over as a whole: `await
Deferred.fromCoroutine(work()).asFuture(loop)`.

A transaction together with a database runs its statements in threads of the client's
own:

    async with client.transaction(connection) as tx:        # a psycopg2 connection
        await tx.run(insert_order, connection, order)       # a function, called in a thread
        tx.send("orders", b"...", key="o-1")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack, overload

from txmq.client.protocol.settings import Options, Settings
from txmq.client.twisted.client import Client, Found
from txmq.client.twisted.cluster import Cluster
from txmq.client.twisted.consumer import Consumer
from txmq.client.twisted.consumer_cluster import Consumers
from txmq.client.twisted.protocols import Reactor
from txmq.client.twisted.reader import Reader
from txmq.client.twisted.threads import ThreadedHalf, ThreadedTransaction
from txmq.client.twisted.transaction import Transaction
from txmq.errors import ConfigError

__all__ = [
    "Client",
    "Cluster",
    "Consumer",
    "Consumers",
    "Found",
    "Reader",
    "ThreadedHalf",
    "ThreadedTransaction",
    "Transaction",
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
    """A client of the broker at `url`, on this reactor; of several brokers for a
    sequence of URLs: see Cluster.

    Nothing is connected before it is needed. For `partition_map` see `txmq.connect`,
    for the `options` `txmq.client.protocol.settings.Options`. Raises ConfigError.
    """
    settings = Settings.of(service, **options)
    if not isinstance(url, str):
        return Cluster(reactor, url, settings, partition_map)
    if partition_map is not None:
        raise ConfigError(
            "partition_map", "one broker knows its partitions", hint="it is for a sequence of URLs"
        )
    return Client(reactor, url, settings)
