"""A database of recovery: connected on demand, and again after a failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from txmq.errors import DatabaseError
from txmq.model.decider import BranchPosition
from txmq.model.message import Decision
from txmq.recover.server_log import BranchTrace, read_log
from txmq.tx.postgres.blocking import read_server
from txmq.tx.postgres.branch_finish import FORBIDDEN, finish, grant_for, statuses
from txmq.tx.postgres.identity import Server
from txmq.tx.postgres.prepared import BY_OTHERS, Ending
from txmq.tx.postgres.prepared_list import (
    HeldLocks,
    PreparedTransaction,
    list_prepared,
    read_held_locks,
)
from txmq.tx.postgres.session import Connection, connect

DatabaseId = tuple[int, str]  # the server's system id and the database's name
APPLICATION: Final = "txmq xa recovery"


class BranchEnd(NamedTuple):
    """The end of a branch that is gone: pg_xact_status of its id, if it is its own."""

    status: str | None
    trace: BranchTrace


class RecoveredDatabase:
    """One database, under its name in the settings. For one thread at a time."""

    def __init__(self, name: str, dsn: str) -> None:
        self.name = name
        self.trouble = ""  # the error of the last request, "" after a success
        self.id: DatabaseId | None = None  # None until the database has answered
        self.timeline = 0  # of the server that `list_prepared` has read
        self.has_parted = False  # from the server that was read before
        self._position = 0  # in the log of that server
        self._connect: Callable[[], Connection] = lambda: connect(dsn, application_name=APPLICATION)
        self._connection: Connection | None = None

    def list_prepared(self) -> list[PreparedTransaction]:
        """Return the prepared transactions of the server; none after an error."""
        try:
            with self._session() as connection:
                self._note_server(read_server(connection), connection.info.dbname)
                found = list_prepared(connection)
        except DatabaseError as error:
            self.trouble = str(error)
            return []
        self.trouble = ""
        return found

    def _note_server(self, server: Server, database: str) -> None:
        """Note the server, and whether it may lack commits of the one before: after a
        failover, or where an earlier state was restored.
        """
        timeline, position = server.identity.timeline, server.position
        found = server.identity.system_id, database
        if found == self.id and (timeline != self.timeline or position < self._position):
            self.has_parted = True
        self.id, self.timeline, self._position = found, timeline, position

    def holds(self, prepared: Collection[PreparedTransaction]) -> dict[str, HeldLocks]:
        """Return locks and blocked sessions by gid; none after an error."""
        try:
            with self._session() as connection:
                return read_held_locks(connection, prepared)
        except DatabaseError as error:
            self.trouble = str(error)
            return {}

    def finish(self, branch: PreparedTransaction, decision: Decision) -> Ending:
        """End a branch as decided.

        Raises DatabaseError if it is unchanged, or if its end is unknown.
        """
        with self._session() as connection:
            try:
                ending = finish(connection, branch, decision)
                if ending in BY_OTHERS and read_server(connection).identity.timeline != (
                    self.timeline
                ):
                    return Ending.UNKNOWN  # after a failover the id may be another's
            except DatabaseError as error:
                if error.sqlstate != FORBIDDEN:
                    raise
                raise DatabaseError(
                    f"The role may not end branch {branch.gid}", hint=grant_for(connection, branch)
                ) from None
        return ending

    def ends(self, branches: Sequence[tuple[int, BranchPosition | None]]) -> list[BranchEnd]:
        """Return the ends of branches, by their ids and positions. Raises
        DatabaseError.
        """
        with self._session() as connection:
            # The log is read behind the statuses: they may not be of a later timeline.
            found = statuses(connection, (xid for xid, _at in branches))
            server_log = read_log(connection, [at for _xid, at in branches])
        return [BranchEnd(found[xid], server_log.trace(at)) for xid, at in branches]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _session(self) -> Iterator[Connection]:
        """Lend the connection; after a failure in the block the next one is new."""
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        try:
            yield self._connection
        except DatabaseError as error:
            if error.sqlstate != FORBIDDEN:
                self.close()
            raise
