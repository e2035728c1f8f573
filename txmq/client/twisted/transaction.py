"""Transactions on Twisted: those of asyncio, with a thread for the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, Unpack
from uuid import UUID

from twisted.internet.defer import Deferred

from txmq.client.aio import client as aio_client
from txmq.client.aio import cluster as aio_cluster
from txmq.client.aio.transaction import half, transaction
from txmq.client.aio.transaction.transaction import AioOperations
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.transaction.options import NO_CONNECTION, TransactionOptions, XaOptions
from txmq.client.twisted.bridge import Bridge
from txmq.client.twisted.deferring import at_once, deferring
from txmq.client.twisted.threads import OneThread

P = ParamSpec("P")
T = TypeVar("T")


class HasAwaited(Protocol):
    """A client on Twisted."""

    @property
    def _awaited(self) -> aio_client.Client: ...


class TwistedOperations:
    """The sends and acks of a transaction at one broker."""

    _awaited: AioOperations

    def __init__(self, bridge: Bridge, awaited: AioOperations) -> None:
        self._bridge, self._awaited = bridge, awaited

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message if the transaction commits.

        Raises LocalProtocolError or MessageTooLarge.
        """
        # It is only noted until the end of the block.
        self._awaited.send(topic, body, partition=partition, **fields)

    send_many = at_once(AioOperations.send_many)
    ack = at_once(AioOperations.ack)
    receipts = deferring(AioOperations.receipts)


class Transaction(TwistedOperations):
    """An `async with` block whose sends and acks take effect together, or not at all.

    Statements go through `run`, which calls functions in a thread, one after the other.
    The rest is as for the transactions of asyncio.
    """

    _awaited: transaction.Transaction

    def __init__(self, bridge: Bridge, awaited: transaction.Transaction, thread: OneThread) -> None:
        super().__init__(bridge, awaited)
        self._thread = thread

    @property
    def token(self) -> UUID:
        """The name of the transaction in the database, at the brokers and in errors."""
        return self._awaited.token

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Call a function in a thread: `rows = await tx.run(insert, connection,
        order)`.

        The Deferred has its result, or fails as it raised. Calls wait for one another,
        and the end of the block waits for all of them.
        """
        return self._bridge.defer(lambda: self._thread.call(partial(function, *args, **kwargs)))

    set_rollback_only = at_once(transaction.Transaction.set_rollback_only)

    def at(self, client: HasAwaited) -> Deferred[TwistedOperations]:
        """Return the same transaction at another client's broker, to send and ack
        there.

        Asks the brokers for the ids of their logs if need be. Fails as a call does, and
        with LocalProtocolError for a kind of transaction that allows one broker only.
        """
        other = client._awaited  # noqa: SLF001  # the user's client
        found = self._bridge.defer(lambda: self._awaited.at(other))
        return found.addCallback(lambda awaited: TwistedOperations(self._bridge, awaited))

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Open a block whose sends, acks and statements are withdrawn if it raises."""
        return self._bridge.block(self._awaited.savepoint())

    wait_published = deferring(transaction.Transaction.wait_published)

    async def __aenter__(self) -> Self:
        await self._bridge.defer(self._awaited.__aenter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        async def end() -> None:
            try:
                await self._thread.idle()
            except asyncio.CancelledError as interrupt:
                await self._awaited.__aexit__(type(interrupt), interrupt, None)
                raise
            await self._awaited.__aexit__(kind, error, trace)

        try:
            await self._bridge.defer(end)
        finally:
            self._thread.stop()


class HalfTransaction(Transaction):
    """A transaction that a checker decides: see HalfTransaction of the blocking
    client.
    """

    _awaited: half.HalfTransaction

    prepare = deferring(half.HalfTransaction.prepare)


class XaTransaction(Transaction):
    """A two-phase commit: see XaTransaction of the blocking client."""

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The gids of the branches that are left to recovery."""
        unfinished: tuple[str, ...] = getattr(self._awaited, "unfinished")  # noqa: B009
        return unfinished


def begin(
    bridge: Bridge,
    client: aio_client.Client | aio_cluster.Cluster,
    connection: object,
    checker: str | None,
    options: TransactionOptions,
) -> Transaction:
    """Return a transaction that is not entered yet.

    Raises ConfigError or LocalProtocolError.
    """
    thread = OneThread("txmq-transaction")
    begun: Any = client.transaction  # which of its overloads, the arguments decide
    awaited = bridge.at_once(
        lambda: begun(_in_thread(connection, thread), checker=checker, **options)
    )
    kind = Transaction if checker is None else HalfTransaction
    return kind(bridge, awaited, thread)


def begin_xa(
    bridge: Bridge,
    client: aio_client.Client | aio_cluster.Cluster,
    connections: Sequence[object],
    options: XaOptions,
) -> XaTransaction:
    """Return an XA transaction that is not entered yet; likewise."""
    thread = OneThread("txmq-transaction")
    drivers = [_in_thread(connection, thread) for connection in connections]
    return XaTransaction(bridge, bridge.at_once(lambda: client.xa(*drivers, **options)), thread)


def _in_thread(connection: object, thread: OneThread) -> object:
    """Return the driver of a connection; what is none, the options refuse."""
    if connection is NO_CONNECTION or connection is None:
        return connection
    # For programs that have a database.
    from txmq.tx.postgres.drivers import driver_in_thread  # noqa: PLC0415

    return driver_in_thread(connection, thread.call)
