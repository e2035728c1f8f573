"""A database of recovery: connected on demand, and again after a failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple
from uuid import UUID

from txmq.errors import DatabaseError
from txmq.model.decider import BranchPosition
from txmq.model.message import Decision
from txmq.recover.server_log import BranchTrace, read_log
from txmq.tx.postgres.blocking import read_server
from txmq.tx.postgres.branch_finish import FORBIDDEN, NOT_GIVEN, finish, grant_for, statuses
from txmq.tx.postgres.brokers import last_report
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
ServerDatabase = tuple[int, int]  # the same with the database's oid
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
        self._oid = 0
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
        self._oid = server.identity.database_oid
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

    def shared_with(self, log_id: UUID | None, reports: Mapping[ServerDatabase, int]) -> int | None:
        """Return the last transaction id that a copy shares with the original, by the
        broker's reports that it lacks; None = it lacks none. Raises DatabaseError.
        """
        stored = 0 if self.id is None else reports.get((self.id[0], self._oid), 0)
        if log_id is None or not stored:
            return None
        with self._session() as connection:
            last = last_report(connection, log_id)
        return None if last is None or last.number >= stored else last.xid

    def ends(
        self, branches: Sequence[tuple[int, BranchPosition | None]], shared: int | None = None
    ) -> list[BranchEnd]:
        """Return the ends of branches, by their ids and positions. `shared` as
        `shared_with`. Raises DatabaseError.
        """
        with self._session() as connection:
            # The log is read behind the statuses: they may not be of a later timeline.
            found = statuses(connection, (xid for xid, _at in branches))
            server_log = read_log(connection, [at for _xid, at in branches])
        return [
            BranchEnd(found[xid], server_log.trace(at).or_lost(_doubt(xid, found[xid], shared)))
            for xid, at in branches
        ]

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


def _doubt(xid: int, status: str | None, shared: int | None) -> str:
    """Return why the status of an id may be another transaction's; "" = it is not."""
    if status == NOT_GIVEN:
        return (
            f"the server has not given its transaction id {xid} yet: it is a restored database, "
            "or a copy"
        )
    if shared is not None and xid > shared:
        return (
            f"the database lacks reports of the broker: it was restored, or is a copy, and id {xid}"
            " may be another transaction's; look whether its rows are there"
        )
    return ""
