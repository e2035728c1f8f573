"""Work at the disk for the local store, and its results.

The protocol makes jobs; a thread of the face does them and returns a result for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from txmq.client.protocol.alarm_reports import MAX_TEXT, AlarmReport
from txmq.model.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from uuid import UUID

    from txmq.errors import TxmqError
    from txmq.model.retry import FailureReport
    from txmq.recover.local import (
        Change,
        Entry,
        Place,
        StoredMessage,
        StoreReport,
        StoreStats,
    )


class StoreName(NamedTuple):
    """The owner of a topic's store, as far as the protocol knows it."""

    group: str
    topic: str
    topic_id: int


class StoredPut(NamedTuple):
    """A message for the store, and when its retry is due, in µs."""

    message: StoredMessage
    due: int
    failure: FailureReport


class Taken(NamedTuple):
    """A message handed out; the store has counted this `attempt`. `begin` is called
    when its handler begins; until then a crash does not count.
    """

    message: StoredMessage
    attempt: int
    begin: Callable[[], None]


@dataclass(slots=True)
class StoreJob:
    """Work at the store of one topic, in this order.

    `hasten`, `return_to_broker`: operators' orders. `take`: at most so many due
    messages to hand out, but none in `skip`, nor of `skip_keys`. `untold`: at most so
    many entries to read for a report of the `session`, which a lost connection ends.
    `again`: at most so many entries after a place, told or not. `look`: read the
    figures.
    """

    topic: str
    open_as: StoreName | None = None
    puts: list[StoredPut] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    told: list[Entry] = field(default_factory=list)
    forget: list[Place] = field(default_factory=list)
    unknown: list[Place] = field(default_factory=list)
    hasten: list[Place] = field(default_factory=list)
    return_to_broker: list[Place] = field(default_factory=list)
    look: bool = False
    now: int = 0
    take: int = 0
    skip: Collection[Place] = ()
    skip_keys: Collection[str] = ()
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    untold: int = 0
    again: int = 0
    again_after: Place | None = None
    session: int = 0

    def supersede(self) -> None:
        """Leave out what the broker has said of earlier copies of what is put."""
        new = {put.message.place for put in self.puts}
        if new:
            self.told = [entry for entry in self.told if entry.place not in new]
            for places in (self.forget, self.unknown, self.hasten, self.return_to_broker):
                places[:] = [place for place in places if place not in new]

    @property
    def has_work(self) -> bool:
        """True if there is anything to do."""
        return bool(
            self.open_as
            or self.puts
            or self.changes
            or self.told
            or self.forget
            or self.unknown
            or self.hasten
            or self.return_to_broker
            or self.look
            or self.take
            or self.untold
            or self.again
        )


def damage_alarm(topic: str, report: StoreReport | None) -> AlarmReport | None:
    """Return the alarm of a store that was found damaged when it was opened."""
    if report is None or not report.findings():
        return None
    text = f"a consumer's local store of topic {topic} was damaged: {'; '.join(report.findings())}"
    action = (
        "look after the disk of that machine; the broker delivers its copies of what was damaged,"
        " and `txmq recover adopt` those of messages that nothing names any more"
    )
    return AlarmReport("store.damaged", "warning", text[:MAX_TEXT], action)


@dataclass(slots=True)
class JobResult:
    """The result of a job.

    `full`: the error for which nothing was put, or handed out. `stuck`: nothing was
    read or quarantined either, because not even outcomes have space. `error`: what ends
    the consumer. `entries` is None where none were asked for. `missing`: places of
    orders that the store does not have. `exhausted`: the last attempt at a message
    ended with its process.
    """

    job: StoreJob
    store_id: UUID | None = None
    report: StoreReport | None = None
    full: TxmqError | None = None
    stuck: bool = False
    error: TxmqError | None = None
    missing: list[Place] = field(default_factory=list)
    exhausted: bool = False
    taken: list[Taken] = field(default_factory=list)
    entries: list[Entry] | None = None
    next_due: int | None = None
    stats: StoreStats | None = None
