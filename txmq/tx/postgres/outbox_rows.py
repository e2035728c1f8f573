"""Rows of the outbox for operators: listed, dropped, given another token.

See docs/FORMATS.md 6.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from uuid import UUID

from txmq.batch import with_producer
from txmq.tx.outbox_entry import pack_entries, unpack_entries
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection, transaction

_LISTED: Final = """
SELECT seq, tok::text, log_id::text, service, messages, octet_length(content),
       (extract(epoch FROM at) * 1000000)::int8
FROM public.txmq_outbox WHERE %(seq)s::int8 IS NULL OR seq = %(seq)s ORDER BY seq LIMIT %(most)s
"""
_CONTENT: Final = "SELECT content FROM public.txmq_outbox WHERE seq = %s AND tok = %s::uuid"
_DELETE: Final = "DELETE FROM public.txmq_outbox WHERE seq = %s AND tok = %s::uuid"
_RENEW: Final = """
UPDATE public.txmq_token SET state = 'R' WHERE tok = %(old)s::uuid AND log_id = %(log_id)s::uuid;
INSERT INTO public.txmq_token (tok, log_id) VALUES (%(new)s::uuid, %(log_id)s::uuid);
UPDATE public.txmq_outbox SET tok = %(new)s::uuid, content = %(content)s WHERE seq = %(seq)s
    AND tok = %(old)s::uuid
"""


class ListedRow(NamedTuple):
    """A row of the outbox as operators see it, without its content.

    `size` is that of its content in bytes, `at` the begin of its transaction in
    microseconds since the epoch.
    """

    seq: int
    token: UUID
    log_id: UUID
    service: str
    messages: int
    size: int
    at: int


def list_rows(connection: Connection, most: int) -> list[ListedRow]:
    """Return the rows of all brokers in the order of publication. Raises
    DatabaseError.
    """
    return _listed(connection, None, most)


def find_row(connection: Connection, seq: int) -> ListedRow | None:
    """Return the row of that number. Raises DatabaseError."""
    return next(iter(_listed(connection, seq, 1)), None)


def _listed(connection: Connection, seq: int | None, most: int) -> list[ListedRow]:
    with translated("listing the outbox"), connection.cursor() as cursor:
        cursor.execute(_LISTED, {"seq": seq, "most": most})
        return [
            ListedRow(number, UUID(tok), UUID(log), *rest) for number, tok, log, *rest in cursor
        ]


def content_of(connection: Connection, listed: ListedRow) -> bytes | None:
    """Return the content of a row; None = there is no such row. Raises
    DatabaseError.
    """
    with translated("looking into the outbox"), connection.cursor() as cursor:
        cursor.execute(_CONTENT, (listed.seq, str(listed.token)))
        row = cursor.fetchone()
    return None if row is None else bytes(row[0])


def drop(connection: Connection, listed: ListedRow) -> bool:
    """Delete a row, so that its messages are never sent; False where it is gone.

    Raises DatabaseError.
    """
    with translated("dropping a row of the outbox"), connection.cursor() as cursor:
        cursor.execute(_DELETE, (listed.seq, str(listed.token)))
        return bool(cursor.rowcount)


def renew(connection: Connection, row: ListedRow, token: UUID) -> bool:
    """Set the token of a row to a newer one; False = the row has changed meanwhile.

    Brokers refuse a row whose token is older than the outcomes that they keep. Raises
    DatabaseError, RemoteProtocolError where the row is damaged.
    """
    content = content_of(connection, row)
    if content is None:
        return False
    entries = [
        entry._replace(batch=with_producer(entry.batch, token.bytes))
        for entry in unpack_entries(content, row.token)
    ]
    values = {"old": str(row.token), "new": str(token), "log_id": str(row.log_id)}
    with translated("renewing a row of the outbox"), transaction(connection) as cursor:
        cursor.execute(_RENEW, values | {"seq": row.seq, "content": pack_entries(entries)})
        return bool(cursor.rowcount)
