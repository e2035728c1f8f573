"""Sessions that stand in front of the resolver: who holds its locks, and their end.

A transaction that has written its token row holds up the fence of that token. Its
database transaction's id need not be known: PostgreSQL tells whom a waiting backend
waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Thread
from typing import Final
from uuid import UUID

from txmq.errors import DatabaseError
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection, Cursor, transaction

WAIT_MS: Final = 1_000
POLL_S: Final = 0.02
# The oldest transaction that touches txmq's tables is the likeliest to be forgotten.
_OLDEST_HOLDER: Final = """
SELECT a.pid, a.application_name, coalesce(a.state, ''), to_char(a.xact_start AT TIME ZONE 'UTC',
    'YYYY-MM-DD HH24:MI:SS')
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_stat_activity a USING (pid)
WHERE l.granted AND a.datname = current_database() AND a.pid <> pg_backend_pid()
    AND c.relnamespace = 'public'::regnamespace AND c.relname LIKE 'txmq\\_%'
ORDER BY a.xact_start NULLS LAST LIMIT 1
"""
_END: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE pid = ANY (pg_blocking_pids(%s))
    AND xact_start < clock_timestamp() - make_interval(secs => %s)
"""


def oldest_holder(connection: Connection) -> str:
    """Return a description of the session that has had locks on txmq's tables for
    longest, "" = there is none, or it cannot be read.
    """
    with suppress(DatabaseError), translated("looking for locks"), connection.cursor() as cursor:
        cursor.execute(_OLDEST_HOLDER)
        for pid, name, state, since in cursor.fetchall():
            doing = f", {state} since {since} UTC" if state and since else ""
            return f"session {pid} ({name or 'unnamed'}{doing}) holds locks on txmq's tables"
    return ""


def end_blockers(
    connection: Connection,
    another: Callable[[], Connection],
    statement: str,
    log_id: UUID,
    token: UUID,
    older_than_s: float,
) -> int:
    """End the backends that `statement` waits for and that have been in a transaction
    for longer. Return their number.

    The statement runs in a transaction on `connection`, and may succeed. A second
    connection, which `another` makes, looks whom it waits for. Raises DatabaseError.
    """
    values = {"lock_timeout_ms": WAIT_MS, "log_id": str(log_id), "tokens": [str(token)]}
    ended = 0
    with (
        translated("ending stuck transactions"),
        closing(another()) as watching,
        watching.cursor() as looking,
        suppress(_WaitedInVain),
        transaction(connection) as cursor,
    ):
        cursor.execute("SELECT pg_backend_pid()")
        [(pid,)] = cursor.fetchall()
        waiting = _Waiting(cursor, statement, values)
        while waiting.is_alive():
            looking.execute(_END, (pid, older_than_s))
            ended += looking.rowcount
            time.sleep(POLL_S)
        waiting.join()
        if waiting.failed:
            raise _WaitedInVain
    return ended


class _WaitedInVain(Exception):  # never leaves this module
    """The lock did not come in time; the transaction is to be rolled back."""


class _Waiting(Thread):
    """A statement that waits for a lock, in a thread of its own."""

    def __init__(self, cursor: Cursor, statement: str, values: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self._work = cursor, statement, values
        self.failed = False
        self.start()

    def run(self) -> None:
        cursor, statement, values = self._work
        try:
            with translated("waiting for a token"):
                cursor.execute(statement, values)
        except DatabaseError:
            self.failed = True
