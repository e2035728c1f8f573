"""Transactions with a database or a checker, for programs on Twisted.

They are the transactions of the blocking client, whose steps run in threads, one at a
time. So one implementation serves the blocking face and this one. Twisted's adbapi
would not do: it keeps a connection for each thread, so that the steps of one
transaction would meet different connections, and it commits by itself.

An open transaction keeps a place among the threads until its end. Otherwise
transactions that wait for a row lock could occupy every thread, and the transaction
that holds the lock would find none to commit in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack
from uuid import UUID

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.threads import blockingCallFromThread

from txmq.client.blocking.transaction.checkers import Checker
from txmq.client.blocking.transaction.half import HalfTransaction
from txmq.client.blocking.transaction.transaction import Transaction, TransactionOperations
from txmq.client.protocol.consumer.fetched import owner_of
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.transaction.acks import AckOwner
from txmq.client.protocol.transaction.checks import Half
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import Reactor
from txmq.client.twisted.threads import Threads
from txmq.model.actions import AckAction
from txmq.model.durations import Duration
from txmq.model.message import Decision, Receipt

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K", bound=Transaction)
AnyChecker = Callable[[Half], Decision | Deferred[Decision]]


class HasTwistedCore(Protocol):
    """A client on Twisted."""

    _core: TwistedCore


class ReactorDelivery:
    """A message or batch of a consumer on the reactor, acked by a transaction in a
    thread.
    """

    def __init__(self, reactor: Reactor, owner: AckOwner, delivered: object) -> None:
        self._reactor, self._owner, self._delivered = reactor, owner, delivered
        self.fetched = self.owner = self  # where a transaction looks for the owner
        self.log_id = owner.log_id

    def ack_actions(self, delivered: object) -> Sequence[AckAction]:
        """Return the actions that ack it. Called on the reactor's thread."""
        del delivered
        return self._owner.ack_actions(self._delivered)

    def transaction_ended(self, delivered: object, *, committed: bool | None) -> None:
        """Notify the consumer of the outcome. Called in any thread."""
        del delivered
        self._reactor.callFromThread(
            partial(self._owner.transaction_ended, self._delivered, committed=committed)
        )


class ThreadedOperations:
    """The sends and acks of a transaction at one broker.

    They are only noted until the end of the block, and so need no thread.
    """

    def __init__(self, reactor: Reactor, operations: TransactionOperations) -> None:
        self._reactor, self._operations = reactor, operations

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message if the transaction commits.

        Raises LocalProtocolError or MessageTooLarge.
        """
        self._operations.send(topic, body, partition=partition, **fields)

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Send messages that are given as columns, if the transaction commits.

        It is the fast path for volumes. The columns must not change before the end of
        the block.
        """
        self._operations.send_many(topic, bodies, keys, tags, partition=partition)

    def ack(self, delivered: object) -> None:
        """Ack a message or batch of a consumer of this process, if the transaction
        commits.
        """
        owner = owner_of(delivered)
        self._operations.ack(
            ReactorDelivery(self._reactor, owner, delivered)
            if isinstance(owner, AckOwner)
            else delivered
        )

    def receipts(self) -> list[Receipt]:
        """Return the receipts of the messages sent here, in the order of their sends.

        Offsets are None until the transaction is published.
        """
        return self._operations.receipts()


class ThreadedTransaction(ThreadedOperations, Generic[K]):
    """An `async with` block around a transaction of the blocking client.

    It raises as that one does. Database statements go through `run`, which calls
    functions in a thread, one after the other.
    """

    def __init__(
        self,
        reactor: Reactor,
        threads: Threads,
        transaction: K,
        look_up: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`look_up` is awaited before the messages are routed to several brokers."""
        super().__init__(reactor, transaction)
        self._threads, self._transaction = threads, transaction
        self._look_up = look_up
        self._one_at_a_time = DeferredLock()

    @property
    def token(self) -> UUID:
        """The name of the transaction in the database, at the brokers and in errors."""
        return self._transaction.token

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Call a function in a thread: `rows = await tx.run(insert, connection,
        order)`.

        The Deferred has its result, or fails as it raised. Calls wait for one another,
        and the end of the block waits for all of them.
        """

        def step() -> Deferred[T]:
            return self._threads.run(function, *args, **kwargs)

        return self._one_at_a_time.run(step)

    def set_rollback_only(self, reason: str = "") -> None:
        """Roll back at the end of the block, which then raises TransactionAborted."""
        self._transaction.set_rollback_only(reason)

    async def at(self, client: HasTwistedCore) -> ThreadedOperations:
        """Return the sends and acks of this transaction at another client's broker."""
        blocking = client._core.blocking  # noqa: SLF001  # the user's client
        return ThreadedOperations(self._reactor, await self.run(self._transaction.at, blocking))

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Take back the sends, acks and statements of a block that raises."""
        block = self._transaction.savepoint()
        await self.run(block.__enter__)
        try:
            yield
        except BaseException as error:
            if not await self.run(block.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await self.run(block.__exit__, None, None, None)

    # The parameter is the blocking client's.
    async def wait_published(self, timeout: Duration = 5.0) -> None:  # noqa: ASYNC109
        """Wait until consumers can see the messages.

        Raises RequestTimeout or TransactionAborted.
        """
        await self._threads.run(self._transaction.wait_published, timeout)

    async def __aenter__(self) -> Self:
        self._place: Any = await self._threads.places.acquire()
        try:
            await self.run(self._transaction.__enter__)
        except BaseException:
            self._place.release()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                await self._looked_up()
            await self.run(self._transaction.__exit__, kind, error, trace)
        finally:
            self._place.release()

    async def _looked_up(self) -> None:
        if self._look_up is None:
            return
        try:
            await self._look_up()
        except BaseException as error:
            await self.run(self._transaction.__exit__, type(error), error, error.__traceback__)
            raise


class ThreadedHalf(ThreadedTransaction[HalfTransaction]):
    """A transaction that a checker decides: see HalfTransaction."""

    async def prepare(self) -> None:
        """Store the half message before the local work. Nothing more can be sent
        then.
        """
        if self._look_up is not None:
            await self._look_up()
        await self.run(self._transaction.prepare)


class ThreadedXa(ThreadedTransaction[Any]):
    """A two-phase commit: see XaTransaction."""

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The gids of the branches that are left to recovery."""
        unfinished: tuple[str, ...] = self._transaction.unfinished
        return unfinished


def threaded(
    reactor: Reactor,
    threads: Threads,
    transaction: Transaction,
    look_up: Callable[[], Awaitable[None]] | None = None,
) -> ThreadedTransaction[Any]:
    """Return the block around a transaction with a database or a checker."""
    if isinstance(transaction, HalfTransaction):
        return ThreadedHalf(reactor, threads, transaction, look_up)
    return ThreadedTransaction(reactor, threads, transaction, look_up)


def threaded_checker(reactor: Reactor, checker: AnyChecker) -> Checker:
    """Return the checker for use in a thread; it still runs on the reactor."""

    async def answer(half: Half) -> Decision:
        decision = checker(half)
        return await decision if isinstance(decision, Deferred) else decision

    def check(half: Half) -> Decision:
        call: Any = blockingCallFromThread  # mypy confuses its overloads
        decision: Decision = call(reactor, lambda: Deferred.fromCoroutine(answer(half)))
        return decision

    return check
