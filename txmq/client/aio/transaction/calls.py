"""The calls of a client on asyncio that begin transactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack, overload

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.begin import begin, begin_xa, enlist
from txmq.client.aio.transaction.half import HalfTransaction
from txmq.client.aio.transaction.transaction import Transaction
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.transaction.options import NO_CONNECTION, TransactionOptions, XaOptions

if TYPE_CHECKING:  # for programs that have a database
    from txmq.client.aio.transaction.enlisted import EnlistedTransaction
    from txmq.client.aio.transaction.postgres import PostgresTransaction
    from txmq.client.aio.transaction.xa import XaTransaction


class TransactionCalls:
    """The part of a client of one broker or of several that begins transactions."""

    _cores: Sequence[AioCore]
    _routing: Routing | None = None  # None = there is one broker

    @overload
    def transaction(self) -> Transaction: ...

    @overload
    def transaction(
        self, *, checker: str, **options: Unpack[TransactionOptions]
    ) -> HalfTransaction: ...

    @overload
    def transaction(
        self, connection: object, **options: Unpack[TransactionOptions]
    ) -> PostgresTransaction: ...

    def transaction(
        self,
        connection: object = NO_CONNECTION,
        *,
        checker: str | None = None,
        **options: Unpack[TransactionOptions],
    ) -> Transaction:
        """Return an `async with` block whose sends and acks take effect together.

        With a `connection`, of psycopg 3 (AsyncConnection) or asyncpg, they take effect
        together with the rows written on it. With the name of a registered `checker`
        they do so together with other local work. With neither, the broker decides
        alone.

        A client of several brokers sends each message to the broker of its key or
        partition at the end of the block, and each ack to the one that delivered the
        message. Messages without a key go to a broker that the transaction uses anyway.
        With a `connection` one COMMIT decides for all brokers. Without it one decides:
        the block raises LocalProtocolError where several are concerned.
        """
        begun = begin(self._cores[0], connection, checker, options)
        if self._routing is not None:
            begun._spread(self._cores, self._routing)  # noqa: SLF001  # not the user's call
        return begun

    def enlist(
        self, connection: object, *, hooks: bool = False, **options: Unpack[TransactionOptions]
    ) -> EnlistedTransaction:
        """Return sends and acks that take effect with the COMMIT of somebody else, in
        the transaction that is open on the connection, or that its next statement
        begins.

        The rest is as for `enlist` of the blocking client.
        """
        return enlist(self._cores, connection, options, self._routing, hooks=hooks)

    def xa(self, *connections: object, **options: Unpack[XaOptions]) -> XaTransaction:
        """Return an `async with` block over several databases, committed in two phases.

        The rows on all connections, the sends and the acks take effect together. Of
        several brokers one, which has to be there, decides in its log; messages and
        acks go to their brokers as in `transaction`.
        """
        begun = begin_xa(self._home(), connections, options)
        if self._routing is not None:
            begun._spread(self._cores, self._routing)  # noqa: SLF001  # not the user's call
        return begun

    def _home(self) -> AioCore:
        """Return the broker that decides XA transactions."""
        return self._cores[0]
