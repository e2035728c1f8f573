"""Transactions that wait for a database, for the Twisted face: their steps run in
threads of the client's own.

One implementation of the protocol serves both faces: here its steps are taken one at a
time, off the reactor's thread. Not Twisted's adbapi: it keeps a connection for each
thread, so that the steps of one transaction would meet different connections, it hides
what state they are in, and it commits on its own account.

A transaction that is open keeps a place among the threads until its end. Otherwise
transactions that wait for a row lock could take every thread, and the one that holds
the lock would find none to commit in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack
from uuid import UUID

from twisted.internet.defer import Deferred, DeferredLock, DeferredSemaphore, succeed
from twisted.internet.threads import blockingCallFromThread, deferToThreadPool
from twisted.python.threadpool import ThreadPool

from txmq.client.blocking.transaction.broker_part import AckOwner
from txmq.client.blocking.transaction.checkers import Checker, Half
from txmq.client.blocking.transaction.half import HalfTransaction
from txmq.client.blocking.transaction.transaction import Face, Transaction
from txmq.client.twisted.protocols import Reactor
from txmq.model.message import Decision

if TYPE_CHECKING:
    from txmq.client.blocking.sender.producer import Fields
    from txmq.client.protocol.transaction.buffer import Action
    from txmq.client.twisted.client import Client
    from txmq.model.message import Receipt

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K", bound=Transaction)
AnyChecker = Callable[[Half], Decision | Deferred[Decision]]


class Threads:
    """At most `size` threads, started when they are needed, and as many places for open
    transactions.
    """

    def __init__(self, reactor: Reactor, size: int) -> None:
        self._reactor = reactor
        self._pool = ThreadPool(0, size, "txmq-transactions")
        self._at_shutdown: object = None
        self.places = DeferredSemaphore(size)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """What the function returns, or fails with."""
        if not self._pool.started:
            self._pool.start()
            self._at_shutdown = self._reactor.addSystemEventTrigger(
                "during", "shutdown", self._pool.stop
            )
        work: Deferred[T] = deferToThreadPool(self._reactor, self._pool, function, *args, **kwargs)
        return work

    def stop(self) -> Deferred[None]:
        """Fires when the last thread has ended."""
        if not self._pool.started:
            return succeed(None)
        self._reactor.removeSystemEventTrigger(self._at_shutdown)
        ended: Deferred[None] = deferToThreadPool(
            self._reactor, self._reactor.getThreadPool(), self._pool.stop
        )
        return ended


class Lent:
    """What a consumer on the reactor has delivered, lent to a transaction that ends in
    another thread.
    """

    def __init__(self, reactor: Reactor, owner: AckOwner, delivered: object) -> None:
        self._reactor, self._owner, self._delivered = reactor, owner, delivered
        self.parcel = self.owner = self  # where a transaction looks for the owner
        self.log_id = owner.log_id

    def ack_actions(self, delivered: object) -> Sequence[Action]:
        """Called on the reactor's thread, by `ack` below."""
        del delivered
        return self._owner.ack_actions(self._delivered)

    def transaction_over(self, delivered: object, *, committed: bool | None) -> None:
        """Called in whatever thread the transaction ends."""
        del delivered
        self._reactor.callFromThread(
            partial(self._owner.transaction_over, self._delivered, committed=committed)
        )


class ThreadedFace:
    """What a block can do at one broker. Sends and acks are only noted, and so need no
    thread.
    """

    def __init__(self, reactor: Reactor, face: Face) -> None:
        self._reactor, self._face = reactor, face

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Sends a message if the transaction commits. Raises LocalProtocolError or
        MessageTooLarge.
        """
        self._face.send(topic, body, partition=partition, **fields)

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Sends messages given as columns, the fast path for volumes; nobody may change
        them before the end.
        """
        self._face.send_many(topic, bodies, keys, tags, partition=partition)

    def ack(self, delivered: object) -> None:
        """Acks a message, or a batch, of one of this process's consumers if the
        transaction commits.
        """
        owner = getattr(getattr(delivered, "parcel", None), "owner", None)
        self._face.ack(
            Lent(self._reactor, owner, delivered) if isinstance(owner, AckOwner) else delivered
        )

    def receipts(self) -> list[Receipt]:
        """The receipts of the messages sent here, in the order of their sends; offsets
        are None until it is published.
        """
        return self._face.receipts()


class ThreadedTransaction(ThreadedFace, Generic[K]):
    """An `async with` block around a transaction of the blocking face, which raises as
    that one does.

    Statements of a database are run with `run`, one after the other, off the reactor's
    thread.
    """

    def __init__(self, reactor: Reactor, threads: Threads, transaction: K) -> None:
        super().__init__(reactor, transaction)
        self._threads, self._transaction = threads, transaction
        self._one_at_a_time = DeferredLock()

    @property
    def token(self) -> UUID:
        """What names it everywhere: in the database, at the brokers, in errors."""
        return self._transaction.token

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """What the function returns, called in a thread: `rows = await
        tx.run(insert_order, connection, order)`.

        Calls wait for one another, and the end of the block for all of them.
        """

        def step() -> Deferred[T]:
            return self._threads.run(function, *args, **kwargs)

        return self._one_at_a_time.run(step)

    def set_rollback_only(self, reason: str = "") -> None:
        """Lets nothing of it be committed, whatever the rest of the block does: its end
        raises TransactionAborted.
        """
        self._transaction.set_rollback_only(reason)

    async def at(self, client: Client) -> ThreadedFace:
        """The same transaction at another client's broker: what is sent and acked there
        is part of it.
        """
        return ThreadedFace(
            self._reactor, await self.run(self._transaction.at, client.core.blocking)
        )

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """A block whose sends, acks and statements are taken back where it raises; the
        error goes on.
        """
        block = self._transaction.savepoint()
        await self.run(block.__enter__)
        try:
            yield
        except BaseException as error:
            if not await self.run(block.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await self.run(block.__exit__, None, None, None)

    async def wait_published(self, timeout: float = 5.0) -> None:  # the blocking face's parameter
        """Returns once consumers can see the messages. Raises RequestTimeout,
        TransactionAborted.
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
            await self.run(self._transaction.__exit__, kind, error, trace)
        finally:
            self._place.release()


class ThreadedHalf(ThreadedTransaction[HalfTransaction]):
    """A transaction that a checker answers for: see HalfTransaction."""

    async def prepare(self) -> None:
        """Stores the half message before the local work; nothing more can be sent after
        it.
        """
        await self.run(self._transaction.prepare)


class ThreadedXa(ThreadedTransaction[Any]):
    """A two-phase commit: see XaTransaction."""

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The branches that are left to recovery, by their gids."""
        unfinished: tuple[str, ...] = self._transaction.unfinished
        return unfinished


def on_reactor(reactor: Reactor, checker: AnyChecker) -> Checker:
    """The checker for a thread to call: it runs on the reactor, the thread waits for
    its answer.
    """

    async def ask(half: Half) -> Decision:
        answer = checker(half)
        return await answer if isinstance(answer, Deferred) else answer

    def asked(half: Half) -> Decision:
        call: Any = blockingCallFromThread  # whose overloads mypy takes for one another
        answer: Decision = call(reactor, lambda: Deferred.fromCoroutine(ask(half)))
        return answer

    return asked
