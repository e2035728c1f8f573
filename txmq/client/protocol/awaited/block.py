"""The block of a transaction, from its entry to its end, in all faces.

Sends and acks are buffered until the end of the block. The decider makes the kind of
transaction: a database (`postgres`), a service that answers check-backs (`half`), a
home broker for several databases (`xa`), or the broker alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)
from typing import Any, TypeVar

from txmq.client.protocol.awaited.bundle import StoringBundle, StoringCore, look_up
from txmq.client.protocol.sender.topics import TopicMetadata
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.state import TransactionState
from txmq.errors import TxmqError
from txmq.model.durations import Duration, seconds_of

B = TypeVar("B", bound=StoringBundle[Any])
K = TypeVar("K", bound=StoringCore)


class BlockSteps(TransactionState[B, K]):
    """A block whose sends and acks take effect together, or not at all."""

    _deciding = False  # the decision is asked for, and may come true
    _parted = False  # its caller has ended the transaction, and rows may be committed

    async def _begin(self) -> None:
        """Begin what the block needs. After an error nothing is left open."""

    @abstractmethod
    async def _commit(self) -> None:
        """Commit at the end of the block; return only if it is committed."""

    @abstractmethod
    async def _abort(self) -> None:
        """Roll back what has been done so far."""

    async def _finish(self, error: BaseException | None) -> None:
        """End the block, in which there was this error."""
        committed: bool | None = None  # None = unknown
        self._stage = Stage.ENDING
        try:
            if error is None and not self._rollback_only:
                if self._unrouted is not None:
                    await self._route_or_abort()
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

    def _leaving(self, error: BaseException | None) -> AbstractContextManager[None]:
        """Return what a face leaves the block in, because of this error or at its end.

        It is the caller's own thread or task, where his own errors may be raised.
        """
        del error
        return nullcontext()

    async def _route_or_abort(self) -> None:
        try:
            await self._route_all()
        except BaseException:
            await self._abort()
            raise

    async def _route_all(self) -> None:
        """Give the messages to the brokers of a cluster, before anything is stored."""
        if self._unrouted is None:
            return
        cores, deadline = self._unrouted.cores, self._core.seconds() + self._timeout

        async def describe(broker: int, topic: str) -> TopicMetadata:
            return await look_up(self._bundle.awaited(cores[broker]), topic, deadline)

        await self._unrouted.look_up(describe)
        self._route(self._unrouted)

    @asynccontextmanager
    async def _savepoint(self) -> AsyncIterator[None]:
        """Open a block whose sends and acks are withdrawn if it raises."""
        self._require(Stage.OPEN)
        mark = self._mark()
        try:
            async with self._database_savepoint():
                yield
        except BaseException:
            self._withdraw_behind(mark)
            raise

    def _database_savepoint(self) -> AbstractAsyncContextManager[None]:
        """Return the database's part of a savepoint."""
        return nullcontext()

    async def _wait_published(self, timeout: Duration) -> None:  # noqa: ASYNC109  # of the user
        self._require_committed()
        deadline = self._core.seconds() + seconds_of(timeout, "timeout")
        for bundle in self._bundles:
            await bundle.wait_published(deadline)
