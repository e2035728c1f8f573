"""Brokers that use a business database, with their last reports.

A token row may be dropped once no broker can ask for it any more. Only the brokers know
that: each writes here, every so often, the token of its oldest undecided transaction.
Silence proves nothing. A broker that stops reporting keeps its rows until it is back,
or until an operator removes it.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from uuid import UUID

from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection

_REPORT: Final = """
INSERT INTO public.txmq_broker AS known (log_id, name, oldest_undecided, reported_at)
VALUES (%s::uuid, %s, %s::uuid, clock_timestamp())
ON CONFLICT (log_id) DO UPDATE SET name = EXCLUDED.name,
    oldest_undecided = EXCLUDED.oldest_undecided,
    reported_at = EXCLUDED.reported_at, forgotten_at = NULL, forgotten_reason = NULL
"""
_MICROS: Final = "(extract(epoch FROM {}) * 1000000)::int8"
_REGISTERED: Final = f"""
SELECT log_id::text, name, oldest_undecided::text, {_MICROS.format("reported_at")},
    {_MICROS.format("forgotten_at")},
       forgotten_reason, (SELECT count(*) FROM public.txmq_outbox o WHERE o.log_id = b.log_id)
FROM public.txmq_broker b ORDER BY name, log_id
"""  # noqa: S608  # constants
_FORGET: Final = """
UPDATE public.txmq_broker SET forgotten_at = now(), forgotten_reason = %s
WHERE log_id = %s::uuid
"""


class Broker(NamedTuple):
    """The last report of a broker; times are microseconds by the database's clock.

    `oldest_undecided` is a token, None where everything is decided. `waiting` is the
    number of its rows in the outbox.
    """

    log_id: UUID
    name: str
    oldest_undecided: UUID | None
    reported_at: int
    forgotten_at: int | None
    forgotten_reason: str | None
    waiting: int


def report(connection: Connection, log_id: UUID, name: str, oldest_undecided: UUID | None) -> None:
    """Store the report of a broker; a forgotten broker is registered again. Raises
    DatabaseError.
    """
    oldest = None if oldest_undecided is None else str(oldest_undecided)
    with translated("reporting a broker"), connection.cursor() as cursor:
        cursor.execute(_REPORT, (str(log_id), name, oldest))


def registered(connection: Connection) -> list[Broker]:
    """Return all brokers that have ever reported, forgotten ones too. Raises
    DatabaseError.
    """
    with translated("listing brokers"), connection.cursor() as cursor:
        cursor.execute(_REGISTERED)
        rows = cursor.fetchall()
    return [
        Broker(UUID(log), name, None if old is None else UUID(old), *rest)
        for log, name, old, *rest in rows
    ]


def forget(connection: Connection, log_id: UUID, reason: str) -> bool:
    """Remove a lost broker, so that it keeps no rows; False where there is none.

    Raises DatabaseError.
    """
    with translated("forgetting a broker"), connection.cursor() as cursor:
        cursor.execute(_FORGET, (reason, str(log_id)))
        return bool(cursor.rowcount)
