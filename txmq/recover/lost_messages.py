"""Commits of a database whose messages a restored log has lost.

A commit leaves a token row, and the log that has its messages knows its token. So a
token of the lost span of time that the log does not know names rows whose messages are
gone. What waits in the outbox is not lost: it is published from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from txmq.client.protocol.transaction.tokens import first_token_at
from txmq.model.units import DAY, HOUR
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import plain_cursor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from txmq.recover.lost_commits import CallingClient
    from txmq.tx.postgres.session import Connection

PAGE_SIZE: Final = 1_000
LONGEST_US: Final = DAY  # from the making of a token to its commit
SKEW_US: Final = HOUR  # by which the clock of a token's maker may have been ahead
# `xmin` of the rows that the transaction wrote, outside of savepoints
_COMMITTED: Final = """
SELECT tok::text, (xid::text::bigint & 4294967295)::text,
    (extract(epoch FROM at) * 1000000)::bigint
FROM public.txmq_token t
WHERE log_id = %(log_id)s::uuid AND tok > %(after)s::uuid AND tok < %(until)s::uuid
    AND state IN ('C', 'D') AND NOT EXISTS (
        SELECT FROM public.txmq_outbox o WHERE o.log_id = t.log_id AND o.tok = t.tok)
ORDER BY tok LIMIT %(limit)s
"""


class LostMessages(NamedTuple):
    """A commit whose messages the log lacks; `xmin` is that of its rows."""

    token: str
    committed_at: int
    xmin: str


def lost_messages(
    client: CallingClient, connection: Connection, log_id: str, restore: Mapping[str, Any]
) -> Iterator[LostMessages]:
    """Yield what the database has committed before a restore of the log, and the log
    does not know; by token, so by time. Raises TxmqError.
    """
    after = first_token_at(max(restore["stored_to"] - LONGEST_US, 0))
    until = first_token_at(restore["restored_at"] + SKEW_US)
    while page := _committed(connection, log_id, after, until):
        known = client.call("tx.states", tokens=[one.token for one in page])["transactions"]
        yield from (one for one in page if one.token not in known)
        after = UUID(page[-1].token)


def _committed(connection: Connection, log_id: str, after: UUID, until: UUID) -> list[LostMessages]:
    values = {"log_id": log_id, "after": str(after), "until": str(until), "limit": PAGE_SIZE}
    with translated("reading the token table"), plain_cursor(connection) as cursor:
        cursor.execute(_COMMITTED, values)
        return [LostMessages(UUID(tok).hex, at, xmin) for tok, xmin, at in cursor.fetchall()]
