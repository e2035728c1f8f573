"""The steps of messages in a transaction that somebody else begins and ends.

They are those of `client.transaction(connection)`, around a COMMIT that a framework
sends: the bundle and the token row before it, the decision after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from txmq.client.protocol.awaited.block import B, K
from txmq.client.protocol.awaited.postgres import PostgresSteps
from txmq.client.protocol.transaction.lifecycle import Stage, wrong_stage
from txmq.client.protocol.transaction.options import TransactionOptions
from txmq.errors import InDoubt, LocalProtocolError, TransactionAborted, TxmqError
from txmq.model.message import ROLLBACK, Message
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.driver import Enlisted
from txmq.tx.postgres.enlist import EnlistedBlock

SendCommit = Callable[[], Awaitable[object]]


class PendingMessage(NamedTuple):
    """A message of an open transaction."""

    topic: str
    message: Message


class EnlistedSteps(PostgresSteps[B, K]):
    """Sends and acks that take effect with the COMMIT of somebody else."""

    _block: EnlistedBlock
    _send_by = "tx.at(client).send(...)"  # with another client

    def _begin_enlisted(self) -> None:
        """Make the state of it. Called once, when the object is made."""
        self._options = TransactionOptions()
        self._before_send: list[Callable[[], object]] = []
        self._stored: list[B] = []
        self._commit_call: SendCommit | None = None
        self._refused: Exception | None = None

    def _join(self, enlisted: Enlisted, options: TransactionOptions, *, hooks: bool) -> None:
        """Join the transaction of the connection."""
        self._options = options
        self._block.join(enlisted, hooks=hooks)
        self._stage = Stage.OPEN

    def require_joinable(self, core: K, options: TransactionOptions) -> None:
        """Require that a second caller in the transaction may use this.

        Raises LocalProtocolError.
        """
        if core is not self._core:
            raise LocalProtocolError(
                f"Transaction {self.token} has messages of another client",
                hint=f"send by that one: {self._send_by}",
            )
        if options and options != self._options:
            raise LocalProtocolError(
                f"Transaction {self.token} was enlisted with the options {self._options}",
                hint="give the same options, or none, to the second call",
            )

    def before_each_send(self, prepare: Callable[[], object]) -> None:
        """Have a framework begin what it has put off, as a savepoint, before each
        send.

        Each session on the connection gives its own, which is kept once.
        """
        if prepare not in self._before_send:
            self._before_send.append(prepare)

    def pending(self) -> list[PendingMessage]:
        """Return what is to be sent with the COMMIT, in order, as tests want to know
        it.
        """
        return [
            PendingMessage(item.topic, message)
            for bundle in self._bundles
            for item in bundle.buffer.items
            for message in item.messages()
        ]

    def _require_storable(self) -> None:
        """Require that nothing is stored yet, in this process."""
        if self._stage is not Stage.OPEN:
            raise wrong_stage(self.token, self._stage)
        if self._is_of_parent():
            raise self._of_parent()

    async def _store_all(self) -> None:
        self._stage = Stage.ENDING
        async with self._ending_with_an_error(), self._rolling_back():
            await self._require_commit()
            if self._nonempty_bundles():
                self._block.require_open()
            await self._route_all()
            self._stored = self._nonempty_bundles()
            if self._stored:
                self._block.end()
                with self._block.undisturbed():
                    await self._store_bundles(self._stored)
        self._stage = Stage.STORED

    async def _take_back(self) -> None:
        """Roll back what is stored, where COMMIT will not be sent."""
        if self._stage is not Stage.STORED:
            return
        await self._block.roll_back()
        self._send_decisions(self._fallback.sent_directly(self._stored), ROLLBACK)
        self._end(committed=False)

    async def _commit_all(self, commit: SendCommit) -> None:
        self._commit_call = commit
        async with self._ending_with_an_error():
            await self._require_commit()
            if self._stored:
                await self._commit_stored(self._stored)
            else:
                self._deciding = True
                await commit()
        self._end(committed=True)

    def after_commit(self) -> None:
        """Have the brokers look at the token row: COMMIT is said to have succeeded.

        It does not wait. Raises TransactionEnded where `before_commit` was left out:
        then the rows are committed without their messages.
        """
        if self._stage is Stage.OPEN and self._nonempty_bundles():
            self._end(committed=False)
            raise self._block.ended()
        self._committed = self._stage is Stage.STORED or self._committed
        self._after_end()

    def after_rollback(self) -> None:
        """Drop what is not stored; have the brokers look at the token row of the
        rest.
        """
        self._after_end()

    def _after_end(self) -> None:
        if self._is_of_parent() or self._stage is Stage.OVER:
            return
        stored = self._stage is Stage.STORED and bool(self._stored)
        self._end(committed=None if stored else False)
        if stored:
            for bundle in self._fallback.sent_directly(self._stored):
                bundle.request_check()

    def _require(self, stage: Stage) -> None:
        super()._require(stage)
        for prepare in self._before_send:
            prepare()

    async def _require_commit(self) -> None:
        if not self._rollback_only:
            return
        await self._block.roll_back()
        self._send_decisions(self._fallback.sent_directly(self._stored), ROLLBACK)
        raise TransactionAborted(
            f"The transaction was marked to be rolled back: {self._rollback_only}",
            hint="nothing of it exists, as tx.set_rollback_only() has asked for",
        )

    @asynccontextmanager
    async def _rolling_back(self) -> AsyncIterator[None]:
        """Roll back after any error: whoever swallows it must not commit the rows."""
        try:
            yield
        except BaseException:
            await self._block.roll_back()
            raise

    @asynccontextmanager
    async def _ending_with_an_error(self) -> AsyncIterator[None]:
        try:
            yield
        except TxmqError as failure:
            self._end(committed=None if failure.outcome == "unknown" else False)
            self._note_failure(failure)
            refused, self._refused = self._refused, None
            if refused is not None and not isinstance(failure.__cause__ or failure, InDoubt):
                raise refused from None  # as its callers expect it
            raise
        except BaseException:
            self._end(committed=None)
            raise

    async def _guarded_commit(self) -> bool:
        self._deciding = True
        return await guarded_commit(self._driver, self.token, self._send_commit)

    async def _send_commit(self) -> None:
        assert self._commit_call is not None, "commit_with gives it"
        try:
            await self._commit_call()
        except Exception as error:
            self._refused = error
            raise

    def _end(self, *, committed: bool | None) -> None:
        self._stage = Stage.OVER
        self._committed = self._committed or committed is True
        self._block.release()
        for bundle in self._bundles:
            bundle.finish(committed=committed)
