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


def have_come(connect: Callable[[], Connection], count: int) -> Callable[[], bool]:
    """Return a function that tells whether there are so many effects."""
    return lambda: len(effects(connect)) >= count


def take_effect(message: ReceivedMessage, connection: Connection) -> None:
    with connection.cursor() as cursor:
        cursor.execute(EFFECT, (message.body.decode(), message.attempt))


def lose_effects(connect: Callable[[], Connection], group: str) -> None:
    """Restore the database to when it had none. From then on effects are numbered."""
    with closing(connect()) as connection, connection, connection.cursor() as cursor:
        cursor.execute("DELETE FROM effects")
        cursor.execute("ALTER TABLE effects ADD COLUMN number serial")
        for table in ("txmq_inbox", "txmq_inbox_recent"):
            cursor.execute(f"DELETE FROM public.{table} WHERE grp = %s", (group,))


def numbered_effects(connect: Callable[[], Connection]) -> list[str]:
    """Return the bodies in the order of their effects."""
    with closing(connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT body FROM effects ORDER BY number")
        return [body for (body,) in cursor.fetchall()]
