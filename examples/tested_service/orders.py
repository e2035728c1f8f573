"""Places orders, and charges for them."""

from __future__ import annotations

from contextlib import closing

import psycopg2

import txmq

TABLES = """
CREATE TABLE orders (id int PRIMARY KEY);
CREATE TABLE charges (message text PRIMARY KEY, amount int);
"""


class CardDeclined(Exception):
    """The card was not accepted; the same may work later."""


def place_order(url: str, dsn: str) -> None:
    """Place one more order: a row and a message, one decision."""
    with (
        txmq.connect(url, service="orders") as client,
        closing(psycopg2.connect(dsn)) as database,
        client.transaction(database) as tx,
        database.cursor() as cursor,
    ):
        cursor.execute(
            "INSERT INTO orders SELECT coalesce(max(id), 0) + 1 FROM orders RETURNING id"
        )
        row = cursor.fetchone()
        assert row is not None
        tx.send("orders", str(row[0]).encode(), key=str(row[0]))


def charge(message: txmq.ReceivedMessage, connection: psycopg2.extensions.connection) -> None:
    """Charge for an order; its number is the amount."""
    amount = int(message.body)
    if amount < 0:
        raise CardDeclined(f"{amount} cannot be charged")
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO charges VALUES (%s, %s)", (message.message_id, amount))


def charge_waiting(url: str, dsn: str) -> None:
    """Charge for all orders that wait, each exactly once, and return."""
    with txmq.connect(url, service="billing") as client:
        consumer = client.consumer("billing", topics=["orders"])
        consumer.run(charge, inbox=lambda: psycopg2.connect(dsn), idle_exit=0.3)
