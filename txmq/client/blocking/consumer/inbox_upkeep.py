"""What a consumer with an inbox does now and then: keep the inbox small, and see that
it is not behind the broker.

The database is the authority for what was applied. A database restored to the past
lacks effects that the broker knows as acked: then the position of the group goes back
to where the inbox ends, and the messages are delivered again, as far as they are
retained; those that are not are an alarm. Gaps below that are no sign of it: dead
letters, skipped and parked messages leave some. Nor can a consumer that chooses by tags
tell, since what it does not want is acked without a trace in the inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol

from txmq.client.blocking.alarm_reports import Alarm, report, source_of
from txmq.client.log import get_logger
from txmq.errors import OffsetOutOfRange, TxmqError
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.inbox import Position, applied
from txmq.tx.postgres.inbox_compaction import fold

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from txmq.client.blocking.core import Core
    from txmq.client.protocol.consumer.settings import Settings
    from txmq.client.protocol.consumer.settling import Stats

EVERY_S = 5.0
LETTERS_AT_ONCE = 1_000
REPORTED_S = 3_600.0
log = get_logger()


class Kept(Protocol):
    """What the keeper needs of a member, on whatever thread that is."""

    @property
    def settings(self) -> Settings: ...
    @property
    def core(self) -> Core: ...
    @property
    def group(self) -> str: ...
    @property
    def inbox_name(self) -> str: ...
    @property
    def assignment(self) -> frozenset[tuple[str, int]]: ...
    @property
    def stats(self) -> Stats: ...


def open_connection(connect: Callable[[], Connection]) -> Connection:
    """A connection made by the user's function, for our own use. Raises
    DatabaseUnavailable, DatabaseError.
    """
    with translated("connecting to PostgreSQL"):
        connection = connect()
        connection.autocommit = True
    return connection


class Keeper:
    """A thread with a connection of its own, as long as handlers run."""

    def __init__(self, consumer: Kept, connect: Callable[[], Connection]) -> None:
        self._consumer, self._connect = consumer, connect
        self._stopped = Event()
        self._thread = Thread(
            target=self._run, name=f"txmq-{consumer.settings.group}-inbox", daemon=True
        )
        self._connection: Connection | None = None
        self._checked: frozenset[tuple[str, int]] = frozenset()
        self._folded_at = 0  # how many acks ago
        self._lost: dict[
            tuple[str, int], str
        ] = {}  # what became of effects that no message can bring back

    def start(self) -> None:
        """Begins with a look at the positions."""
        self._thread.start()

    def stop(self) -> None:
        """Folds a last time and ends."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._tend()
                self._stopped.wait(EVERY_S)
            self._tend()
        finally:
            if self._connection is not None:
                self._connection.close()

    def _tend(self) -> None:
        """One round; what goes wrong is for the next one."""
        try:
            if self._connection is None or self._connection.closed:
                self._connection = open_connection(self._connect)
                self._checked = frozenset()  # it may be another database by now
            self._check(self._connection)
            self._tell()
            acked = self._consumer.stats.acked
            if acked != self._folded_at:
                fold(self._connection, self._consumer.inbox_name)
                self._folded_at = acked
        except TxmqError as error:
            log.warning("inbox.not_tended", group=self._consumer.group, error=str(error))

    def _check(self, connection: Connection) -> None:
        consumer = self._consumer
        assigned = consumer.assignment
        fresh = assigned - self._checked
        if fresh and consumer.settings.tags is None and consumer.settings.selector is None:
            shown = self._call("group.show", group=consumer.group)
            for place in shown["positions"]:
                if (place["topic"], place["partition"]) in fresh:
                    self._check_one(connection, place, shown)
        self._checked = assigned

    def _check_one(
        self, connection: Connection, place: Mapping[str, Any], shown: Mapping[str, Any]
    ) -> None:
        topic, partition, floor = place["topic"], place["partition"], place["floor"]
        ranges = applied(
            connection, Position(self._consumer.inbox_name, topic, partition, shown["epoch"])
        ).ranges
        if not ranges:
            # nothing was applied here yet: the group may have begun elsewhere, or
            # without an inbox
            return
        top = ranges[-1][1]
        elsewhere = place["retrying"] + sum(
            fence["parked"]
            for fence in shown["fence_list"]
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
                group=shown["group"],
                topic=topic,
                partition=partition,
                inbox=top,
                broker=floor,
            )
            self._go_back(topic, partition, top)

    def _go_back(self, topic: str, partition: int, top: int) -> None:
        """The group goes on at `top`, or at what is retained above it."""
        try:
            self._reset(topic, partition, top)
        except OffsetOutOfRange as gone:
            first = gone.detail["first"]
        else:
            return
        self._lost[topic, partition] = f"messages {top} to {first} of {topic}/{partition}"
        log.error(
            "inbox.lost",
            group=self._consumer.group,
            topic=topic,
            partition=partition,
            start=top,
            end=first,
        )
        self._reset(topic, partition, first)

    def _reset(self, topic: str, partition: int, offset: object) -> None:
        self._call(
            "group.reset", group=self._consumer.group, topic=topic, to={str(partition): offset}
        )

    def _tell(self) -> None:
        """While the consumer runs, and an hour longer: nothing that it could see later
        would tell.
        """
        if self._lost:
            text = f"group {self._consumer.group}: the database was restored to before {', '.join(self._lost.values())}"
            action = (
                "bring their effects back by other means: these messages are not retained any more"
            )
            lost = Alarm("inbox.lost", "critical", text, action)
            report(self._call, source_of("inbox"), [lost], REPORTED_S)

    def _call(self, name: str, **args: object) -> dict[str, Any]:
        return self._consumer.core.call(name, args, repeat=True)

    def _letters(self, topic: str, partition: int) -> Iterator[Mapping[str, Any]]:
        after = 0
        while after is not None:
            page = self._call(
                "dlq.list", group=self._consumer.group, after=after, limit=LETTERS_AT_ONCE
            )
            yield from (
                one
                for one in page["letters"]
                if (one["topic"], one["partition"]) == (topic, partition)
            )
            after = page["next"]
