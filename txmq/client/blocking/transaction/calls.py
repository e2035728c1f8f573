"""The calls of a blocking client that begin transactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack, overload

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.begin import begin, begin_xa, enlist
from txmq.client.blocking.transaction.half import HalfTransaction
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.transaction.options import (
    NO_CONNECTION,
    Nobody,
    TransactionOptions,
    XaOptions,
)

if TYPE_CHECKING:  # psycopg2 is for those who have a database
    from txmq.client.blocking.transaction.enlisted import EnlistedTransaction
    from txmq.client.blocking.transaction.xa import XaTransaction
    from txmq.tx.postgres.driver import BlockingConnection


class TransactionCalls:
    """The part of a client of one broker or of several that begins transactions."""

    _cores: Sequence[BlockingCore]
    _routing: Routing | None = None  # None = there is one broker

    @overload
    def transaction(
        self, *, checker: str, **options: Unpack[TransactionOptions]
    ) -> HalfTransaction: ...

    @overload
    def transaction(
        self,
        connection: BlockingConnection | Nobody = NO_CONNECTION,
        *,
        checker: None = None,
        **options: Unpack[TransactionOptions],
    ) -> Transaction: ...

    def transaction(
        self,
        connection: BlockingConnection | Nobody = NO_CONNECTION,
        *,
        checker: str | None = None,
        **options: Unpack[TransactionOptions],
    ) -> Transaction:
        """Return a `with` block whose sends and acks take effect together or not at
        all.

        With a `connection` of psycopg2 or psycopg 3 they take effect together with the
        rows written on it; the block commits it. With the name of a registered
        `checker` they do so together with other local work: see HalfTransaction. With
        neither, the broker decides alone. `txmq.TransactionOptions` describes the
        options.

        A client of several brokers sends each message to the broker of its key or
        partition at the end of the block, and each ack to the one that delivered the
        message. Messages without a key go to a broker that the transaction uses anyway.
        With a `connection` one COMMIT decides for all brokers. Without it one decides:
        the block raises LocalProtocolError where several are concerned. `tx.at(client)`
        names a broker.
        """
        begun = begin(self._cores[0], connection, checker, options)
        if self._routing is not None:
            begun._spread(self._cores, self._routing)  # noqa: SLF001  # not the user's call
        return begun

    def enlist(
        self,
        connection: BlockingConnection,
        *,
        hooks: bool = False,
        **options: Unpack[TransactionOptions],
    ) -> EnlistedTransaction:
        """Return the messages of a transaction that somebody else will commit.

        It is the transaction that is open on the `connection`, or that the next
        statement begins. Sends and acks take effect together with its rows. The
        connection is an `EnlistConnection` of `txmq.postgres` or `txmq.psycopg`, whose
        `commit()` takes them along. Any other is refused, because its `commit()` would
        leave the messages behind, unless `hooks` says that the caller's code calls
        `commit_with()`, or `before_commit()` and `after_commit()` or
        `after_rollback()`; see EnlistedTransaction. The options and the choice of
        brokers are those of `transaction`. A second call in the same transaction
        returns the same.
        """
        return enlist(self._cores, connection, options, self._routing, hooks=hooks)

    def xa(self, *connections: BlockingConnection, **options: Unpack[XaOptions]) -> XaTransaction:
        """Return a `with` block over several databases, committed in two phases.

        The rows on all psycopg2 connections, the sends and the acks take effect
        together. The block commits the connections, which may lead to different
        servers. For one database `transaction(connection)` is cheaper.
        `txmq.XaOptions` describes the options.

        Of several brokers one, which has to be there, decides in its log; messages and
        acks go to their brokers as in `transaction`.
        """
        begun = begin_xa(self._home(), connections, options)
        if self._routing is not None:
            begun._spread(self._cores, self._routing)  # noqa: SLF001  # not the user's call
        return begun

    def _home(self) -> BlockingCore:
        """Return the broker that decides XA transactions."""
        return self._cores[0]
