"""Django's backend of PostgreSQL, with connections that take messages along.

Django's hooks all come after COMMIT. Its connection does not: psycopg2's `commit()`.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.db.backends.postgresql import base
from django.db.backends.postgresql.psycopg_any import is_psycopg3

from txmq.errors import TxmqError
from txmq.postgres import EnlistConnection


class EnlistMixin:
    """Takes messages along; for other backends of PostgreSQL as well, such as
    PostGIS.
    """

    def get_connection_params(self) -> dict[str, Any]:
        """Return the arguments of psycopg2's `connect()`."""
        if is_psycopg3:
            raise ImproperlyConfigured(
                "txmq.django.backend needs psycopg2, and Django prefers psycopg 3, which is "
                "installed: uninstall it, or use txmq.emit"
            )
        params: dict[str, Any] = super().get_connection_params()  # type: ignore[misc]  # a mixin
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
