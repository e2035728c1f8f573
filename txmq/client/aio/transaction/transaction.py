"""Transactions on asyncio: messages and other work that take effect together.

Sends and acks are buffered until the end of the block. The decider makes the kind of
transaction: a database (`postgres`), a service that answers check-backs (`half`), a
home broker for several databases (`xa`), or the broker alone
(`txmq.client.protocol.awaited.transaction`).
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import Outcome, cancelled
from txmq.client.aio.transaction.bundle import AioBundle, UnroutedBundle
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.operations import BundleOperations
from txmq.client.protocol.transaction.state import TransactionState
from txmq.errors import TxmqError
from txmq.model.message import Receipt

LookUp = Callable[[Iterable[str]], Awaitable[None]]


class HasAioCore(Protocol):
    """A client on asyncio."""

    _core: AioCore


class AioOperations(BundleOperations[AioBundle]):
    """Sends and acks at one broker that take effect with a transaction."""

    async def receipts(self) -> list[Receipt]:
        """Return the receipts of the messages sent here, in the order of the sends.

        Offsets are None until the messages are published. Messages that went through
        the outbox have no receipts.
        """
        return await self._bundle.receipts()


class TransactionAtBroker(AioOperations):
    """A transaction at another broker than that of its own client."""

    def __init__(self, transaction: AioTransaction, bundle: AioBundle) -> None:
        super().__init__(bundle)
        self._transaction = transaction

    def _require(self, stage: Stage) -> None:
        self._transaction._require(stage)  # noqa: SLF001


class AioTransaction(AioOperations, TransactionState[AioBundle, AioCore]):
    """An `async with` block whose sends and acks take effect together, or not at all.

    For one task and one use. `token` names the transaction in the database, at the
    brokers and in errors. A cancellation never ends it half done: while the block is
    open, and while its end stores the messages, it rolls back. Once COMMIT is sent, its
    answer has the client's time-out to come, and the CancelledError comes after that.
    `txmq.aio.outcome_of` names the outcome: "not done" where nothing of the transaction
    exists, "unknown" where it may be committed, or is.
    """

    _bundle_type: ClassVar[type[AioBundle]] = AioBundle
    _unrouted_type: ClassVar[type[UnroutedBundle]] = UnroutedBundle
    _look_up: LookUp | None = None
    _deciding = False  # the decision is asked for, and may come true

    async def at(self, client: HasAioCore) -> AioOperations:
        """Return the same transaction at another client's broker, to send and ack
        there.

        Asks the brokers for the ids of their logs if need be. Raises as a call does,
        and LocalProtocolError for a kind of transaction that allows one broker only.
        """
        self._require(Stage.OPEN)
        core = client._core  # noqa: SLF001  # the user's client
        for bundle in self._bundles:
            if bundle.core is not core:
                await bundle.log_id()
        await core.log_id()
        return TransactionAtBroker(self, self._bundle_of(core))

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Open a block whose sends and acks are withdrawn if it raises."""
        self._require(Stage.OPEN)
        mark = self._mark()
        try:
            async with self._database_savepoint():
                yield
        except BaseException:
            self._withdraw_behind(mark)
            raise

    async def wait_published(self, timeout: float = 5.0) -> None:  # noqa: ASYNC109  # as of the other faces
        """Wait until consumers can see the messages.

        That takes until all earlier transactions on their keys are decided. Raises
        RequestTimeout, or TransactionAborted if the transaction was rolled back.
        """
        self._require_committed()
        deadline = self._core.seconds() + timeout
        for bundle in self._bundles:
            await bundle.wait_published(deadline)

    async def __aenter__(self) -> Self:
        self._require(Stage.NEW)
        self._core.seconds()  # on this loop
        self._stage = Stage.OPEN
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_of_parent():
            if error is None:
                raise self._of_parent()
            return
        await self._in_full(self._finish(error))
        if isinstance(error, asyncio.CancelledError):
            cancelled(error, "not done", "a transaction")

    async def _in_full(self, end: Coroutine[Any, Any, None]) -> None:
        """Run the end of the block in a task of its own, which never stops half-way.

        A cancellation before the decision is asked for rolls back. After that the
        answer has so many seconds to come; then the outcome stays in doubt.
        """
        task = self._core.loop.create_task(end, name=f"txmq-{self.token}")
        patience, interrupt = self._core.settings.timeout, None
        while not task.done():
            try:
                await asyncio.wait([task], timeout=None if interrupt is None else patience)
                if interrupt is not None:
                    task.cancel()  # without effect on a task that is done
            except asyncio.CancelledError as error:
                interrupt = interrupt or error
                if not self._deciding:
                    task.cancel()
        if interrupt is None:
            task.result()
            return
        failure = None if task.cancelled() else task.exception()
        cancelled(interrupt, self._outcome(failure), "the end of a transaction")
        raise interrupt from failure

    def _outcome(self, failure: BaseException | None) -> Outcome:
        """Return what became of a transaction whose end was cancelled."""
        if isinstance(failure, TxmqError):
            return "unknown" if failure.outcome == "unknown" else "not done"
        return "unknown" if self._deciding else "not done"

    async def _finish(self, error: BaseException | None) -> None:
        committed: bool | None = None  # None = unknown
        try:
            if error is None and not self._rollback_only:
                try:
                    await self._route_all()
                except BaseException:
                    await self._abort()
                    raise
                await self._commit()
                committed = self._committed = True
            else:
                committed = False
                await self._abort()
            if error is None:
                self._raise_rollback_only()
        except TxmqError as failure:
            committed = None if failure.outcome == "unknown" else False
            self._note_failure(failure)
            raise
        except BaseException:
            committed = None if self._deciding else False
            raise
        finally:
            self._stage = Stage.OVER
            for bundle in self._bundles:
                bundle.finish(committed=committed)

    async def _route_all(self) -> None:
        """Give the messages to the brokers of a cluster, before anything is stored."""
        if self._unrouted is not None and self._look_up is not None:
            await self._look_up(self._unrouted.topics_to_look_up)
        self._route()

    def _spread_by(self, cores: Sequence[AioCore], routing: Routing, look_up: LookUp) -> None:
        """Let each message go to its broker of a cluster. Called before the block."""
        self._look_up = look_up
        self._spread(cores, routing)

    @abstractmethod
    async def _commit(self) -> None:
        """Commit at the end of the block; return only if it is committed."""

    @abstractmethod
    async def _abort(self) -> None:
        """Roll back what has been done so far."""

    def _database_savepoint(self) -> AbstractAsyncContextManager[None]:
        """Return the database's part of a savepoint."""
        return nullcontext()
