"""txmq for programs that run on Twisted.

    client = txmq.twisted.connect(reactor, "txmq://127.0.0.1:7650", service="orders")
    receipt = await client.send("orders", b"...", key="o-1")
    async with client.transaction() as tx: ...
    consumer = await client.consumer("billing", topics=["orders"])
    async for message in consumer:
        ...
        consumer.ack(message)

Every call gives a Deferred, which coroutines of Deferreds can await. On asyncio, with AsyncioSelectorReactor installed,
hand such a coroutine over as a whole: `await Deferred.fromCoroutine(work()).asFuture(loop)`.

A transaction together with a database runs its statements in threads of the client's own:

    async with client.transaction(connection) as tx:        # a psycopg2 connection
        await tx.run(insert_order, connection, order)       # a function, called in a thread
        tx.send("orders", b"...", key="o-1")
"""

from __future__ import annotations

from typing import Unpack

from txmq.client.settings import Options, Settings
from txmq.client.twisted_client import Client, Found
from txmq.client.twisted_consumer import Consumer
from txmq.client.twisted_seams import Reactor
from txmq.client.twisted_threads import ThreadedHalf, ThreadedTransaction
from txmq.client.twisted_transaction import Transaction

__all__ = ["Client", "Consumer", "Found", "ThreadedHalf", "ThreadedTransaction", "Transaction", "connect"]


def connect(reactor: Reactor, url: str, *, service: str | None = None, **options: Unpack[Options]) -> Client:
    """A client of the broker at `url`, on this reactor. Nothing is connected before it is needed.

    For the `options` see `txmq.client.settings.Options`. Raises ConfigError.
    """
    return Client(reactor, url, Settings.of(service, **options))
