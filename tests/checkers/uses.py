"""Right and wrong uses of the public names. Nothing runs them: type checkers read them.

A wrong use has a comment that expects an error. Where a checker takes a wrong use, it
reports the comment as needless.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import assert_type

import psycopg
import psycopg2
import pydantic
import sqlalchemy.orm
from psycopg2.extensions import connection as Connection  # noqa: N812  # it is a class
from twisted.internet import reactor

import txmq

URL, DSN = "txmq://127.0.0.1:7650", "postgresql:///shop"


class Order(pydantic.BaseModel):
    """The body of a message."""

    number: int


def charge(message: txmq.ReceivedMessage) -> None: ...
def charge_one(message: txmq.DeliveredMessage, connection: Connection) -> None: ...
def charge_all(messages: list[txmq.ReceivedMessage]) -> None: ...
def charge_any(messages: Sequence[txmq.ReceivedMessage], connection: Connection) -> None: ...
async def charge_later(message: txmq.ReceivedMessage) -> None: ...
async def charge_later_with(message: txmq.ReceivedMessage, connection: Connection) -> None: ...
async def charge_in(
    message: txmq.DeliveredMessage, connection: psycopg.AsyncConnection[object]
) -> None: ...


def connect() -> Connection:
    """Connect to the database of an inbox."""
    return psycopg2.connect(DSN)


async def connect_later() -> psycopg.AsyncConnection[object]:
    """Connect to the database of an inbox."""
    return await psycopg.AsyncConnection.connect(DSN)


def names() -> None:
    assert_type(txmq.connect(URL), txmq.Client)
    assert_type(txmq.connect([URL, URL]), txmq.Cluster)
    assert_type(txmq.aio.connect(URL), txmq.aio.Client)
    assert_type(txmq.twisted.connect(reactor, [URL]), txmq.twisted.Cluster)
    txmq.sqlalchemy.enlist(sqlalchemy.orm.Session()).send("orders", b"")
    txmq.django.send("orders", b"", key="k")
    txmq.postgres.EnlistConnection(DSN)
    txmq.no_such_name()  # type: ignore[attr-defined]
    txmq.aio.no_such_name()  # type: ignore[attr-defined]
    txmq.connect(URL, no_such_option=1)  # type: ignore[call-overload]


def durations(client: txmq.Client, consumer: txmq.Consumer) -> None:
    policy = txmq.RetryPolicy((10, 2.5, timedelta(minutes=1)), retries=5)
    assert_type(policy.delays, tuple[timedelta, ...])
    txmq.RetryPolicy.exponential(initial=timedelta(seconds=1), longest=60.0, retries=9)
    txmq.connect(URL, timeout=timedelta(seconds=3), delivery_timeout=60)
    client.consumer("billing", ["orders"], retry=policy, lease=60, session=timedelta(seconds=30))
    client.send("orders", b"", delay=timedelta(hours=2), ttl=3_600, timeout=timedelta(seconds=1))
    consumer.receive(timedelta(seconds=1))
    txmq.RetryPolicy(("10",))  # type: ignore[arg-type]
    txmq.RetryPolicy((10,), attempts=2)  # type: ignore[call-arg]
    client.consumer("billing", ["orders"], lease_s=60)  # type: ignore[call-arg]


def handlers(consumer: txmq.Consumer) -> None:
    consumer.run(charge, workers=8)
    consumer.run(charge_all, batch=50, batch_wait=0.1)
    consumer.run(charge_one, inbox=connect)
    consumer.run(charge_any, inbox=connect, batch=50)
    consumer.run(charge_later)  # type: ignore[arg-type]
    consumer.run(charge, inbox=connect)  # type: ignore[arg-type]
    consumer.run(charge_one)  # type: ignore[arg-type]
    consumer.run(charge, batch=50)  # type: ignore[arg-type]
    consumer.run(charge, threads=8)  # type: ignore[call-overload]


async def handlers_on_a_loop(consumer: txmq.aio.Consumer) -> None:
    await consumer.run(charge_later, workers=8)
    await consumer.run(charge)
    await consumer.run(charge_in, inbox=connect_later)
    await consumer.run(charge_later, inbox=connect_later)  # type: ignore[arg-type]


async def handlers_on_twisted(consumer: txmq.twisted.Consumer) -> None:
    await consumer.run(charge_later, workers=8)
    await consumer.run(charge_one, inbox=connect)
    await consumer.run(charge_later_with, inbox=connect)  # type: ignore[arg-type]


def typed_topics(client: txmq.Client, consumer: txmq.Consumer) -> None:
    orders = client.topic("orders", Order)
    assert_type(orders.send(Order(number=1), key="k"), txmq.Receipt)
    assert_type(orders.send_async(Order(number=1)).result(), txmq.Receipt)
    with client.transaction() as tx:
        orders.within(tx).send(Order(number=2))
        orders.within(tx).send(b"{}")  # type: ignore[arg-type]
    client.consumer("billing", [orders, "refunds"])
    orders.send(b"{}")  # type: ignore[arg-type]
    orders.send(Order(number=1), no_such_field="")  # type: ignore[call-arg]


def options(client: txmq.Client, how: txmq.ConsumerOptions, url: txmq.Options) -> None:
    client.consumer("billing", ["orders"], **how)
    txmq.connect(URL, **url)
    txmq.ConsumerOptions(retry=txmq.RetryPolicy((10,)))
    txmq.ConsumerOptions(no_such_option=1)  # type: ignore[typeddict-unknown-key]


def letters(client: txmq.Client) -> None:
    for letter in client.letters("billing"):
        assert_type(letter, txmq.DeadLetter)
    assert_type(client.plan("mend").create("billing"), txmq.PlanStatus)
    client.plan("mend").no_such_order()  # type: ignore[attr-defined]


def transactions(client: txmq.Client, connection: Connection) -> None:
    with client.transaction(connection) as tx:
        assert_type(tx, txmq.Transaction)
        tx.send("orders", b"", key="k")
        tx.no_such_call()  # type: ignore[attr-defined]
    with client.transaction(connection, no_such_option=1):  # type: ignore[call-overload]
        pass


async def transactions_on_a_loop(
    client: txmq.aio.Client, connection: psycopg.AsyncConnection[object]
) -> None:
    async with client.transaction(connection) as tx:
        tx.send("orders", b"", key="k")
        tx.no_such_call()  # type: ignore[attr-defined]


async def messages(client: txmq.aio.Client, consumer: txmq.Consumer) -> None:
    for message in consumer:
        assert_type(message, txmq.DeliveredMessage)
    async for message in await client.consumer("billing", ["orders"]):
        assert_type(message, txmq.DeliveredMessage)
    assert_type((await client.read("orders", 0, 0)).messages, list[txmq.ReceivedMessage])
    orders = client.topic("orders", Order)
    await orders.send(Order(number=1))
    await orders.send(b"{}")  # type: ignore[arg-type]
