"""The services of the order flow, killed and served by pytest's plugin.

Those of examples/services are killed at every step; here are two that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import date
from importlib import resources
from typing import Any

import psycopg2
import pytest

import txmq
from examples.order_flow.data import Order, OrderLine
from examples.order_flow.order_placed import ORDER_PLACED, OrderPlaced
from examples.order_flow.services.orders import place_order
from examples.order_flow.services.payment import GROUP, charge
from tests.client.real_consumers import drain
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.crash_kit import INBOX, CrashKit
from txmq.testing.wait import PATIENCE_S

NO_RETRY = txmq.RetryPolicy((60,), dead=["examples.order_flow.services.payment.PaymentRefused"])
STEPS = {"tx.after_token": 0, "tx.after_commit": 1}  # and whether the order is there
CHARGED = "SELECT order_id FROM charges ORDER BY order_id"
ACCOUNTS = """
INSERT INTO carriers VALUES ('MAIL');
INSERT INTO parts VALUES (7, 'A1');
INSERT INTO customers VALUES (1, 1000, 1000), (2, 1000, 1000);
UPDATE customers SET blocked = true WHERE customer_id = 2;
"""


def query(dsn: str, statement: str) -> list[Any]:
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


@pytest.fixture
def shop(txmq_database: str, txmq_client: txmq.Client) -> str:
    """A shop with two customers, one of them blocked."""
    tables = resources.files("examples.order_flow").joinpath("schema.sql").read_text("utf-8")
    query(txmq_database, tables + ACCOUNTS)
    txmq_client.call("topic.create", name=ORDER_PLACED, partitions=1)
    return txmq_database


def place(url: str, dsn: str, customer_id: int = 1) -> None:
    """Take in one more order."""
    [(known,)] = query(dsn, "SELECT count(*) FROM orders")
    line = OrderLine(line=1, part_id=7, quantity=1, price_cents=5)
    order = Order(known + 1, customer_id, 5, date(1996, 1, 2), "LOW", "MAIL", [line])
    with (
        txmq.connect(url, service="orders", timeout=PATIENCE_S) as client,
        closing(psycopg2.connect(dsn)) as connection,
    ):
        place_order(client, connection, order)


def charge_waiting(url: str, dsn: str) -> None:
    """Charge for all orders that wait, and return."""
    with txmq.connect(url, service="payment", timeout=PATIENCE_S) as client:
        consumer = client.consumer(GROUP, [ORDER_PLACED], mode="concurrent", retry=NO_RETRY)

        def refuse(message: txmq.ReceivedMessage, error: Exception) -> None:
            consumer.nack(message, error=error)

        drain(
            client,
            consumer,
            lambda messages, connection: charge(messages, connection, refuse),
            inbox=lambda: psycopg2.connect(dsn),
            batch=10,
        )


def test_an_order_is_taken_in_if_and_only_if_the_others_hear_of_it(
    txmq_broker: BrokerThread, txmq_client: txmq.Client, shop: str
) -> None:
    for kill in CrashKit(txmq_broker).kills(place, txmq_broker.url, shop, points=tuple(STEPS)):
        rows = query(shop, "SELECT order_id, version FROM orders ORDER BY order_id")
        messages = [OrderPlaced.decode(found.body) for found in txmq_client.find(ORDER_PLACED)]
        assert sorted((found.order_id, found.version) for found in messages) == rows, kill
        lines = query(shop, "SELECT order_id, order_id FROM order_lines ORDER BY order_id")
        assert [order for order, _version in rows] == [order for order, _ in lines], kill
        assert len(rows) == STEPS[kill.point], kill


def test_a_killed_payment_charges_each_order_once(
    txmq_broker: BrokerThread,
    txmq_letters: Callable[..., list[txmq.DeadLetter]],
    shop: str,
) -> None:
    """The order of the blocked customer becomes a dead letter."""
    for customer_id in (1, 2, 1):
        place(txmq_broker.url, shop, customer_id)
    for _kill in CrashKit(txmq_broker).kills(charge_waiting, txmq_broker.url, shop, points=INBOX):
        charge_waiting(txmq_broker.url, shop)
    assert query(shop, CHARGED) == [(1,), (3,)]
    [letter] = txmq_letters(GROUP)
    assert letter.body is not None
    assert OrderPlaced.decode(letter.body).customer_id == 2
