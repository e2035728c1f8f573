"""Handlers whose effect comes exactly once: each runs in a PostgreSQL transaction that also remembers the message.

The ack follows the commit. Where a commit is in doubt, or the database was away, the message is simply taken again: the
inbox tells whether it was applied. Nothing is acked on a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import random
from typing import TYPE_CHECKING, Any

from txmq.client.inbox_keeper import Keeper, open_connection
from txmq.client.log import get_logger
from txmq.client.runner import Limits, Runner, Source, nack_all
from txmq.client.tokens import new_token
from txmq.crashpoints import crashpoint
from txmq.errors import DatabaseConflict, DatabaseUnavailable, InDoubt, TransactionAborted
from txmq.message import ReceivedMessage
from txmq.tx.postgres.caller import roll_back
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.inbox import Position, apply_batch
from txmq.tx.postgres.translate import translate

if TYPE_CHECKING:
    from psycopg2 import extensions

    Connection = extensions.connection
    Connect = Callable[[], Connection]

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


def run_with_inbox(consumer: Source, handler: Callable[..., object], connect: Connect, limits: Limits) -> None:
    """Runs a handler in transactions, on connections of their own: for each thread, and for a keeper at each broker."""
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


class InboxWork:
    """One thread's work."""

    def __init__(self, consumer: Source, handler: Callable[..., object], connect: Connect, limits: Limits) -> None:
        self._consumer, self._handler, self._connect, self._limits = consumer, handler, connect, limits
        self._connection: Connection | None = None

    def __call__(self, messages: Sequence[ReceivedMessage]) -> None:
        try:
            error = self._try(messages)
            if error is None:
                return
            if len(messages) == 1:
                nack_all(self._consumer, messages, error)
            else:
                self._take_apart(filter(self._consumer.holds, messages))
        except Stopped:
            self._consumer.give_back(message for message in messages if self._consumer.holds(message))

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()

    def _take_apart(self, messages: Iterable[ReceivedMessage]) -> None:
        """Each in a transaction of its own; once one has failed, the later ones of its key go back with it."""
        ordered, failed = self._consumer.settings.ordered, set[tuple[str, str]]()
        for message in messages:
            if ordered and message.key and (message.topic, message.key) in failed:
                self._consumer.give_back([message])
                continue
            error = self._try([message])
            if error is not None:
                nack_all(self._consumer, [message], error)
                failed.add((message.topic, message.key or ""))

    def _try(self, messages: Sequence[ReceivedMessage]) -> BaseException | None:
        """Applies the messages and acks them; if that cannot be, why not. What may pass is tried again in place."""
        for attempt in range(IN_PLACE):
            try:
                fresh = self._transaction(self._connected(), messages)
            except (DatabaseConflict, DatabaseUnavailable, InDoubt) as error:
                trouble: BaseException = error
            except _Failed as failed:
                return failed.error
            except _Settled:
                rest = self._rest(messages)
                return self._try(rest) if rest else None
            except TransactionAborted as error:  # a statement failed, and the handler passed over it
                return error
            else:
                self._consumer.count(duplicates=len(messages) - fresh)
                for message in messages:
                    self._consumer.ack(message)
                return None
            log.warning("inbox.again", error=str(trouble), attempt=attempt + 1)
            self._consumer.count(retried=len(messages))
            self._pause(FIRST_PAUSE_S * 2**attempt)
        return trouble

    def _rest(self, messages: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
        """Those that the handler did not nack; in an ordered group later ones of the same keys go back with them."""
        ordered, failed, rest = self._consumer.settings.ordered, set[tuple[str, str]](), list[ReceivedMessage]()
        for message in messages:
            place = (message.topic, message.key or "")
            if not self._consumer.holds(message):
                failed.add(place)
            elif ordered and message.key and place in failed:
                self._consumer.give_back([message])
            else:
                rest.append(message)
        return rest

    def _transaction(self, connection: Connection, messages: Sequence[ReceivedMessage]) -> int:
        """One attempt; returns how many messages were not duplicates. Raises _Failed with what the handler raised."""
        try:
            fresh = self._claim(connection, messages)
            if fresh:
                self._handle(fresh, connection)
            if not all(map(self._consumer.holds, fresh)):
                raise _Settled  # noqa: TRY301  # rolled back below, as all that is not committed
            guarded_commit(connection, new_token())
            crashpoint("inbox.after_commit")
        except BaseException:
            roll_back(connection)
            raise
        return len(fresh)

    def _claim(self, connection: Connection, messages: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
        """Opens the transaction; returns the messages that it is to apply. In one order for all, against deadlocks."""
        fresh = set[tuple[Position, int]]()
        with connection.cursor() as cursor:
            for number, (position, offsets) in enumerate(sorted(self._positions(messages).items())):
                found = apply_batch(cursor, position, sorted(offsets), begin=number == 0)
                fresh.update((position, offset) for offset in found)
        return [message for message in messages if (self._position(message), message.offset) in fresh]

    def _positions(self, messages: Iterable[ReceivedMessage]) -> dict[Position, list[int]]:
        offsets: dict[Position, list[int]] = {}
        for message in messages:
            offsets.setdefault(self._position(message), []).append(message.offset)
        return offsets

    def _position(self, message: ReceivedMessage) -> Position:
        return Position(
            self._consumer.inbox_of(message), message.topic, message.partition, self._consumer.epoch_of(message)
        )

    def _handle(self, messages: list[ReceivedMessage], connection: Connection) -> None:
        import psycopg2  # noqa: PLC0415  # loaded long since; the client as a whole does without

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
        if self._limits.stop.wait(seconds * (0.5 + random())):  # noqa: S311  # so that those who met do not meet again
            raise Stopped
