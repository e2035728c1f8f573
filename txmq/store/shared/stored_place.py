"""The place in the partition that a node's tables stand for, beside these tables.

It is a row of theirs, so that index and snapshots have it with the same commit. It may
be somewhat behind their position: a reader skips what they have already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from txmq.store.shared.rules import Place
from txmq.store.tables import META

if TYPE_CHECKING:
    from txmq.store.index.lmdb_tables import LmdbTables

PLACE_ROW = b"place"


def save_place(tables: LmdbTables, place: Place) -> None:
    """Let the next commit of the tables have a place."""
    log_id = None if place.log_id is None else place.log_id.bytes
    tables[META].put(PLACE_ROW, (log_id, *place._replace(log_id=None)))


def drop_place(tables: LmdbTables) -> None:
    """Let the next commit of the tables have none: they are a broker's alone."""
    tables[META].delete(PLACE_ROW)


def load_place(tables: LmdbTables) -> Place | None:
    """Return the place that the tables were saved with, None without any."""
    row = tables[META].get(PLACE_ROW)
    if row is None:
        return None
    log_id, *fields = row
    return Place(*fields)._replace(log_id=None if log_id is None else UUID(bytes=log_id))
