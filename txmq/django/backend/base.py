"""Django's backend of PostgreSQL, with connections that take messages along.

Django's hooks all come after COMMIT. Its connection does not: the driver's `commit()`.
"""

from __future__ import annotations

from typing import Any

from django.db import Error
from django.db.backends.postgresql import base
from django.db.backends.postgresql.psycopg_any import is_psycopg3

from txmq.errors import TxmqError


class _Psycopg:
    """The module psycopg, with connections that take messages along."""

    def connect(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # psycopg's
        from txmq.psycopg import EnlistConnection  # noqa: PLC0415  # psycopg2 may be there instead

        return EnlistConnection.connect(*args, **options)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # a module's
        return getattr(base.Database, name)


class EnlistMixin:
    """Takes messages along; for other backends of PostgreSQL as well, such as
    PostGIS.
    """

    Database = _Psycopg() if is_psycopg3 else base.Database

    def get_connection_params(self) -> dict[str, Any]:
        """Return the arguments of the driver's `connect()`."""
        params: dict[str, Any] = super().get_connection_params()  # type: ignore[misc]  # a mixin
        if not is_psycopg3:
            from txmq.postgres import EnlistConnection  # noqa: PLC0415  # psycopg may be there instead

            params.setdefault("connection_factory", EnlistConnection)
        return params

    def commit(self) -> None:
        """Commit; where the messages cannot go along, roll back and raise.

        Django knows no errors of txmq: without this the functions of `on_commit` would
        wait for the next commit.
        """
        try:
            super().commit()  # type: ignore[misc]  # a mixin
        except TxmqError:
            try:
                self.rollback()  # type: ignore[attr-defined]  # likewise
            except Error:
                self.close()  # type: ignore[attr-defined]  # likewise
            raise


class DatabaseWrapper(EnlistMixin, base.DatabaseWrapper):  # type: ignore[misc]  # Django has no types
    """The connection of a thread to a database."""
