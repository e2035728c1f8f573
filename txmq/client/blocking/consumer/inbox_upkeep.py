"""The upkeep of an inbox, every few seconds: fold its rows, and compare it with the
broker.

The database is the authority for what was applied. A database restored to the past
lacks effects of messages that are acked at the broker. Then the group's position goes
back to where the inbox ends, and the messages are delivered again, as far as they are
retained; an alarm names those that are not. Gaps in the inbox mean nothing: dead
letters, skipped and parked messages leave some. A consumer with tags or a selector
cannot compare: messages that it does not want are acked without a trace in the inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol

from txmq.client.log import get_logger
from txmq.client.protocol.alarm_reports import AlarmReport, alarm_source, report_alarms
from txmq.errors import OffsetOutOfRange, TxmqError
from txmq.model.topic_partition import PartitionName
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.inbox import Position, applied
from txmq.tx.postgres.inbox_compaction import compact

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name

    from txmq.client.blocking.core import BlockingCore
    from txmq.client.protocol.consumer.settings import ConsumerSettings
    from txmq.client.protocol.consumer.stats import ConsumerStats

EVERY_S = 5.0
LETTERS_AT_ONCE = 1_000
REPORTED_S = 3_600.0
log = get_logger()


class InboxMember(Protocol):
    """A member of a consumer, as the upkeep of its inbox uses it in any thread.

    `inbox_group` is the name of its group in the inbox.
    """

    @property
    def settings(self) -> ConsumerSettings: ...
    @property
    def core(self) -> BlockingCore: ...
    @property
    def group(self) -> str: ...
    @property
    def inbox_group(self) -> str: ...
    @property
    def assignment(self) -> frozenset[PartitionName]: ...
    @property
    def stats(self) -> ConsumerStats: ...


def open_connection(connect: Callable[[], Connection]) -> Connection:
    """Return a connection made by the user's function, in autocommit mode. Raises
    DatabaseUnavailable, DatabaseError.
    """
    with translated("connecting to PostgreSQL"):
        connection = connect()
        connection.autocommit = True
    return connection


class InboxUpkeep:
    """A thread with a connection of its own, as long as handlers run."""

    def __init__(self, member: InboxMember, connect: Callable[[], Connection]) -> None:
        self._member, self._connect = member, connect
        self._stopped = Event()
        self._thread = Thread(
            target=self._run, name=f"txmq-{member.settings.group}-inbox", daemon=True
        )
        self._connection: Connection | None = None
        self._compared = frozenset[PartitionName]()
        self._folded_acks = 0  # the count of acks at the last fold
        self._lost: dict[PartitionName, str] = {}  # ranges whose effects no message restores

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Fold a last time and end."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._run_once()
                self._stopped.wait(EVERY_S)
            self._run_once()
        finally:
            if self._connection is not None:
                self._connection.close()

    def _run_once(self) -> None:
        """Run one round. After an error the next round tries again."""
        try:
            if self._connection is None or self._connection.closed:
                self._connection = open_connection(self._connect)
                self._compared = frozenset()  # it may be another database now
            self._compare(self._connection)
            self._report_lost()
            acked = self._member.stats.acked
            if acked != self._folded_acks:
                compact(self._connection, self._member.inbox_group)
                self._folded_acks = acked
        except TxmqError as error:
            log.warning("inbox.not_tended", group=self._member.group, error=str(error))

    def _compare(self, connection: Connection) -> None:
        member = self._member
        assigned = member.assignment
        fresh = assigned - self._compared
        if fresh and member.settings.tags is None and member.settings.selector is None:
            group = self._call("group.show", group=member.group)
            for position in group["positions"]:
                if (position["topic"], position["partition"]) in fresh:
                    self._compare_partition(connection, position, group)
        self._compared = assigned

    def _compare_partition(
        self, connection: Connection, position: Mapping[str, Any], group: Mapping[str, Any]
    ) -> None:
        topic, partition, floor = position["topic"], position["partition"], position["floor"]
        ranges = applied(
            connection, Position(self._member.inbox_group, topic, partition, group["epoch"])
        ).ranges
        if not ranges:
            # Nothing was applied here yet: the group may have begun elsewhere, or
            # without an inbox.
            return
        top = ranges[-1][1]
        elsewhere = position["retrying"] + sum(
            fence["parked"]
            for fence in group["fence_list"]
            if (fence["topic"], fence["partition"]) == (topic, partition)
        )
        if top + elsewhere >= floor:
            return
        dead = sum(
            1 for letter in self._letters(topic, partition) if top <= letter["offset"] < floor
        )
        if top + elsewhere + dead < floor:
            log.error(
                "inbox.behind",
                group=group["group"],
                topic=topic,
                partition=partition,
                inbox=top,
                broker=floor,
            )
            self._rewind(topic, partition, top)

    def _rewind(self, topic: str, partition: int, top: int) -> None:
        """Reset the group to `top`, or to the first retained message above it."""
        try:
            self._reset(topic, partition, top)
        except OffsetOutOfRange as error:
            first = error.detail["first"]
        else:
            return
        self._lost[topic, partition] = f"messages {top} to {first} of {topic}/{partition}"
        log.error(
            "inbox.lost",
            group=self._member.group,
            topic=topic,
            partition=partition,
            start=top,
            end=first,
        )
        self._reset(topic, partition, first)

    def _reset(self, topic: str, partition: int, offset: object) -> None:
        self._call(
            "group.reset", group=self._member.group, topic=topic, to={str(partition): offset}
        )

    def _report_lost(self) -> None:
        """Report the alarm while the consumer runs, and for an hour after: nothing else
        would show it later.
        """
        if self._lost:
            lost = ", ".join(self._lost.values())
            text = f"group {self._member.group}: the database was restored to before {lost}"
            action = (
                "restore the effects of these messages by other means: they are not retained"
                " any more"
            )
            alarm = AlarmReport("inbox.lost", "critical", text, action)
            report_alarms(self._call, alarm_source("inbox"), [alarm], REPORTED_S)

    def _call(self, name: str, **args: object) -> dict[str, Any]:
        return self._member.core.call(name, args, repeat=True)

    def _letters(self, topic: str, partition: int) -> Iterator[Mapping[str, Any]]:
        after = 0
        while after is not None:
            page = self._call(
                "dlq.list", group=self._member.group, after=after, limit=LETTERS_AT_ONCE
            )
            yield from (
                one
                for one in page["letters"]
                if (one["topic"], one["partition"]) == (topic, partition)
            )
            after = page["next"]
