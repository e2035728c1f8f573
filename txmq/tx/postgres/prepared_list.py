"""Prepared transactions of a server: owner, age, locks, and blocked sessions.

A prepared transaction has no process. Its locks are in `pg_locks` without a pid, and
`pg_blocking_pids` reports a 0 for it. The lock on its own transaction id identifies it,
because that has the same virtual transaction as all its other locks. No view shows
which rows it locks, only those that a session waits for. `pg_prepared_xacts` lists the
whole server, but only a session in the same database can end a branch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from txmq.tx.postgres.bounds import bounded
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection
from txmq.tx.xid import XaBranch

DEADLINE_S: Final = 10.0  # of one look; it reads views of the server's memory, no tables
_WRAP: Final = 1 << 32

_STANDING: Final = """
SELECT gid, transaction::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8,
    owner::text, database::text,
       database = current_database(), extract(epoch FROM clock_timestamp() - prepared)::float8,
           age(transaction)
FROM pg_prepared_xacts ORDER BY prepared, gid
"""
# One read of the lock table: two would not agree.
_LOCKS: Final = """
WITH locks AS MATERIALIZED (SELECT * FROM pg_locks),
held AS MATERIALIZED (
    SELECT own.transactionid::text::int8 AS xid32, l.*
    FROM locks own JOIN locks l ON l.pid IS NULL AND l.virtualtransaction = own.virtualtransaction
    WHERE own.pid IS NULL AND own.locktype = 'transactionid'
        AND own.transactionid::text = ANY (%(xids)s::text[])
)
"""
_HELD: Final = """
SELECT DISTINCT xid32,
    CASE WHEN locktype = 'relation' THEN relation::regclass::text ELSE locktype END, mode
FROM held WHERE locktype NOT IN ('transactionid', 'virtualxid')
    AND (database IS NULL OR database = (SELECT oid FROM pg_database
        WHERE datname = current_database()))
ORDER BY 1, 2, 3
"""
_WAITING: Final = """
, waiting AS MATERIALIZED (SELECT *, pg_blocking_pids(pid) AS behind FROM locks WHERE NOT granted
    AND pid IS NOT NULL)
SELECT w.pid, w.behind, a.usename::text, a.application_name,
       extract(epoch FROM clock_timestamp() - coalesce(w.waitstart, a.query_start))::float8,
       w.mode,
       CASE WHEN w.locktype = 'relation' THEN w.relation::regclass::text ELSE w.locktype END,
       (SELECT t.relation::regclass::text || ' (' || t.page || ',' || t.tuple || ')' FROM locks t
        WHERE t.pid = w.pid AND t.locktype = 'tuple' AND t.granted LIMIT 1),
       ARRAY(SELECT DISTINCT h.xid32 FROM held h WHERE 0 = ANY (w.behind)
             AND (h.locktype, h.database, h.relation, h.page, h.tuple, h.transactionid::text,
                 h.classid, h.objid,
                  h.objsubid) IS NOT DISTINCT FROM (w.locktype, w.database, w.relation, w.page,
                      w.tuple,
                  w.transactionid::text, w.classid, w.objid, w.objsubid))
FROM waiting w LEFT JOIN pg_stat_activity a USING (pid) ORDER BY w.pid
"""


class PreparedTransaction(NamedTuple):
    """A prepared transaction of the server.

    `branch` is None for a foreign one; `here` = it is of the connection's database.
    """

    gid: str
    branch: XaBranch | None
    xid: int  # the whole of it, as pg_xact_status takes it
    owner: str | None  # None: the role is gone
    database: str
    here: bool
    age_s: float
    horizon: int  # transactions ago that it began: what VACUUM may not remove since


class Lock(NamedTuple):
    """A lock of a prepared transaction: on a relation, or on an object of that type."""

    on: str
    mode: str


class Blocked(NamedTuple):
    """A session that waits because of a prepared transaction.

    `behind` names other waiting sessions that it queues behind; empty = it waits for
    the prepared transaction itself.
    """

    pid: int
    user: str | None
    application: str | None
    waits_s: float
    mode: str
    on: str  # a relation, a row as `relation (page,tuple)`, or the type of what is locked
    behind: tuple[int, ...]


class HeldLocks(NamedTuple):
    """The locks of a prepared transaction, and the sessions that it blocks."""

    locks: tuple[Lock, ...] = ()
    blocked: tuple[Blocked, ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        """Return the rows that a session waits for; others may be locked as well."""
        return tuple(
            dict.fromkeys(one.on for one in self.blocked if one.on.endswith(")") and not one.behind)
        )


def list_prepared(connection: Connection) -> list[PreparedTransaction]:
    """Return all prepared transactions of the server, oldest first. Raises
    DatabaseError.
    """
    return [
        PreparedTransaction(
            gid, XaBranch.parse(gid), whole_xid(xid, near), owner, database, here, age_s, horizon
        )
        for gid, xid, near, owner, database, here, age_s, horizon in _rows(connection, _STANDING)
    ]


def read_held_locks(
    connection: Connection, prepared: Collection[PreparedTransaction]
) -> dict[str, HeldLocks]:
    """Return the locks of each of `prepared` in this database, and its blocked
    sessions.

    The keys are gids. Raises DatabaseError.
    """
    gids = {one.xid % _WRAP: one.gid for one in prepared}
    values = {"xids": [str(xid) for xid in gids]}
    locks: dict[str, list[Lock]] = {gid: [] for gid in gids.values()}
    for xid, on, mode in _rows(connection, f"{_LOCKS}{_HELD}", values):
        locks[gids[xid]].append(Lock(on, mode))
    waiting = [_Waiting.of(row) for row in _rows(connection, f"{_LOCKS}{_WAITING}", values)]
    return {
        gid: HeldLocks(tuple(locks[gid]), tuple(_blocked_by(xid, waiting)))
        for xid, gid in gids.items()
    }


def whole_xid(xid: int, near: int) -> int:
    """Return the 64-bit transaction id that ends in the 32 bits of `xid`.

    It is the one closest to `near`, a present id: transactions in progress are less
    than 2^31 away from the next id, or the server would have stopped.
    """
    return near - ((near - xid + _WRAP // 2) % _WRAP - _WRAP // 2)


class _Waiting(NamedTuple):
    session: Blocked
    holders: frozenset[int]  # prepared transactions, by the lower half of their ids

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> _Waiting:
        pid, behind, user, application, waits_s, mode, on, waited_row, holders = row
        pids = tuple(other for other in behind if other)
        return cls(
            Blocked(pid, user, application, waits_s or 0.0, mode, waited_row or on, pids),
            frozenset(holders),
        )


def _blocked_by(xid: int, waiting: Sequence[_Waiting]) -> Iterator[Blocked]:
    """Return the sessions that wait for the transaction, then those behind them."""
    reached: set[int] = set()
    circle = [one.session._replace(behind=()) for one in waiting if xid in one.holders]
    while circle:
        yield from circle
        reached |= {session.pid for session in circle}
        circle = [
            one.session
            for one in waiting
            if one.session.pid not in reached and reached.intersection(one.session.behind)
        ]


def _rows(
    connection: Connection, statement: str, values: Mapping[str, object] | None = None
) -> list[tuple[Any, ...]]:
    doing = "looking for prepared transactions"
    with translated(doing), bounded(connection, DEADLINE_S), connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall()
