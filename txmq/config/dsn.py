"""DSNs of PostgreSQL in a settings file, as libpq reads them."""

from __future__ import annotations

from typing import Final

WRITE_IT_SO: Final = (
    'use postgresql://role@host/database or "host=… dbname=…"; in a URL, '
    "write each special character of a password as % and two digits (%40 for @)"
)


def valid_dsn(text: str) -> str:
    """Return a DSN. Raises ValueError, which shows nothing of an invalid one: that may
    be a part of a password.

    Without psycopg2 the DSN stays unchecked; whoever connects says what to install.
    """
    try:
        from psycopg2 import ProgrammingError  # noqa: PLC0415  # few files have a DSN
        from psycopg2.extensions import parse_dsn  # noqa: PLC0415
    except ImportError:
        return text
    try:
        parse_dsn(text)
    except ProgrammingError:
        raise ValueError(f"is not a DSN: {WRITE_IT_SO}") from None
    return text
