"""A database whose prepared branches are looked after: connected when it is needed, and
again after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from txmq.errors import DatabaseError
from txmq.model.message import Decision
from txmq.tx.postgres.branch_finish import FORBIDDEN, finish, grant_for, statuses
from txmq.tx.postgres.identity import read_server
from txmq.tx.postgres.prepared import Ending
from txmq.tx.postgres.prepared_list import Hold, Prepared, holds, standing
from txmq.tx.postgres.session import Connection, connect

Place = tuple[int, str]  # a server's system id and a database there
APPLICATION: Final = "txmq xa recovery"


class Database:
    """One database, by the name that the settings give it. For one thread at a time."""

    def __init__(self, name: str, dsn: str) -> None:
        self.name = name
        self.trouble = ""  # why it cannot be asked now
        self.place: Place | None = None  # known once it has been asked
        self._connect: Callable[[], Connection] = lambda: connect(dsn, application_name=APPLICATION)
        self._connection: Connection | None = None

    def standing(self) -> list[Prepared]:
        """All that stands prepared on the server, or nothing where it cannot be asked:
        `trouble` tells why.
        """
        try:
            with self._asking() as connection:
                self.place = read_server(connection).identity.system_id, connection.info.dbname
                found = standing(connection)
        except DatabaseError as error:
            self.trouble = str(error)
            return []
        self.trouble = ""
        return found

    def holds(self, prepared: Collection[Prepared]) -> dict[str, Hold]:
        """What each locks and whom it blocks, by gid; nothing of them where the
        database cannot be asked.
        """
        try:
            with self._asking() as connection:
                return holds(connection, prepared)
        except DatabaseError as error:
            self.trouble = str(error)
            return {}

    def finish(self, branch: Prepared, decision: Decision) -> Ending:
        """Ends a branch as decided. Raises DatabaseError where it stands as it did, or
        nobody knows.
        """
        with self._asking() as connection:
            try:
                return finish(connection, branch, decision)
            except DatabaseError as error:
                if error.sqlstate != FORBIDDEN:
                    raise
                raise DatabaseError(
                    "the role may not end it", hint=grant_for(connection, branch)
                ) from None

    def statuses(self, xids: Iterable[int]) -> dict[int, str | None]:
        """What pg_xact_status says of transactions. Raises DatabaseError."""
        with self._asking() as connection:
            return statuses(connection, xids)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _asking(self) -> Iterator[Connection]:
        """A connection for the block. After a failure that may have left it in any
        state, the next one is new.
        """
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        try:
            yield self._connection
        except DatabaseError as error:
            if error.sqlstate != FORBIDDEN:
                self.close()
            raise
