"""Handlers with exactly one effect: each runs in a PostgreSQL transaction that also
records the message.

The ack follows the commit. Where the outcome of a commit is unknown, or the database
was away, the message is applied again: the inbox shows whether it was applied before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import random
from typing import Any, Protocol

from txmq.client.log import LastingTrouble, get_logger
from txmq.client.protocol.alarm_reports import AlarmReport, alarm_source, report_args
from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.awaited.inbox_opening import InboxMember, InboxOpenings, OpeningPauses
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.handlers import failed_messages
from txmq.client.protocol.consumer.in_place import InPlaceAttempts
from txmq.client.protocol.consumer.settings import ConsumerSettings
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
    TransactionEnded,
    TxmqError,
)
from txmq.model.causation import current_cause
from txmq.model.message import ReceivedMessage
from txmq.tx.postgres.caller import BEGIN, roll_back
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.errors import driver_error, translate, translated
from txmq.tx.postgres.handler_watch import MARK, PROOF, HandlerWatch
from txmq.tx.postgres.inbox import Claims, Position, claim
from txmq.tx.postgres.inbox_compaction import compact

CONFLICT_RUNS = 5  # runs of one transaction before its messages have failed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 5.0
EVERY_S = 5.0  # between two rounds of the upkeep
REPORTED_S = 3_600.0
log = get_logger()


class Database(ABC):
    """A connection that is made when it is needed, in autocommit mode."""

    _driver: Driver | None = None

    @property
    def open(self) -> Driver | None:
        """The driver of the connection, if there is one that works."""
        return None if self._driver is None or self._driver.closed else self._driver

    @property
    def lost(self) -> bool:
        """True where there was a connection, and it works no more."""
        return self._driver is not None and self._driver.closed

    @abstractmethod
    async def connect(self) -> Driver:
        """Return the driver of a new connection.

        Raises DatabaseUnavailable, DatabaseError, LocalProtocolError.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the connection."""


class Inbox(ABC):
    """The inbox of one member: its open partitions, and what tends it every few
    seconds: it opens the partitions that the member got, and folds rows to ranges.
    """

    def __init__(self, member: InboxMember, core: AwaitedCore, database: Database) -> None:
        self._member, self._core, self._database = member, core, database
        self._openings = InboxOpenings(member, self._call)
        self._folded_acks = 0  # the count of acks at the last fold
        self.away = LastingTrouble("inbox.database_away", group=member.group)

    async def _call(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        return await self._core.call(name, args, repeat=True)

    def forget(self) -> None:
        """Open all partitions anew: the database may be another one now."""
        self._openings.forget()

    def position(self, message: DeliveredMessage) -> Position:
        """Return what the inbox knows a message's partition by."""
        fetched = message.fetched
        position: Position | None = fetched.position
        if position is None:
            place = (fetched.topic_id, fetched.partition)
            if fetched.epoch is None and fetched.epoch_at is not None:
                return self._openings.position(*place, fetched.epoch_at(message.offset))
            position = fetched.position = self._openings.position(*place, fetched.epoch or 0)
        return position

    def is_open(self, position: Position) -> bool:
        """Return whether the position is open."""
        return self._openings.are_open((position,))

    @abstractmethod
    async def open(self, driver: Driver, position: Position, topic: str) -> int:
        """Open a position, one at a time; see `InboxOpenings.open_position`."""

    async def tend(self, *, closing: bool = False) -> None:
        """Run one round. After an error the next round tries again."""
        try:
            driver = self._database.open
            if driver is None:
                if self._database.lost:
                    self.forget()
                driver = await self._database.connect()
                self.away.over()
            if not closing:
                await self._openings.check_server(driver)
                await self._open_assigned(driver)
            await self._report_lost()
            acked = self._member.stats.acked
            if acked != self._folded_acks:
                await compact(driver, self._member.group, str(self._member.log_id))
                self._folded_acks = acked
        except DatabaseUnavailable as error:
            self.away.warn(error)
        except TxmqError as error:
            log.warning("inbox.not_tended", group=self._member.group, error=str(error))

    async def _open_assigned(self, driver: Driver) -> None:
        """Open what no handler has opened: a partition may lack effects and have no new
        messages.
        """
        for position, topic in self._openings.assigned():
            await self.open(driver, position, topic)

    async def _report_lost(self) -> None:
        """Report the alarm while the consumer runs, and for an hour after: nothing else
        would show it later.
        """
        if self._openings.lost:
            lost = ", ".join(self._openings.lost.values())[:900]
            text = f"group {self._member.group}: the database was restored to before {lost}"
            action = (
                "restore the effects of these messages by other means: they are not retained"
                " any more"
            )
            alarm = AlarmReport("inbox.lost", "critical", text, action)
            args = report_args(alarm_source("inbox"), [alarm], REPORTED_S)
            await self._call("alarms.report", args)


class InboxSource(Protocol):
    """The members of a consumer, as handlers with an inbox use them."""

    @property
    def settings(self) -> ConsumerSettings: ...
    @property
    def closed(self) -> bool: ...
    def in_place(self) -> InPlaceAttempts: ...
    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None: ...
    def nack_many(self, messages: Iterable[ReceivedMessage], *, error: BaseException) -> None: ...
    def give_back(self, messages: Iterable[ReceivedMessage], *, rejoin: bool = False) -> None: ...
    def count(self, *, duplicates: int = 0, retried: int = 0) -> None: ...


class Stopped(Exception):
    """The work was stopped while the database was away."""


class _HandlerFailed(Exception):
    """The handler raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _NackedByHandler(Exception):
    """The handler nacked a message and returned: there is nothing to commit for it."""


class _NotOpen(Exception):
    """A partition of the inbox could not be opened, or lacked effects: its messages are
    delivered again, behind those that it lacks.
    """


class InboxWork(ABC):
    """The work of one worker, which has a connection of its own."""

    def __init__(
        self,
        source: InboxSource,
        inboxes: Mapping[object, Inbox],
        handler: Callable[..., object],
        database: Database,
        *,
        lists: bool,
    ) -> None:
        """`inboxes`: of each member, by what it stores as owner in its batches."""
        self._source, self._inboxes, self._database = source, inboxes, database
        self._handler, self._lists = handler, lists
        self._opening_pauses = OpeningPauses()
        # Of every commit. It has no row: the inbox shows the outcome of a commit.
        self._token = new_token()
        self._failed: set[tuple[str, str]] = set()  # keys of the messages that may not go on
        self._handled: Sequence[DeliveredMessage] = ()  # the handler was last called with

    @abstractmethod
    async def _finished(self, answer: object) -> None:
        """Wait for what the handler has returned. Raises LocalProtocolError where its
        work may not be done.
        """

    @abstractmethod
    async def _sleep(self, seconds: float) -> None:
        """Wait for so many seconds. Raises Stopped."""

    async def _commit(self, driver: Driver) -> None:
        """Commit the open transaction."""
        await guarded_commit(driver, self._token, before=PROOF)

    async def apply_all(
        self, messages: Sequence[DeliveredMessage], claims: Claims | None = None
    ) -> None:
        """Apply messages and settle them. `claims` are set where their transaction is
        open already. Raises Stopped; then the rest is to be returned.
        """
        self._failed.clear()
        self._handled = ()
        try:
            await self._apply_all(messages, claims)
        except SystemExit as error:  # counts as a failure, or the next process would end, too
            self._nack(self._handled, error)
            raise

    async def _apply_all(self, messages: Sequence[DeliveredMessage], claims: Claims | None) -> None:
        if len(messages) == 1:
            error = await self._apply_in_place(messages, claims)
            if error is not None:
                self._nack(messages, error)
        elif await self._apply(messages, claims) is not None:
            await self._apply_one_by_one(messages)

    def _nack(self, messages: Sequence[DeliveredMessage], error: BaseException) -> None:
        self._source.nack_many(failed_messages(messages, error), error=error)

    async def _apply_one_by_one(self, messages: Iterable[DeliveredMessage]) -> None:
        """Apply each message in a transaction of its own.

        In an ordered group the later messages of a failed one's key are returned: also
        of one that the handler has nacked, whether in the attempt with all of them or
        now.
        """
        for message in messages:
            if not message.in_hand:
                self._failed.add(_key_of(message))
            elif self._waits(message):
                self._source.give_back([message])
            elif (error := await self._apply_in_place([message])) is not None:
                self._nack([message], error)
                self._failed.add(_key_of(message))

    def _waits(self, message: DeliveredMessage) -> bool:
        """Return whether a message has to wait for an earlier one of its key."""
        ordered = self._source.settings.ordered and bool(message.key)
        return ordered and _key_of(message) in self._failed

    def _give_back(self, messages: Sequence[DeliveredMessage]) -> None:
        """Return messages, and later those of their keys, to the group."""
        self._failed.update(map(_key_of, messages))
        self._source.give_back(outstanding(messages), rejoin=True)

    async def _apply_in_place(
        self, messages: Sequence[DeliveredMessage], claims: Claims | None = None
    ) -> BaseException | None:
        """Apply a message as often as the consumer may, each time in a transaction of
        its own. Return the last error if all fail.
        """
        error = await self._apply(messages, claims)
        if error is None:
            return None
        attempts = self._source.in_place()
        while (
            # The database's own errors were tried again before.
            not isinstance(error, DatabaseConflict | DatabaseUnavailable | InDoubt)
            and (pause := attempts.pause_after(error, messages)) is not None
        ):
            await self._sleep(pause)
            if self._source.closed:
                break
            self._source.count(retried=len(messages))
            error = await self._apply(messages)
            if error is None:
                return None
        return error

    async def _apply(
        self, messages: Sequence[DeliveredMessage], claims: Claims | None = None
    ) -> BaseException | None:
        """Apply the messages and ack them. Return the error if that fails.

        Conflicts in the database, and its outages, are tried again.
        """
        for attempt in range(CONFLICT_RUNS):
            driver = await self._connected()
            try:
                await self._transaction(driver, messages, claims)
            except (DatabaseConflict, DatabaseUnavailable, InDoubt) as error:
                trouble: BaseException = error
            except _NotOpen:
                self._give_back(messages)
                return None
            except _HandlerFailed as failed:
                return failed.error
            except _NackedByHandler:
                rest = self._not_nacked(messages)
                return await self._apply(rest) if rest else None
            except (TransactionAborted, TransactionEnded) as error:
                # A statement failed, or the handler has ended the transaction, and it
                # caught the error.
                return error
            else:
                return None
            log.warning("inbox.again", error=str(trouble), attempt=attempt + 1)
            self._source.count(retried=len(messages))
            await self._pause(FIRST_PAUSE_S * 2**attempt)
            claims = None
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

    async def _transaction(
        self, driver: Driver, messages: Sequence[DeliveredMessage], claims: Claims | None
    ) -> None:
        """Run one attempt. Raises _HandlerFailed, _NackedByHandler."""
        if claims is None:
            with translated("holding the inbox's transactions"):
                await driver.hold()
            await self._open(driver, messages)
        watch = HandlerWatch(driver, _described(messages))
        try:
            if claims is None:
                claims = await claim(driver, self._positions(messages), first=BEGIN + MARK)
            fresh = messages if len(claims) == len(messages) else self._claimed(claims, messages)
            if fresh:
                watch.start()
                await self._handle(fresh, watch)
                watch.require_intact()
            if len(outstanding(fresh)) < len(fresh):
                raise _NackedByHandler  # noqa: TRY301  # rolled back below
            watch.end()
            await self._commit_watched(driver, watch)
            crashpoint("inbox.after_commit")
        except BaseException:
            watch.release()
            await roll_back(driver)
            raise
        watch.release()
        if len(fresh) < len(messages):
            self._source.count(duplicates=len(messages) - len(fresh))
        self._source.ack_many(messages)
        # A cancellation that came during COMMIT: what is committed is acked first.
        if driver.interruption is not None:
            raise driver.interruption

    async def _commit_watched(self, driver: Driver, watch: HandlerWatch) -> None:
        """Commit. Raises TransactionEnded where the open transaction is another one."""
        try:
            await self._commit(driver)
        except TransactionEnded:
            raise watch.ended() from None

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

    def _inbox(self, message: DeliveredMessage) -> Inbox:
        return self._inboxes[message.fetched.owner]

    def _position(self, message: DeliveredMessage) -> Position:
        return self._inbox(message).position(message)

    def _closed(self, messages: Iterable[DeliveredMessage]) -> list[DeliveredMessage]:
        """Return the messages whose partitions are not open."""
        return [
            message
            for message in messages
            if not self._inbox(message).is_open(self._position(message))
        ]

    async def _open(self, driver: Driver, messages: Sequence[DeliveredMessage]) -> None:
        """Open the partitions of the messages. Raises _NotOpen, InboxMismatch."""
        closed, restored = self._closed(messages), 0
        try:
            for message in closed:
                inbox = self._inbox(message)
                restored += await inbox.open(driver, inbox.position(message), message.topic)
        except (RequestRejected, BrokerUnavailable, ConnectionLost, RequestTimeout) as error:
            log.warning("inbox.not_opened", error=str(error))
            await self._pause(self._opening_pauses.next())
            raise _NotOpen from error
        except InboxMismatch:
            self._source.give_back(outstanding(messages))
            raise
        if closed:
            self._opening_pauses.restart()
        if restored and self._source.settings.ordered:
            raise _NotOpen

    async def _handle(self, messages: Sequence[DeliveredMessage], watch: HandlerWatch) -> None:
        self._handled = messages
        argument: Any = messages if self._lists else messages[0]
        cause = current_cause.set(None if self._lists else messages[0])
        try:
            await self._finished(self._handler(argument, watch.driver.connection))
        except Exception as error:  # a handler may raise anything
            known = driver_error(error) is not None
            found = translate(error, "in a handler") if known else error
            if not isinstance(found, DatabaseConflict | DatabaseUnavailable):
                raise _HandlerFailed(error) from error
            # psycopg closes the connection behind a rollback that was refused.
            watch.require_unrefused()
            if found is error:
                raise
            raise found from error
        finally:
            current_cause.reset(cause)

    async def _connected(self) -> Driver:
        """Return a usable connection, as soon as there is one. Raises Stopped, also
        once the consumer is closed.
        """
        pause = FIRST_PAUSE_S
        while (driver := self._database.open) is None:
            if self._database.lost:
                for inbox in self._inboxes.values():
                    inbox.forget()
            away = next(iter(self._inboxes.values())).away  # of all workers
            try:
                await self._database.connect()
                away.over()
            except DatabaseUnavailable as error:
                away.warn(error)
                if self._source.closed:
                    raise Stopped from error
                await self._pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return driver

    async def _pause(self, seconds: float) -> None:
        """Wait about so long. Raises Stopped."""
        # The random part keeps transactions in conflict from meeting again.
        await self._sleep(seconds * (0.5 + random()))  # noqa: S311  # no secret


def _described(messages: Sequence[DeliveredMessage]) -> str:
    """Return the words of an error for the messages of a transaction."""
    first, others = messages[0], len(messages) - 1
    name = f"message {first.topic}/{first.partition} {first.offset}"
    return f"{name} and {others} others" if others else name


def _key_of(message: DeliveredMessage) -> tuple[str, str]:
    return message.topic, message.key or ""


def outstanding(messages: Iterable[DeliveredMessage]) -> list[DeliveredMessage]:
    """Return the messages that are not settled."""
    return [message for message in messages if message.in_hand]
