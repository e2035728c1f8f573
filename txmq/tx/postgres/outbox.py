"""The outbox: messages of transactions that wait in the database for their broker.

A row is written by the transaction of its messages, and has the token of the bundle
that it will be. The process that fetches it stores the bundle, has it decided, and only
then deletes the row. All of that may happen twice, even at once in two processes: the
token makes it count once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from txmq.errors import DatabaseUnavailable, LocalProtocolError
from txmq.tx.postgres.commit import NOT_REPLICATED
from txmq.tx.postgres.driver import Driver, array
from txmq.tx.postgres.errors import translated

AT_ONCE: Final = 256  # rows of one fetch
BYTES_AT_ONCE: Final = 8 << 20
MOST_ASIDE: Final = 1_000  # rows
MOST_WAITING: Final = 100_000  # keys, which each fetch compares with those of rows
# isolation levels at which each statement sees all that was committed before it
_FRESH: Final = ("read committed", "read uncommitted")
_STATUS: Final = """
SELECT log::text, current_setting('transaction_isolation'),
       EXISTS (SELECT FROM public.txmq_broker b WHERE b.log_id = log AND b.forgotten_at IS NULL),
       public.txmq_outbox_waits(log, NULL)
FROM unnest(%s::text::uuid[]) log
"""
_READERS: Final = "SELECT log_id::text FROM public.txmq_broker WHERE forgotten_at IS NULL"
_LOOK: Final = """
SELECT EXISTS (SELECT FROM public.txmq_broker WHERE log_id = %(log_id)s::uuid
           AND forgotten_at IS NULL),
       public.txmq_outbox_waits(%(log_id)s::uuid, %(keys)s::text::int8[])
"""
# The transaction itself fences the token of a bundle that the broker may have: that
# bundle can never be committed.
_EXCHANGE: Final = """
UPDATE public.txmq_token SET state = 'R' WHERE tok = %(replaced)s::uuid
    AND log_id = %(log_id)s::uuid;
INSERT INTO public.txmq_token (tok, log_id) VALUES (%(token)s::uuid, %(log_id)s::uuid);
"""
_ENQUEUE: Final = """
INSERT INTO public.txmq_outbox (log_id, tok, service, messages, keys, content)
VALUES (%(log_id)s::uuid, %(token)s::uuid, %(service)s::text, %(messages)s::int,
    %(keys)s::text::int8[], %(content)s::bytea)
"""
# Only where there are rows: its lock keeps all others from raising their floors.
_DELETE: Final = """
DELETE FROM public.txmq_outbox
WHERE log_id = %(log_id)s::uuid AND seq = ANY (%(done)s::text::int8[])
    AND (seq, tok) IN (SELECT * FROM unnest(%(done)s::text::int8[], %(tokens)s::text::uuid[]));
"""
# A table of the join, because a scan of an outbox without rows would not evaluate a
# condition on the floor. A row that waits for one of its keys is fetched while others
# of them do not wait yet.
_FETCH: Final = """
SELECT seq, tok::text, service, keys, content FROM (
    SELECT *, sum(octet_length(content)) OVER (ORDER BY seq) AS total,
        row_number() OVER (ORDER BY seq) AS place
    FROM public.txmq_outbox_settle(%(log_id)s::uuid) AS floor, LATERAL (
        SELECT * FROM public.txmq_outbox WHERE log_id = %(log_id)s::uuid AND seq >= floor
            AND seq <> ALL (%(aside)s::text::int8[])
            AND NOT (keys <> '{}' AND keys <@ %(waiting)s::text::int8[])
        ORDER BY seq LIMIT %(most)s::int8) AS first
) AS sized WHERE place = 1 OR total <= %(bytes)s::int8 ORDER BY seq
"""
# A row that is seen may be committed here and at no synchronous standby, where somebody
# has cancelled the wait. So something is written behind it, whose commit waits. It is a
# statement of its own, because a fetch that raises the floor commits without waiting.
_CONFIRM: Final = """
SET LOCAL synchronous_commit = on;
SELECT pg_logical_emit_message(true, 'txmq.outbox', '')
WHERE current_setting('synchronous_standby_names') <> ''
"""


class OutboxStatus(NamedTuple):
    """The state of the outbox for one broker."""

    fetched: bool  # the broker is registered in this database, and fetches rows
    waiting: bool  # there are rows for it


class NewOutboxRow(NamedTuple):
    """A transaction's messages for one broker, to be written as a row.

    `replaced` is the token of a bundle that the broker may have of the transaction.
    """

    log_id: UUID
    token: UUID
    replaced: UUID | None
    service: str
    messages: int
    keys: list[int]
    content: bytes


class PublishedRow(NamedTuple):
    """A row that the broker has, so that it may be deleted.

    The token tells it from a later row: after a failover the database gives a number
    again.
    """

    seq: int
    token: UUID


class OutboxRow(NamedTuple):
    """A row of the outbox, as its publisher needs it."""

    seq: int
    token: UUID
    service: str
    keys: Sequence[int]
    content: bytes

    @property
    def published(self) -> PublishedRow:
        """Return what names the row once it is published."""
        return PublishedRow(self.seq, self.token)


class SetAside:
    """Rows that cannot be published, and the keys that wait for them. Others go on."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}  # why, by the number of the row
        self.keys: set[int] = set()

    def add(self, row: OutboxRow, why: str) -> None:
        """Set a row aside, for that reason."""
        self.rows[row.seq] = why
        self.keys.update(row.keys)

    def holds(self, row: OutboxRow) -> bool:
        """Return whether a row has to wait for one of these. Then later rows of its
        other keys wait as well.
        """
        if self.keys.isdisjoint(row.keys):
            return False
        self.keys.update(row.keys)
        return True

    @property
    def full(self) -> bool:
        """True where there are too many to look behind them."""
        return len(self.rows) >= MOST_ASIDE or len(self.keys) >= MOST_WAITING

    def __str__(self) -> str:
        """Name the first row, and say how many there are; "" = none."""
        if not self.rows:
            return ""
        seq, why = next(iter(self.rows.items()))
        more = len(self.rows) - 1
        return f"row {seq}: {why}" + (f" ({more} more are set aside)" if more else "")


async def read_readers(driver: Driver) -> list[UUID]:
    """Return the logs of the brokers that work on the database. Raises
    DatabaseError.
    """
    with translated("looking for brokers"):
        return [UUID(log) for (log,) in await driver.execute(_READERS, ())]


async def read_status(driver: Driver, log_ids: Sequence[UUID]) -> dict[UUID, OutboxStatus]:
    """Return the outbox's state for the brokers with these logs.

    It takes one round trip in the caller's transaction. Raises LocalProtocolError in a
    transaction whose snapshot is older than this statement, DatabaseError.
    """
    with translated("looking at the outbox"):
        rows = await driver.execute(_STATUS, (array(log_ids),))
    if any(isolation not in _FRESH for _log, isolation, *_ in rows):
        hint = "use READ COMMITTED, or on_unavailable='fail'"
        raise LocalProtocolError(
            "messages could overtake those in the outbox, which a snapshot hides", hint=hint
        )
    return {UUID(log): OutboxStatus(*found) for log, _isolation, *found in rows}


async def read_key_status(driver: Driver, log_id: UUID, keys: Sequence[int]) -> OutboxStatus:
    """Return the outbox's state for one broker; only rows with one of the keys wait.

    It takes one round trip in the caller's transaction. Raises DatabaseConflict if the
    transaction's snapshot may hide such rows, DatabaseError.
    """
    values = {"log_id": str(log_id), "keys": array(keys)}
    with translated("looking at the outbox"):
        [found] = await driver.execute(_LOOK, values)
    return OutboxStatus(*found)


async def enqueue(driver: Driver, entering: Sequence[NewOutboxRow]) -> None:
    """Put messages into the outbox, in the caller's transaction. Raises
    DatabaseError.
    """
    with translated("writing to the outbox"):
        for row in entering:
            values = row._asdict() | {
                "log_id": str(row.log_id),
                "token": str(row.token),
                "keys": array(row.keys),
            }
            if row.replaced is not None:
                values |= {"replaced": str(row.replaced)}
            await driver.execute(_ENQUEUE if row.replaced is None else _EXCHANGE + _ENQUEUE, values)


async def fetch(
    driver: Driver, log_id: UUID, done: Sequence[PublishedRow], aside: SetAside
) -> list[OutboxRow]:
    """Delete the rows that are done, and return the next ones in order, without those
    set aside and those whose keys all wait. Raises DatabaseError, also where no
    synchronous standby has confirmed them.
    """
    values = {
        "log_id": str(log_id),
        "done": array(row.seq for row in done),
        "tokens": array(row.token for row in done),
        "aside": array(aside.rows),
        "waiting": array(aside.keys),
        "most": AT_ONCE,
        "bytes": BYTES_AT_ONCE,
    }
    with translated("fetching from the outbox"):
        rows = await driver.execute(_DELETE + _FETCH if done else _FETCH, values)
    if rows:
        await _require_confirmed(driver)
    return [
        OutboxRow(seq, UUID(token), service, keys, bytes(content))
        for seq, token, service, keys, content in rows
    ]


async def _require_confirmed(driver: Driver) -> None:
    """Require that a synchronous standby, if there is to be one, has what was seen."""
    with translated("waiting for a standby"), driver.noted() as notices:
        await driver.execute(_CONFIRM)
    if any(NOT_REPLICATED in notice for notice in notices):
        raise DatabaseUnavailable(
            "no synchronous standby has confirmed the rows of the outbox",
            hint="a failover could lose them: the broker waits for a standby",
        )
