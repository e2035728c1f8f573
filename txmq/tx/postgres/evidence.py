"""Statements of the resolver: read the proof of a commit, or make it impossible.

Each runs as one query string on a connection in autocommit mode, so the reply comes
after the commit. They write even where reading would show the same: their own flush to
disk takes along the transaction that they report on, which may have been committed
without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

import psycopg2

from txmq.crashpoints import crashpoint
from txmq.tx.postgres.bounds import bounded
from txmq.tx.postgres.errors import CHECK_VIOLATION, CONFLICTS, describe, translate, translated
from txmq.tx.postgres.session import Connection, Notices

# Errors that one token causes: halving the batch isolates it from the others.
_OF_ONE_TOKEN: Final = CONFLICTS | {CHECK_VIOLATION}
# An id from the future, lost in a crash, would make pg_xact_status fail for all.
_RUNNING: Final = """
SELECT x FROM unnest(%s::text[]) x
WHERE CASE WHEN x::xid8 < pg_current_xact_id()
           THEN pg_xact_status(x::xid8) = 'in progress' ELSE false END
"""
_END_STUCK: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND backend_xid::text = ANY (%s::text[])
  AND xact_start < clock_timestamp() - make_interval(secs => %s)
"""
_LASTING: Final = (
    "SET LOCAL synchronous_commit = on; SET LOCAL client_min_messages = warning; "
    "SET LOCAL lock_timeout = %(lock_timeout_ms)s; "
)
PROVE: Final = (
    _LASTING
    + """
UPDATE public.txmq_token SET state = 'D'
WHERE tok = ANY (%(tokens)s::uuid[]) AND log_id = %(log_id)s::uuid AND state IN ('C', 'D')
    RETURNING tok::text
"""
)
# A fence of an earlier attempt is written again, so that it is on disk before it is
# reported. A row is left alone.
FENCE: Final = (
    _LASTING
    + """
INSERT INTO public.txmq_token AS known (tok, log_id, state) SELECT unnest(%(tokens)s::uuid[]),
    %(log_id)s::uuid, 'R'
ON CONFLICT (tok, log_id) DO UPDATE SET state = 'R' WHERE known.state = 'R' RETURNING tok::text
"""
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Time-outs of a statement: for a lock, and in all.

    A commit waits for a synchronous standby, too.
    """

    lock_timeout_ms: int = 50
    deadline_s: float = 10.0


class Written(NamedTuple):
    """The tokens that a statement wrote for, and those that it failed for, with the
    reason.
    """

    done: frozenset[UUID]
    blocked: dict[UUID, str]


def running(connection: Connection, xids: Sequence[int]) -> set[int]:
    """Return those of `xids` that are in progress.

    After a crash the server may have given such an id to another transaction. Raises
    DatabaseError.
    """
    with translated("asking for transactions in progress"), connection.cursor() as cursor:
        cursor.execute(_RUNNING, ([str(xid) for xid in xids],))
        return {int(xid) for (xid,) in cursor.fetchall()}


def end_stuck(connection: Connection, xids: Sequence[int], older_than_s: float) -> int:
    """End backends that have been in one of the transactions for longer; return their
    number.

    Raises DatabaseError.
    """
    with translated("ending stuck transactions"), connection.cursor() as cursor:
        cursor.execute(_END_STUCK, ([str(xid & 0xFFFFFFFF) for xid in xids], older_than_s))
        return cursor.rowcount


def write(
    connection: Connection, statement: str, log_id: UUID, tokens: Sequence[UUID], limits: Limits
) -> Written:
    """Execute and commit PROVE or FENCE for `tokens`. Raises DatabaseError where all of
    it failed.
    """
    crashpoint("resolver.before_write")
    values = {
        "lock_timeout_ms": limits.lock_timeout_ms,
        "log_id": str(log_id),
        "tokens": [str(t) for t in tokens],
    }
    try:
        with (
            bounded(connection, limits.deadline_s),
            Notices(connection) as notices,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement, values)
            done = frozenset(UUID(token) for (token,) in cursor.fetchall())
    except psycopg2.Error as error:
        if error.pgcode not in _OF_ONE_TOKEN:
            raise translate(error, "resolving transactions") from None
        if len(tokens) == 1:
            return Written(frozenset(), {tokens[0]: describe(error)})
        middle = len(tokens) // 2
        halves = [
            write(connection, statement, log_id, half, limits)
            for half in (tokens[:middle], tokens[middle:])
        ]
        return Written(halves[0].done | halves[1].done, halves[0].blocked | halves[1].blocked)
    crashpoint("resolver.after_write")
    # The only notice is a cancelled wait for a synchronous standby: a failover could
    # undo the statement.
    if notices:
        return Written(
            frozenset(), dict.fromkeys(tokens, "no synchronous standby has confirmed it")
        )
    return Written(done, {})
