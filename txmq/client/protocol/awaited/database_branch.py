"""The branch of an XA transaction on one connection of the caller, in all faces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple
from uuid import UUID

from txmq.client.log import get_logger
from txmq.crashpoints import crashpoint
from txmq.errors import (
    BrokerUnavailable,
    DatabaseError,
    InDoubt,
    TransactionAborted,
    TransactionEnded,
    TxmqError,
)
from txmq.model.decider import PostgresBranch
from txmq.model.message import COMMIT, Decision
from txmq.tx.coordinator import Vote
from txmq.tx.postgres.caller import require_usable, roll_back, savepoint
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.identity import read_server, server_of
from txmq.tx.postgres.outbox import read_key_status
from txmq.tx.postgres.prepared import (
    BY_OTHERS,
    Ending,
    NotReplicated,
    Work,
    commit_prepared,
    look,
    prepare,
    require_two_phase,
    roll_back_prepared,
)
from txmq.tx.postgres.statement_watch import Sends
from txmq.tx.xid import XaBranch

log = get_logger()


class BranchVote(NamedTuple):
    """A vote, with the error if it is not a yes."""

    vote: Vote
    error: TxmqError | None = None


class DatabaseBranch:
    """A branch on a connection. For one thread or task at a time."""

    def __init__(self, driver: Driver, branch: XaBranch, sends: Sends) -> None:
        self.branch = branch
        self._driver = driver
        self._block = CallerBlock(self._driver, branch.token, sends)
        self._found: Work | None = None

    @property
    def wrote(self) -> bool:
        """Return whether `inspect` found work to prepare."""
        return self._found is not None and self._found.xid is not None

    @property
    def _work(self) -> Work:
        assert self._found is not None, "inspect comes first"
        return self._found

    def participant(self) -> PostgresBranch:
        """Return the entry of the home broker's bundle for this branch."""
        xid, owner, server, position, _has_outbox = self._work
        return PostgresBranch(
            server.system_id,
            server.database_oid,
            self._driver.database,
            owner,
            self.branch.gid,
            xid,
            server.timeline,
            position,
        )

    async def prepared_limit(self) -> tuple[int, int]:
        """Return the server's system id and its max_prepared_transactions."""
        server = await server_of(self._driver)
        return server.identity.system_id, server.max_prepared_transactions

    async def begin(self) -> None:
        """Open the transaction, or join the one that is open.

        Raises UnsupportedServer or TwoPhaseOff; as `CallerBlock.begin`.
        """
        require_usable(self._driver)
        server = await server_of(self._driver)
        require_two_phase(server)
        await self._block.begin()

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Return a block whose rows are withdrawn if it raises."""
        return savepoint(self._driver)

    def end_block(self) -> None:
        """End the part of the transaction in which the caller uses the connection."""
        self._block.end()

    async def inspect(self) -> None:
        """Find out if the branch wrote.

        Raises if its transaction is broken, TransactionEnded if it is another one.
        """
        self._found = await look(self._driver, self._block)

    async def require_turn(self, log_id: UUID, keys: Sequence[int]) -> None:
        """Require that no rows with these keys wait for a broker in the outbox here.

        Those that are written later belong to transactions which had to wait for the
        rows of this one. Raises BrokerUnavailable, or DatabaseConflict if a snapshot
        may hide such rows.
        """
        if (
            self.wrote
            and self._work.has_outbox
            and (await read_key_status(self._driver, log_id, keys)).waiting
        ):
            raise BrokerUnavailable(
                f"Earlier transactions on the same keys wait for the broker of log {log_id} in the "
                f"outbox of database {self._driver.database!r}",
                hint="run the transaction again when the broker has fetched them: txmq outbox list",
            )

    async def commit(self) -> None:
        """Commit in one phase.

        Raises InDoubt, or an error after which the branch is rolled back.
        """
        try:
            await guarded_commit(self._driver, self.branch.token)
        except InDoubt as doubt:
            if self.wrote:
                hint = "look for its rows: without messages nothing else can tell"
                raise InDoubt(doubt.message, token=doubt.token, hint=hint) from doubt
            raise TransactionAborted(doubt.message) from doubt
        await self._block.close()

    async def follow(self) -> None:
        """Commit a branch without work to prepare, after COMMIT is decided.

        A failure is logged only: the transaction is committed, and no row is lost.
        """
        try:
            await self.commit()
        except TxmqError as error:
            log.warning(
                "transaction.reader_not_committed",
                token=str(self.branch.token),
                branch=self.branch.number,
                error=error.message,
            )

    async def vote(self) -> BranchVote:
        """Prepare the branch; one without work to prepare stays open.

        The connection of a prepared one is free for other work.
        """
        if not self.wrote:
            return BranchVote(Vote.READ_ONLY)
        try:
            await prepare(self._driver, self.branch)
        except NotReplicated as error:
            await self._block.close()
            return BranchVote(Vote.PREPARED, error)  # which is a veto, and the branch is ended
        except InDoubt as doubt:
            return BranchVote(Vote.UNCLEAR, doubt)
        except TxmqError as error:
            return BranchVote(Vote.NO, error)
        await self._block.close()
        crashpoint("xa.between_prepares")
        return BranchVote(Vote.PREPARED)

    async def finish(self, decision: Decision) -> bool | None:
        """End the prepared branch; return whether it ended so, None = unknown yet."""
        finish = commit_prepared if decision is COMMIT else roll_back_prepared
        try:
            ending = await finish(self._driver, self.branch.gid, self._work.xid)
            if ending in BY_OTHERS and await self._has_failed_over():
                return None  # its id may be another's now
        except DatabaseError:
            return None
        crashpoint("xa.between_commits")
        return None if ending is Ending.UNKNOWN else ending is not Ending.OTHERWISE

    async def _has_failed_over(self) -> bool:
        """Return whether the server is on a later timeline than the branch.

        A pooler may lead the connection there.
        """
        try:
            server = await read_server(self._driver)
            return server.identity.timeline != self._work.server.timeline
        finally:
            await roll_back(self._driver)

    async def roll_back(self) -> bool:
        """Roll the open transaction back; a prepared branch stays.

        Returns False if the caller may have committed rows.
        """
        return await self._block.roll_back()

    async def give_back(self) -> None:
        """Roll back what an interrupt has left open; a prepared branch stays."""
        await self._block.give_back()

    def ended(self) -> TransactionEnded:
        """Return the error of a branch that the caller has ended."""
        return self._block.ended()
