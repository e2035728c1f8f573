"""Tables of PostgreSQL that a user names: their names in SQL, and their creation."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from psycopg2.errors import DuplicateTable, UniqueViolation
from psycopg2.sql import Composed, Identifier

from txmq.errors import ConfigError
from txmq.tx.postgres.session import Cursor

NAME_PARTS: Final = 2  # schema and table
NO_NAME: Final = "\0%"  # psycopg2 takes a per cent sign in a statement for a place of a value


def table_name(name: str) -> Identifier:
    """Return the name of a table, with or without its schema, as SQL.

    Raises ConfigError for what can be no name.
    """
    parts = name.split(".")
    if len(parts) > NAME_PARTS or not all(parts) or any(sign in name for sign in NO_NAME):
        raise ConfigError(
            f"table {name!r}"[:200],
            "the name is none of a table, with or without a schema",
            hint="public.orders, or orders",
        )
    return Identifier(*parts)


def create(cursor: Cursor, statement: Composed) -> None:
    """Create a table, unless another job does so at the same time.

    IF NOT EXISTS does not see what is not committed yet: it fails when that is.
    """
    with suppress(UniqueViolation, DuplicateTable):
        cursor.execute(statement)
