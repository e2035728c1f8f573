"""Transactions on asyncio: messages and other work that take effect together.

`txmq.client.protocol.awaited.block` has the steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import Outcome, cancelled
from txmq.client.aio.transaction.bundle import AioBundle, UnroutedBundle
from txmq.client.protocol.awaited.block import BlockSteps
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.operations import BundleOperations
from txmq.errors import TxmqError
from txmq.model.durations import Duration
from txmq.model.message import Receipt


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

    def __init__(self, transaction: Transaction, bundle: AioBundle) -> None:
        super().__init__(bundle)
        self._transaction = transaction

    def _require(self, stage: Stage) -> None:
        self._transaction._require(stage)  # noqa: SLF001


class Transaction(AioOperations, BlockSteps[AioBundle, AioCore]):
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

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Open a block whose sends and acks are withdrawn if it raises."""
        return self._savepoint()

    async def wait_published(self, timeout: Duration = 5.0) -> None:  # noqa: ASYNC109  # as of the other faces
        """Wait until consumers can see the messages.

        That takes until all earlier transactions on their keys are decided. Raises
        RequestTimeout, or TransactionAborted if the transaction was rolled back.
        """
        await self._wait_published(timeout)

    async def __aenter__(self) -> Self:
        self._require(Stage.NEW)
        self._core.seconds()  # on this loop
        try:
            await self._begin()
        except asyncio.CancelledError as error:
            cancelled(error, "not done", "the beginning of a transaction")
            raise
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
        with self._leaving(error):
            await self._in_full(self._finish(error))
        if isinstance(error, asyncio.CancelledError):
            cancelled(error, "unknown" if self._parted else "not done", "a transaction")

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
