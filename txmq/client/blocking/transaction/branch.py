"""One database's part in an XA transaction: a connection that the caller lends, and the
branch on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from txmq.crashpoints import crashpoint
from txmq.errors import DatabaseError, InDoubt, TransactionAborted, TxmqError
from txmq.model.message import COMMIT, Decision
from txmq.tx.coordinator import Vote
from txmq.tx.postgres.caller import require_usable, roll_back, savepoint
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.identity import require_supported, server_of
from txmq.tx.postgres.prepared import (
    Ending,
    Work,
    begin_branch,
    commit_prepared,
    look,
    prepare,
    require_two_phase,
    roll_back_prepared,
)
from txmq.tx.postgres.session import Connection
from txmq.tx.xid import Branch
from txmq.wire.group import Participant


class Ballot(NamedTuple):
    """A vote, and why it is not a yes."""

    vote: Vote
    error: TxmqError | None = None


class LentBranch:
    """For one thread at a time."""

    def __init__(self, connection: Connection, branch: Branch) -> None:
        self.branch = branch
        self._connection = connection
        self._work = Work(None, "")

    @property
    def wrote(self) -> bool:
        """Whether it has done what is to be committed, by the last look."""
        return self._work.xid is not None

    @property
    def participant(self) -> Participant:
        """How the home broker's group names it."""
        identity = server_of(self._connection).identity
        database = self._connection.info.dbname
        place = (identity.system_id, identity.database_oid, database, self._work.owner)
        return ("postgres", *place, self.branch.gid, self._work.xid)

    @property
    def room(self) -> tuple[int, int]:
        """The system id of the server, and how many prepared transactions it holds at
        most.
        """
        server = server_of(self._connection)
        return server.identity.system_id, server.max_prepared_transactions

    def begin(self) -> None:
        """Opens the transaction, where the server is fit for it. Raises
        UnsupportedServer, TwoPhaseOff, as `begin`.
        """
        require_usable(self._connection)
        server = server_of(self._connection)
        require_supported(server)
        require_two_phase(server)
        begin_branch(self._connection, self.branch)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A block whose rows are taken back where it raises."""
        with savepoint(self._connection):
            yield

    def look(self) -> None:
        """Finds out whether it wrote. Raises where the transaction is not open and
        sound any more.
        """
        self._work = look(self._connection, self.branch)

    def commit(self) -> None:
        """Commits it by itself. Raises InDoubt, where it wrote and nobody knows; else
        it is rolled back.
        """
        try:
            guarded_commit(self._connection, self.branch.token)
        except InDoubt as doubt:
            if self.wrote:
                hint = "there were no messages and no other database, so only its rows can tell"
                raise InDoubt(doubt.message, token=doubt.token, hint=hint) from doubt
            raise TransactionAborted(doubt.message) from doubt

    def vote(self) -> Ballot:
        """Prepares it, or ends it where it only read. Then the connection is ready for
        other work.
        """
        try:
            if not self.wrote:
                self.commit()
                return Ballot(Vote.READ_ONLY)
            prepare(self._connection, self.branch)
        except InDoubt as doubt:
            return Ballot(Vote.UNCLEAR, doubt)
        except TxmqError as error:
            return Ballot(Vote.NO, error)
        crashpoint("xa.between_prepares")
        return Ballot(Vote.PREPARED)

    def end(self, decision: Decision) -> bool | None:
        """Ends the prepared branch: whether it ended as decided, None where that cannot
        be told yet.
        """
        finish = commit_prepared if decision is COMMIT else roll_back_prepared
        try:
            ending = finish(self._connection, self.branch.gid, self._work.xid)
        except DatabaseError:
            return None
        crashpoint("xa.between_commits")
        return None if ending is Ending.UNKNOWN else ending is not Ending.OTHERWISE

    def roll_back(self) -> None:
        """Ends the transaction where it is open; what is prepared stays."""
        roll_back(self._connection)
