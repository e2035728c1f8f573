"""The branch of an XA transaction on one connection of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from txmq.crashpoints import crashpoint
from txmq.errors import DatabaseError, InDoubt, TransactionAborted, TxmqError
from txmq.model.decider import PostgresBranch
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
from txmq.tx.xid import XaBranch


class BranchVote(NamedTuple):
    """A vote, with the error if it is not a yes."""

    vote: Vote
    error: TxmqError | None = None


class DatabaseBranch:
    """A branch on a psycopg2 connection. For one thread at a time."""

    def __init__(self, connection: Connection, branch: XaBranch) -> None:
        self.branch = branch
        self._connection = connection
        self._work = Work(None, "")

    @property
    def wrote(self) -> bool:
        """Return whether the last `inspect` found writes."""
        return self._work.xid is not None

    @property
    def participant(self) -> PostgresBranch:
        """Return the entry of the home broker's bundle for this branch."""
        identity = server_of(self._connection).identity
        database = self._connection.info.dbname
        return PostgresBranch(
            *(identity.system_id, identity.database_oid, database),
            *(self._work.owner, self.branch.gid, self._work.xid),
        )

    @property
    def prepared_limit(self) -> tuple[int, int]:
        """Return the server's system id and its max_prepared_transactions."""
        server = server_of(self._connection)
        return server.identity.system_id, server.max_prepared_transactions

    def begin(self) -> None:
        """Open the transaction. Raises UnsupportedServer or TwoPhaseOff."""
        require_usable(self._connection)
        server = server_of(self._connection)
        require_supported(server)
        require_two_phase(server)
        begin_branch(self._connection, self.branch)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Open a block whose rows are withdrawn if it raises."""
        with savepoint(self._connection):
            yield

    def inspect(self) -> None:
        """Find out if the branch wrote. Raises if its transaction is broken."""
        self._work = look(self._connection, self.branch)

    def commit(self) -> None:
        """Commit in one phase.

        Raises InDoubt, or an error after which the branch is rolled back.
        """
        try:
            guarded_commit(self._connection, self.branch.token)
        except InDoubt as doubt:
            if self.wrote:
                hint = "look for its rows: without messages nothing else can tell"
                raise InDoubt(doubt.message, token=doubt.token, hint=hint) from doubt
            raise TransactionAborted(doubt.message) from doubt

    def vote(self) -> BranchVote:
        """Prepare the branch, or end it if it only read.

        The connection is free for other work then.
        """
        try:
            if not self.wrote:
                self.commit()
                return BranchVote(Vote.READ_ONLY)
            prepare(self._connection, self.branch)
        except InDoubt as doubt:
            return BranchVote(Vote.UNCLEAR, doubt)
        except TxmqError as error:
            return BranchVote(Vote.NO, error)
        crashpoint("xa.between_prepares")
        return BranchVote(Vote.PREPARED)

    def finish(self, decision: Decision) -> bool | None:
        """End the prepared branch; return whether it ended so, None = unknown yet."""
        finish = commit_prepared if decision is COMMIT else roll_back_prepared
        try:
            ending = finish(self._connection, self.branch.gid, self._work.xid)
        except DatabaseError:
            return None
        crashpoint("xa.between_commits")
        return None if ending is Ending.UNKNOWN else ending is not Ending.OTHERWISE

    def roll_back(self) -> None:
        """Roll the open transaction back; a prepared branch stays."""
        roll_back(self._connection)
