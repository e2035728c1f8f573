"""Handlers whose effect comes exactly once: each runs in a PostgreSQL transaction that
also remembers the message.

The ack follows the commit. Where a commit is in doubt, or the database was away, the
message is simply taken again: the inbox tells whether it was applied. Nothing is acked
on a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import random
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.client.blocking.consumer.inbox_upkeep import Keeper, open_connection
from txmq.client.blocking.consumer.runner import Limits, Runner, Source, nack_all
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.tokens import new_token
from txmq.crashpoints import crashpoint
from txmq.errors import (
    DatabaseConflict,
    DatabaseUnavailable,
    InDoubt,
    TransactionAborted,
    TxmqError,
)
from txmq.tx.postgres.caller import roll_back
from txmq.tx.postgres.commit import commit_and, guarded_commit
from txmq.tx.postgres.errors import translate
from txmq.tx.postgres.inbox import Claims, Position, claim
from txmq.tx.postgres.session import BEGIN

if TYPE_CHECKING:
    from psycopg2 import extensions

    from txmq.client.protocol.consumer.fetched import DeliveredMessage

    Connection = extensions.connection
    Connect = Callable[[], Connection]

CHAIN = 64  # transactions of which each begins with the COMMIT before it
IN_PLACE = 5  # runs of one transaction before its messages count as failed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 5.0
log = get_logger()


class Stopped(Exception):
    """The work ends while the database is away."""


class _Failed(Exception):
    """What a handler raised."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def run_with_inbox(
    consumer: Source, handler: Callable[..., object], connect: Connect, limits: Limits
) -> None:
    """Runs a handler in transactions, on connections of their own: for each thread, and
    for a keeper at each broker.
    """
    keepers = [Keeper(part, connect) for part in consumer.parts]
    for keeper in keepers:
        keeper.start()
    try:
        Runner(consumer, lambda: InboxWork(consumer, handler, connect, limits), limits).run()
    finally:
        for keeper in keepers:
            keeper.stop()


class _Settled(Exception):
    """The handler nacked a message and returned: there is nothing to commit for it."""


class _Open(NamedTuple):
    """Messages to be applied in one transaction; `claims` is what it got of the inbox,
    if it is open already.
    """

    messages: Sequence[DeliveredMessage]
    claims: Claims | None = None


NOTHING = _Open(())


class InboxWork:
    """One thread's work.

    The next messages are taken, if some wait, before the COMMIT of the ones before, so
    that their transaction begins in the round trip that commits. While something waits
    no thread is idle, so nobody else would have begun it sooner.
    """

    def __init__(
        self, consumer: Source, handler: Callable[..., object], connect: Connect, limits: Limits
    ) -> None:
        self._consumer, self._handler, self._connect, self._limits = (
            consumer,
            handler,
            connect,
            limits,
        )
        self._connection: Connection | None = None
        self._token = (
            new_token()
        )  # of every commit: it has no row, the inbox tells what became of one
        self._next, self._chain = NOTHING, 0

    def __call__(self, messages: Sequence[DeliveredMessage]) -> None:
        work, self._chain = _Open(messages), CHAIN
        while work.messages:
            self._next = NOTHING
            try:
                self._settle(work)
            except Stopped:
                left = (*work.messages, *self._next.messages)
                self._consumer.give_back(_in_hand(left))
                return
            work = self._next

    def _settle(self, work: _Open) -> None:
        messages = work.messages
        error = self._try(work)
        if error is None:
            return
        if len(messages) == 1:
            nack_all(self._consumer, messages, error)
        else:
            self._take_apart(_in_hand(messages))

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()

    def _take_apart(self, messages: Iterable[DeliveredMessage]) -> None:
        """Each in a transaction of its own; once one has failed, the later ones of its
        key go back with it.
        """
        self._chain = 0
        ordered, failed = self._consumer.settings.ordered, set[tuple[str, str]]()
        for message in messages:
            if ordered and message.key and (message.topic, message.key) in failed:
                self._consumer.give_back([message])
                continue
            error = self._try(_Open([message]))
            if error is not None:
                nack_all(self._consumer, [message], error)
                failed.add((message.topic, message.key or ""))

    def _try(self, work: _Open) -> BaseException | None:
        """Applies the messages and acks them; if that cannot be, why not. What may pass
        is tried again in place.
        """
        for attempt in range(IN_PLACE):
            try:
                self._transaction(self._connected(), work)
            except (DatabaseConflict, DatabaseUnavailable, InDoubt) as error:
                trouble: BaseException = error
            except _Failed as failed:
                return failed.error
            except _Settled:
                rest = self._rest(work.messages)
                return self._try(_Open(rest)) if rest else None
            except (
                TransactionAborted
            ) as error:  # a statement failed, and the handler passed over it
                return error
            else:
                return None
            log.warning("inbox.again", error=str(trouble), attempt=attempt + 1)
            self._consumer.count(retried=len(work.messages))
            self._pause(FIRST_PAUSE_S * 2**attempt)
            work = _Open(work.messages)
        return trouble

    def _rest(self, messages: Sequence[DeliveredMessage]) -> list[DeliveredMessage]:
        """Those that the handler did not nack; in an ordered group later ones of the
        same keys go back with them.
        """
        ordered, failed = self._consumer.settings.ordered, set[tuple[str, str]]()
        rest: list[DeliveredMessage] = []
        for message in messages:
            place = (message.topic, message.key or "")
            if not message.in_hand:
                failed.add(place)
            elif ordered and message.key and place in failed:
                self._consumer.give_back([message])
            else:
                rest.append(message)
        return rest

    def _transaction(self, connection: Connection, work: _Open) -> None:
        """One attempt. Raises _Failed with what the handler raised."""
        messages = work.messages
        try:
            claims = self._claim(connection, messages) if work.claims is None else work.claims
            fresh = messages if len(claims) == len(messages) else self._among(claims, messages)
            if fresh:
                self._handle(fresh, connection)
            if len(_in_hand(fresh)) < len(fresh):
                raise _Settled  # rolled back below, as all that is not committed
            self._commit(connection)
            crashpoint("inbox.after_commit")
        except BaseException:
            roll_back(connection)
            raise
        if len(fresh) < len(messages):
            self._consumer.count(duplicates=len(messages) - len(fresh))
        self._consumer.ack_many(messages)

    def _commit(self, connection: Connection) -> None:
        messages = self._ahead(connection)
        if not messages:
            guarded_commit(connection, self._token)
            return
        self._next, wanted = _Open(messages), self._wanted(messages)
        claims = commit_and(
            connection, self._token, lambda cursor, first: claim(cursor, wanted, first=first)
        )
        self._next = _Open(messages, claims)

    def _ahead(self, connection: Connection) -> Sequence[DeliveredMessage]:
        """What waits for the next transaction, if that is to be begun with this one's
        end. Lists may have to fill.
        """
        limits = self._limits
        if (
            self._next.messages
            or not self._chain
            or not connection.autocommit
            or limits.stop.is_set()
        ):
            return ()
        if limits.batch_wait:
            return ()
        self._chain -= 1
        try:
            return self._consumer.receive_many(limits.batch or 1, 0.0)
        except TxmqError:  # raised again where messages are waited for
            return ()

    def _claim(self, connection: Connection, messages: Sequence[DeliveredMessage]) -> Claims:
        """Opens the transaction."""
        with connection.cursor() as cursor:
            return claim(cursor, self._wanted(messages), first=BEGIN)

    def _wanted(self, messages: Iterable[DeliveredMessage]) -> dict[Position, list[int]]:
        offsets: dict[Position, list[int]] = {}
        for message in messages:
            offsets.setdefault(self._position(message), []).append(message.offset)
        return offsets

    def _among(
        self, claims: Claims, messages: Iterable[DeliveredMessage]
    ) -> list[DeliveredMessage]:
        """Those that the transaction is to apply."""
        return [
            message for message in messages if (self._position(message), message.offset) in claims
        ]

    def _position(self, message: DeliveredMessage) -> Position:
        return Position(
            self._consumer.inbox_of(message),
            message.topic,
            message.partition,
            self._consumer.epoch_of(message),
        )

    def _handle(self, messages: Sequence[DeliveredMessage], connection: Connection) -> None:
        import psycopg2  # loaded long since; the client as a whole does without

        argument: Any = messages if self._limits.batch is not None else messages[0]
        try:
            self._handler(argument, connection)
        except psycopg2.Error as error:
            known = translate(error, "in a handler")
            if isinstance(known, DatabaseConflict | DatabaseUnavailable):
                raise known from error
            raise _Failed(error) from error
        except (DatabaseConflict, DatabaseUnavailable):
            raise
        except Exception as error:  # whatever a handler raises, its messages failed
            raise _Failed(error) from error

    def _connected(self) -> Connection:
        """A connection that is fit for use, as soon as there is one. Raises Stopped."""
        pause = FIRST_PAUSE_S
        while self._connection is None or self._connection.closed:
            try:
                self._connection = open_connection(self._connect)
            except DatabaseUnavailable as error:
                log.warning("inbox.database_away", error=str(error))
                if self._consumer.closed:
                    raise Stopped from error
                self._pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return self._connection

    def _pause(self, seconds: float) -> None:
        """Waits about so long, but not when the work is to end."""
        if self._limits.stop.wait(seconds * (0.5 + random())):  # so that those who met do not meet again
            raise Stopped


def _in_hand(messages: Iterable[DeliveredMessage]) -> list[DeliveredMessage]:
    return [message for message in messages if message.in_hand]
