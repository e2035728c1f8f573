"""Django's hook `on_commit`, and the same with txmq."""

from __future__ import annotations

from contextlib import suppress

from django.db import DatabaseError, connection, transaction

import txmq
import txmq.django


def by_hook(client: txmq.Client, topic: str, order: str) -> None:
    """Send the message in `on_commit`."""
    with transaction.atomic(), connection.cursor() as cursor:
        transaction.on_commit(lambda: client.send(topic, order.encode()))
        cursor.execute("INSERT INTO phantom_orders (id) VALUES (%s)", [order])
        with suppress(DatabaseError):
            cursor.execute("SELECT 1 / 0")
    # The message is out, and no row is stored.


def by_txmq(topic: str, order: str) -> None:
    """Send the message with the transaction."""
    with transaction.atomic(), connection.cursor() as cursor:
        txmq.django.send(topic, order.encode())
        cursor.execute("INSERT INTO phantom_orders (id) VALUES (%s)", [order])
        with suppress(DatabaseError):
            cursor.execute("SELECT 1 / 0")
    # Not reached: the block raises TransactionAborted. Nothing is out.
