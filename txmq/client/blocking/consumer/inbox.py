"""Handlers with exactly one effect: each runs in a PostgreSQL transaction that also
records the message.

The ack follows the commit. Where the outcome of a commit is unknown, or the database
was away, the message is applied again: the inbox shows whether it was applied before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import random
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from txmq.client.blocking.consumer.inbox_opening import InboxMember, InboxOpenings
from txmq.client.blocking.consumer.inbox_upkeep import InboxUpkeep, open_connection
from txmq.client.blocking.consumer.runner import MessageSource, Runner
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.inbox_opening import OpeningPauses
from txmq.client.protocol.consumer.handlers import (
    HandlerOptions,
    failed_messages,
    require_finished,
)
from txmq.client.protocol.transaction.tokens import new_token
from txmq.crashpoints import crashpoint
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    DatabaseConflict,
    DatabaseUnavailable,
    InboxMismatch,
    InDoubt,
    RequestRejected,
    RequestTimeout,
    TransactionAborted,
    TxmqError,
)
from txmq.faces import run
from txmq.tx.postgres.blocking import guarded_commit, roll_back
from txmq.tx.postgres.caller import BEGIN
from txmq.tx.postgres.commit import commit_and
from txmq.tx.postgres.drivers import blocking_driver
from txmq.tx.postgres.errors import driver_error, translate
from txmq.tx.postgres.inbox import Claims, Position, claim

if TYPE_CHECKING:
    from txmq.client.protocol.consumer.fetched import DeliveredMessage
    from txmq.model.message import ReceivedMessage
    from txmq.tx.postgres.driver import BlockingConnection

    Connect = Callable[[], BlockingConnection]

CHAINED = 64  # transactions that begin in the round trip of the COMMIT before them
CONFLICT_RUNS = 5  # runs of one transaction before its messages have failed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 5.0
log = get_logger()


class InboxSource(MessageSource, Protocol):
    """The members of a consumer, as handlers with an inbox use them."""

    @property
    def members(self) -> Sequence[InboxMember]: ...
    def give_back(self, messages: Iterable[ReceivedMessage], *, rejoin: bool = False) -> None: ...


def run_with_inbox(
    source: InboxSource,
    handler: Callable[..., object],
    connect: Connect,
    options: HandlerOptions,
    stop: Event,
) -> None:
    """Run a handler in transactions. Each thread has a connection of its own, and so
    has the upkeep of each member's inbox.
    """
    upkeeps = [InboxUpkeep(member, connect) for member in source.members]
    openings = {
        member.owner: upkeep.openings
        for member, upkeep in zip(source.members, upkeeps, strict=True)
    }
    for upkeep in upkeeps:
        upkeep.start()
    try:
        Runner(
            source,
            lambda: InboxWorker(source, openings, handler, connect, options, stop),
            options,
            stop,
        ).run()
    finally:
        for upkeep in upkeeps:
            upkeep.stop()


class _Stopped(Exception):
    """The work was stopped while the database was away."""


class _HandlerFailed(Exception):
    """The handler raised `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _NackedByHandler(Exception):
    """The handler nacked a message and returned: there is nothing to commit for it."""


class _NotOpen(Exception):
    """A partition of the inbox could not be opened, or lacked effects: its messages are
    delivered again, behind those that it lacks.
    """


class _Batch(NamedTuple):
    """Messages to apply in one transaction. `claims` are set where the transaction is
    open already.
    """

    messages: Sequence[DeliveredMessage]
    claims: Claims | None = None


EMPTY = _Batch(())


class InboxWorker:
    """The work of one thread.

    If messages wait, the next ones are received before the COMMIT of those before, so
    that their transaction begins in the round trip that commits. While messages wait no
    thread is idle, so no other thread would have begun them sooner.
    """

    def __init__(
        self,
        source: InboxSource,
        openings: Mapping[object, InboxOpenings],
        handler: Callable[..., object],
        connect: Connect,
        options: HandlerOptions,
        stop: Event,
    ) -> None:
        """`openings`: of each member, by what it stores as owner in its batches."""
        self._source, self._handler, self._connect = source, handler, connect
        self._openings = openings
        self._options, self._stop = options, stop
        self._opening_pauses = OpeningPauses()
        self._connection: BlockingConnection | None = None
        # Of every commit. It has no row: the inbox shows the outcome of a commit.
        self._token = new_token()
        self._next, self._chained = EMPTY, 0  # to chain before the worker receives anew
        self._failed: set[tuple[str, str]] = set()  # keys of the batch that may not go on

    def __call__(self, messages: Sequence[DeliveredMessage]) -> None:
        batch, self._chained = _Batch(messages), CHAINED
        while batch.messages:
            self._next = EMPTY
            try:
                self._process(batch)
            except _Stopped:
                left = (*batch.messages, *self._next.messages)
                self._source.give_back(_outstanding(left))
                return
            batch = self._next

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _process(self, batch: _Batch) -> None:
        self._failed.clear()
        if len(batch.messages) == 1:
            error = self._apply_in_place(batch)
            if error is not None:
                self._nack(batch.messages, error)
        elif self._apply(batch) is not None:
            self._apply_one_by_one(batch.messages)

    def _nack(self, messages: Sequence[DeliveredMessage], error: BaseException) -> None:
        self._source.nack_many(failed_messages(messages, error), error=error)

    def _apply_one_by_one(self, messages: Iterable[DeliveredMessage]) -> None:
        """Apply each message in a transaction of its own.

        In an ordered group the later messages of a failed one's key are returned: also
        of one that the handler has nacked, whether in the attempt with all of them or
        now.
        """
        self._chained = 0
        for message in messages:
            if not message.in_hand:
                self._failed.add(_key_of(message))
            elif self._waits(message):
                self._source.give_back([message])
            elif (error := self._apply_in_place(_Batch([message]))) is not None:
                self._nack([message], error)
                self._failed.add(_key_of(message))

    def _waits(self, message: DeliveredMessage) -> bool:
        """Return whether a message has to wait for an earlier one of its key."""
        ordered = self._source.settings.ordered and bool(message.key)
        return ordered and _key_of(message) in self._failed

    def _give_back(self, messages: Sequence[DeliveredMessage]) -> None:
        """Return messages, and later those of their keys, to the group."""
        self._failed.update(map(_key_of, messages))
        self._source.give_back(_outstanding(messages), rejoin=True)

    def _apply_in_place(self, batch: _Batch) -> BaseException | None:
        """Apply a message as often as the consumer may, each time in a transaction of
        its own. Return the last error if all fail.
        """
        error = self._apply(batch)
        if error is None:
            return None
        attempts, (messages, _claims) = self._source.in_place(), batch
        while (
            # The database's own errors were tried again before.
            not isinstance(error, DatabaseConflict | DatabaseUnavailable | InDoubt)
            and (pause := attempts.pause_after(error, messages)) is not None
        ):
            self._pause(pause)
            if self._source.closed:
                break
            self._source.count(retried=len(messages))
            error = self._apply(_Batch(messages))
            if error is None:
                return None
        return error

    def _apply(self, batch: _Batch) -> BaseException | None:
        """Apply the messages and ack them. Return the error if that fails.

        Conflicts in the database, and its outages, are tried again.
        """
        for attempt in range(CONFLICT_RUNS):
            try:
                self._transaction(self._connected(), batch)
            except (DatabaseConflict, DatabaseUnavailable, InDoubt) as error:
                trouble: BaseException = error
            except _NotOpen:
                self._give_back(batch.messages)
                return None
            except _HandlerFailed as failed:
                return failed.error
            except _NackedByHandler:
                rest = self._not_nacked(batch.messages)
                return self._apply(_Batch(rest)) if rest else None
            except TransactionAborted as error:
                # A statement failed, and the handler caught its error.
                return error
            else:
                return None
            log.warning("inbox.again", error=str(trouble), attempt=attempt + 1)
            self._source.count(retried=len(batch.messages))
            self._pause(FIRST_PAUSE_S * 2**attempt)
            batch = _Batch(batch.messages)
        return trouble

    def _not_nacked(self, messages: Sequence[DeliveredMessage]) -> list[DeliveredMessage]:
        """Return the messages that the handler did not nack.

        In an ordered group the later messages of a nacked one's key are returned to the
        group.
        """
        rest: list[DeliveredMessage] = []
        for message in messages:
            if not message.in_hand:
                self._failed.add(_key_of(message))
            elif self._waits(message):
                self._source.give_back([message])
            else:
                rest.append(message)
        return rest

    def _transaction(self, connection: BlockingConnection, batch: _Batch) -> None:
        """Run one attempt. Raises _HandlerFailed, _NackedByHandler."""
        messages = batch.messages
        if batch.claims is None:
            self._open(connection, messages)
        try:
            claims = self._claim(connection, messages) if batch.claims is None else batch.claims
            fresh = messages if len(claims) == len(messages) else self._claimed(claims, messages)
            if fresh:
                self._handle(fresh, connection)
            if len(_outstanding(fresh)) < len(fresh):
                raise _NackedByHandler  # noqa: TRY301  # rolled back below
            self._commit(connection)
            crashpoint("inbox.after_commit")
        except BaseException:
            roll_back(connection)
            raise
        if len(fresh) < len(messages):
            self._source.count(duplicates=len(messages) - len(fresh))
        self._source.ack_many(messages)

    def _commit(self, connection: BlockingConnection) -> None:
        messages = self._receive_next(connection)
        if not messages:
            guarded_commit(connection, self._token)
            return
        self._next, wanted = _Batch(messages), self._positions(messages)
        if not self._are_open(messages):
            guarded_commit(connection, self._token)
            return
        driver = blocking_driver(connection)
        claims = run(
            commit_and(driver, self._token, lambda first: claim(driver, wanted, first=first))
        )
        self._next = _Batch(messages, claims)

    def _receive_next(self, connection: BlockingConnection) -> Sequence[DeliveredMessage]:
        """Return waiting messages, if their transaction may begin with the COMMIT.

        With `batch_wait` a list has to fill first.
        """
        if (
            self._next.messages
            or not self._chained
            or not connection.autocommit
            or self._stop.is_set()
        ):
            return ()
        if self._options.batch_wait:
            return ()
        self._chained -= 1
        try:
            return self._source.receive_many(self._options.batch or 1, 0.0)
        except TxmqError:  # raised again when the runner receives
            return ()

    def _claim(
        self, connection: BlockingConnection, messages: Sequence[DeliveredMessage]
    ) -> Claims:
        """Begin the transaction."""
        return run(claim(blocking_driver(connection), self._positions(messages), first=BEGIN))

    def _positions(self, messages: Iterable[DeliveredMessage]) -> dict[Position, list[int]]:
        offsets: dict[Position, list[int]] = {}
        for message in messages:
            offsets.setdefault(self._position(message), []).append(message.offset)
        return offsets

    def _claimed(
        self, claims: Claims, messages: Iterable[DeliveredMessage]
    ) -> list[DeliveredMessage]:
        """Return the messages that were not applied before."""
        return [
            message for message in messages if (self._position(message), message.offset) in claims
        ]

    def _position(self, message: DeliveredMessage) -> Position:
        fetched = message.fetched
        position: Position | None = fetched.position
        if position is None:
            openings, epoch = self._openings[fetched.owner], fetched.epoch
            place = (fetched.topic_id, fetched.partition)
            if epoch is None and fetched.epoch_at is not None:
                return openings.position(*place, fetched.epoch_at(message.offset))
            position = fetched.position = openings.position(*place, epoch or 0)
        return position

    def _are_open(self, messages: Iterable[DeliveredMessage]) -> bool:
        return all(
            self._openings[message.fetched.owner].are_open((self._position(message),))
            for message in messages
        )

    def _open(self, connection: BlockingConnection, messages: Sequence[DeliveredMessage]) -> None:
        """Open the partitions of the messages. Raises _NotOpen, InboxMismatch."""
        if self._are_open(messages):
            return
        try:
            restored = sum(
                self._openings[message.fetched.owner].open(
                    connection, self._position(message), message.topic
                )
                for message in messages
            )
        except (RequestRejected, BrokerUnavailable, ConnectionLost, RequestTimeout) as error:
            log.warning("inbox.not_opened", error=str(error))
            self._pause(self._opening_pauses.next())
            raise _NotOpen from error
        except InboxMismatch:
            self._source.give_back(_outstanding(messages))
            raise
        self._opening_pauses.restart()
        if restored and self._source.settings.ordered:
            raise _NotOpen

    def _handle(self, messages: Sequence[DeliveredMessage], connection: BlockingConnection) -> None:
        argument: Any = messages if self._options.batch is not None else messages[0]
        try:
            require_finished(self._handler(argument, connection))
        except (DatabaseConflict, DatabaseUnavailable):
            raise
        except Exception as error:  # a handler may raise anything
            if driver_error(error) is not None:
                translated = translate(error, "in a handler")
                if isinstance(translated, DatabaseConflict | DatabaseUnavailable):
                    raise translated from error
            raise _HandlerFailed(error) from error

    def _connected(self) -> BlockingConnection:
        """Return a usable connection, as soon as there is one. Raises _Stopped."""
        pause = FIRST_PAUSE_S
        while self._connection is None or self._connection.closed:
            if self._connection is not None:
                for openings in self._openings.values():
                    openings.forget()
            try:
                self._connection = open_connection(self._connect)
            except DatabaseUnavailable as error:
                log.warning("inbox.database_away", error=str(error))
                if self._source.closed:
                    raise _Stopped from error
                self._pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return self._connection

    def _pause(self, seconds: float) -> None:
        """Wait about so long. Raises _Stopped."""
        # The random part keeps transactions in conflict from meeting again.
        if self._stop.wait(seconds * (0.5 + random())):  # noqa: S311  # no secret
            raise _Stopped


def _key_of(message: DeliveredMessage) -> tuple[str, str]:
    return message.topic, message.key or ""


def _outstanding(messages: Iterable[DeliveredMessage]) -> list[DeliveredMessage]:
    return [message for message in messages if message.in_hand]
