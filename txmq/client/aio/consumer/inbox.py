"""Handlers with exactly one effect on asyncio: each runs in a PostgreSQL transaction
that also records the message.

The ack follows the commit. Where the outcome of a commit is unknown, or the database
was away, the message is applied again: the inbox shows whether it was applied before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from random import random
from typing import Any

from txmq.client.aio.consumer.group_member import LoopMember
from txmq.client.aio.consumer.members import LoopMembers
from txmq.client.aio.consumer.runner import Handler, Worker
from txmq.client.log import get_logger
from txmq.client.protocol.alarm_reports import AlarmReport, alarm_source, report_args
from txmq.client.protocol.awaited.inbox_opening import InboxOpenings, OpeningPauses
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.handlers import failed_messages, require_finished
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
from txmq.tx.postgres.caller import BEGIN, roll_back
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.drivers import async_driver
from txmq.tx.postgres.errors import driver_error, translate, translated
from txmq.tx.postgres.inbox import Claims, Position, claim
from txmq.tx.postgres.inbox_compaction import compact

CONFLICT_RUNS = 5  # runs of one transaction before its messages have failed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 5.0
EVERY_S = 5.0  # between two rounds of the upkeep
REPORTED_S = 3_600.0
Connect = Callable[[], Any]  # of a connection, or an awaitable of one
log = get_logger()


class Database:
    """A connection that is made when it is needed, in autocommit mode."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._driver: Driver | None = None

    @property
    def open(self) -> Driver | None:
        """The driver of the connection, if there is one that works."""
        return None if self._driver is None or self._driver.closed else self._driver

    @property
    def lost(self) -> bool:
        """True where there was a connection, and it works no more."""
        return self._driver is not None and self._driver.closed

    async def connect(self) -> Driver:
        """Return the driver of a new connection.

        Raises DatabaseUnavailable, DatabaseError, LocalProtocolError.
        """
        with translated("connecting to PostgreSQL"):
            connection = self._connect()
            if isawaitable(connection):
                connection = await connection
            # psycopg has it; connections of asyncpg have no other mode.
            if (set_autocommit := getattr(connection, "set_autocommit", None)) is not None:
                await set_autocommit(True)
        self._driver = async_driver(connection)
        return self._driver

    async def close(self) -> None:
        """Close the connection."""
        driver, self._driver = self._driver, None
        if driver is not None and not driver.closed:
            with suppress(Exception):  # it is not needed any more
                closing = driver.connection.close()
                if isawaitable(closing):
                    await closing


class Inbox:
    """The inbox of one member: its open partitions, and a task that tends it.

    Every few seconds the task opens the partitions that the member got, and folds rows
    to ranges.
    """

    def __init__(self, member: LoopMember, connect: Connect) -> None:
        self._member, self._database = member, Database(connect)
        self._lock = asyncio.Lock()
        self._openings = InboxOpenings(member, self._call)
        self._folded_acks = 0  # the count of acks at the last fold
        self._task: asyncio.Task[None] | None = None

    async def _call(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        return await self._member.core.call(name, args, repeat=True)

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

    async def open(self, driver: Driver, position: Position, topic: str) -> int:
        """Open a position; see `InboxOpenings.open_position`."""
        async with self._lock:
            return await self._openings.open_position(driver, position, topic)

    def start(self) -> None:
        """Begin to tend the inbox."""
        name = f"txmq-{self._member.settings.group}-inbox"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    async def stop(self) -> None:
        """Fold a last time and end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            await self._tend(closing=True)
        finally:
            await self._database.close()

    async def _run(self) -> None:
        while True:
            await self._tend()
            await asyncio.sleep(EVERY_S)

    async def _tend(self, *, closing: bool = False) -> None:
        """Run one round. After an error the next round tries again."""
        try:
            driver = self._database.open
            if driver is None:
                if self._database.lost:
                    self.forget()
                driver = await self._database.connect()
            if not closing:
                await self._openings.check_server(driver)
                for position, topic in self._openings.assigned():
                    await self.open(driver, position, topic)
            await self._report_lost()
            acked = self._member.stats.acked
            if acked != self._folded_acks:
                await compact(driver, self._member.group, str(self._member.log_id))
                self._folded_acks = acked
        except TxmqError as error:
            log.warning("inbox.not_tended", group=self._member.group, error=str(error))

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


class _HandlerFailed(Exception):
    """The handler raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _NackedByHandler(Exception):
    """The handler nacked a message and returned: there is nothing to commit for it."""


class _NotOpen(Exception):
    """A partition of the inbox could not be opened, or lacked effects: its messages are
    delivered again, behind those that it lacks.
    """


class InboxWorker(Worker):
    """A worker with a connection of its own."""

    def __init__(
        self,
        members: LoopMembers,
        inboxes: Mapping[object, Inbox],
        handler: Handler,
        connect: Connect,
        *,
        lists: bool,
    ) -> None:
        """`inboxes`: of each member, by what it stores as owner in its batches."""
        super().__init__(members)
        self._inboxes, self._handler, self._lists = inboxes, handler, lists
        self._database = Database(connect)
        self._opening_pauses = OpeningPauses()
        # Of every commit. It has no row: the inbox shows the outcome of a commit.
        self._token = new_token()
        self._failed: set[tuple[str, str]] = set()  # keys of the messages that may not go on

    async def process(self, messages: Sequence[DeliveredMessage]) -> None:
        self._failed.clear()
        if len(messages) == 1:
            error = await self._apply_in_place(messages)
            if error is not None:
                self._nack(messages, error)
        elif await self.attempt(messages) is not None:
            await self._apply_one_by_one(messages)

    async def end(self) -> None:
        await self._database.close()

    def _nack(self, messages: Sequence[DeliveredMessage], error: BaseException) -> None:
        self._members.nack_many(failed_messages(messages, error), error=error)

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
                self._members.give_back([message])
            elif (error := await self._apply_in_place([message])) is not None:
                self._nack([message], error)
                self._failed.add(_key_of(message))

    def _waits(self, message: DeliveredMessage) -> bool:
        """Return whether a message has to wait for an earlier one of its key."""
        ordered = self._members.settings.ordered and bool(message.key)
        return ordered and _key_of(message) in self._failed

    def _give_back(self, messages: Sequence[DeliveredMessage]) -> None:
        """Return messages, and later those of their keys, to the group."""
        self._failed.update(map(_key_of, messages))
        self._members.give_back(_outstanding(messages), rejoin=True)

    async def _apply_in_place(self, messages: Sequence[DeliveredMessage]) -> Exception | None:
        """Apply a message as often as the consumer may, each time in a transaction of
        its own. Return the last error if all fail.
        """
        error = await self.attempt(messages)
        attempts = None if error is None else self._members.in_place()
        while error is not None and attempts is not None:
            # The database's own errors were tried again before.
            if isinstance(error, DatabaseConflict | DatabaseUnavailable | InDoubt):
                break
            pause = attempts.pause_after(error, messages)
            if pause is None:
                break
            await asyncio.sleep(pause)
            if self._members.closed:
                break
            self._members.count(retried=len(messages))
            error = await self.attempt(messages)
        return error

    async def attempt(self, messages: Sequence[DeliveredMessage]) -> Exception | None:
        """Apply the messages and ack them. Return the error if that fails.

        Conflicts in the database, and its outages, are tried again.
        """
        trouble: Exception | None = None
        for run in range(CONFLICT_RUNS):
            driver = await self._connected()
            if driver is None:
                self._give_back(messages)
                return None
            try:
                await self._transaction(driver, messages)
            except (DatabaseConflict, DatabaseUnavailable, InDoubt) as error:
                trouble = error
            except (_NotOpen, _HandlerFailed, _NackedByHandler, TransactionAborted) as error:
                return await self._after(error, messages)
            else:
                return None
            _raise_if_cancelled()
            log.warning("inbox.again", error=str(trouble), attempt=run + 1)
            self._members.count(retried=len(messages))
            await _pause(FIRST_PAUSE_S * 2**run)
        return trouble

    async def _after(
        self, end: Exception, messages: Sequence[DeliveredMessage]
    ) -> Exception | None:
        """Go on after an attempt that its handler has ended, or that could not begin.
        Return the error of the messages, if they have failed.
        """
        match end:
            case _HandlerFailed():
                return end.error
            case _NotOpen():
                self._give_back(messages)
                return None
            case _NackedByHandler():
                rest = self._not_nacked(messages)
                return await self.attempt(rest) if rest else None
        return end  # a statement failed, and the handler caught its error

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
                self._members.give_back([message])
            else:
                rest.append(message)
        return rest

    async def _transaction(self, driver: Driver, messages: Sequence[DeliveredMessage]) -> None:
        """Run one attempt. Raises _HandlerFailed, _NackedByHandler."""
        await self._open(driver, messages)
        try:
            claims = await claim(driver, self._positions(messages), first=BEGIN)
            fresh = messages if len(claims) == len(messages) else self._claimed(claims, messages)
            if fresh:
                await self._handle(fresh, driver)
            if len(_outstanding(fresh)) < len(fresh):
                raise _NackedByHandler  # noqa: TRY301  # rolled back below
            await guarded_commit(driver, self._token)
            crashpoint("inbox.after_commit")
        except BaseException:
            await roll_back(driver)
            raise
        if len(fresh) < len(messages):
            self._members.count(duplicates=len(messages) - len(fresh))
        self._members.ack_many(messages)
        # A cancellation that came during COMMIT: what is committed is acked first.
        if driver.interruption is not None:
            raise driver.interruption

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

    async def _open(self, driver: Driver, messages: Sequence[DeliveredMessage]) -> None:
        """Open the partitions of the messages. Raises _NotOpen, InboxMismatch."""
        closed = [
            message
            for message in messages
            if not self._inbox(message).is_open(self._position(message))
        ]
        restored = 0
        try:
            for message in closed:
                inbox = self._inbox(message)
                restored += await inbox.open(driver, inbox.position(message), message.topic)
        except (RequestRejected, BrokerUnavailable, ConnectionLost, RequestTimeout) as error:
            log.warning("inbox.not_opened", error=str(error))
            await _pause(self._opening_pauses.next())
            raise _NotOpen from error
        except InboxMismatch:
            self._members.give_back(_outstanding(messages))
            raise
        if closed:
            self._opening_pauses.restart()
        if restored and self._members.settings.ordered:
            raise _NotOpen

    async def _handle(self, messages: Sequence[DeliveredMessage], driver: Driver) -> None:
        argument: Any = messages if self._lists else messages[0]
        try:
            answer = self._handler(argument, driver.connection)
            require_finished(await answer if isawaitable(answer) else answer)
        except (DatabaseConflict, DatabaseUnavailable):
            raise
        except asyncio.CancelledError as error:
            _raise_if_cancelled()
            raise _HandlerFailed(
                RuntimeError(f"it awaited what was cancelled: {error!r}")
            ) from error
        except Exception as error:  # a handler may raise anything
            if driver_error(error) is not None:
                found = translate(error, "in a handler")
                if isinstance(found, DatabaseConflict | DatabaseUnavailable):
                    raise found from error
            raise _HandlerFailed(error) from error

    async def _connected(self) -> Driver | None:
        """Return a usable connection, as soon as there is one; None once the consumer
        is closed.
        """
        pause = FIRST_PAUSE_S
        while (driver := self._database.open) is None:
            if self._database.lost:
                for inbox in self._inboxes.values():
                    inbox.forget()
            try:
                await self._database.connect()
            except DatabaseUnavailable as error:
                log.warning("inbox.database_away", error=str(error))
                if self._members.closed:
                    return None
                await _pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return driver


async def run_with_inbox(
    members: LoopMembers,
    connect: Connect,
    run: Callable[[Mapping[object, Inbox]], Awaitable[None]],
) -> None:
    """Tend the inboxes of the members while `run` has their messages handled."""
    inboxes = {member.owner: Inbox(member, connect) for member in members.members}
    for inbox in inboxes.values():
        inbox.start()
    try:
        await run(inboxes)
    finally:
        await asyncio.gather(*(inbox.stop() for inbox in inboxes.values()))


async def _pause(seconds: float) -> None:
    """Wait about so long."""
    # The random part keeps transactions in conflict from meeting again.
    await asyncio.sleep(seconds * (0.5 + random()))  # noqa: S311  # no secret


def _raise_if_cancelled() -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _key_of(message: DeliveredMessage) -> tuple[str, str]:
    return message.topic, message.key or ""


def _outstanding(messages: Iterable[DeliveredMessage]) -> list[DeliveredMessage]:
    return [message for message in messages if message.in_hand]
