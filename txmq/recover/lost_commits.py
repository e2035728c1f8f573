"""Commits that a database has lost, and whose messages are published.

A failover to an asynchronous standby, or a restore, takes back commits that were
acknowledged. Messages of those that were undecided are dropped, because their token
rows are gone. Messages of the others cannot be taken back. The token row of a commit is
kept for a day at least, so its absence tells.

Messages that have waited in the outbox are not compared: the broker does not know of
which database they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from uuid import UUID

from txmq.tx.postgres.blocking import read_server
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.partitions import partitions
from txmq.tx.postgres.session import plain_cursor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from txmq.tx.postgres.session import Connection

PAGE_SIZE: Final = 1_000
# 'C' by the producer, 'D' once a resolver has found it.
_KEPT: Final = """
SELECT tok::text FROM public.txmq_token
WHERE log_id = %s::uuid AND tok = ANY (%s::uuid[]) AND state IN ('C', 'D')
"""


class CallingClient(Protocol):
    """A client that makes control calls."""

    def call(self, name: str, /, **args: object) -> dict[str, Any]: ...


class LostCommitsReport(NamedTuple):
    """Transactions that the database lacks, as in the call `tx.committed`.

    `compared` is the number of those that it has committed, by the broker's log, with
    tokens from `since` on: of earlier ones it keeps no rows.
    """

    lost: tuple[dict[str, Any], ...]
    compared: int
    since: UUID


def find_lost(client: CallingClient, connection: Connection, since: UUID) -> LostCommitsReport:
    """Return what the database lacks of its commits with tokens from `since` on.

    Raises TxmqError.
    """
    database = read_server(connection).identity
    with translated("reading the token table"):
        closed, *_days = partitions(connection)
    since = max(since, closed.upper)
    log_id, after = str(client.call("broker.show")["log_id"]), since.hex
    lost, compared = list[dict[str, Any]](), 0
    while True:
        page = client.call(
            "tx.committed",
            system_id=database.system_id,
            database_oid=database.database_oid,
            after=after,
            limit=PAGE_SIZE,
        )
        rows = page["transactions"]
        kept = _kept(connection, log_id, [row["token"] for row in rows])
        lost += [row for row in rows if UUID(row["token"]) not in kept]
        compared, after = compared + len(rows), page["next"]
        if after is None:
            return LostCommitsReport(tuple(lost), compared, since)


def _kept(connection: Connection, log_id: str, tokens: Sequence[str]) -> set[UUID]:
    with translated("reading the token table"), plain_cursor(connection) as cursor:
        cursor.execute(_KEPT, (log_id, [str(UUID(token)) for token in tokens]))
        return {UUID(token) for (token,) in cursor.fetchall()}
