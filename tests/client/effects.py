"""The effects of handlers in their transactions: rows in a table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import psycopg2

from txmq.model.message import ReceivedMessage
from txmq.tx.postgres.session import Connection

EFFECT = "INSERT INTO effects (body, attempt) VALUES (%s, %s)"


def with_effects(database: str) -> Callable[[], Connection]:
    """Create the table of effects; return a function that connects to its database."""
    with (
        closing(psycopg2.connect(database)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("CREATE TABLE effects (body text, attempt int)")
    return lambda: psycopg2.connect(database)


def effects(connect: Callable[[], Connection]) -> list[str]:
    with closing(connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT body FROM effects ORDER BY body")
        return [body for (body,) in cursor.fetchall()]


def take_effect(message: ReceivedMessage, connection: Connection) -> None:
    with connection.cursor() as cursor:
        cursor.execute(EFFECT, (message.body.decode(), message.attempt))
