"""The store of one topic, as the protocol knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.client.protocol.alarm_reports import MAX_DURATION_S, AlarmReport
from txmq.client.protocol.consumer.requests import Request, call_request
from txmq.client.protocol.consumer.store_jobs import StoreJob
from txmq.model.retry import FailureReport
from txmq.recover.local import Change, Entry, Place, State

if TYPE_CHECKING:
    from txmq.client.protocol.consumer.settlement import PendingNack
    from txmq.client.protocol.consumer.store_reports import StoreReports
    from txmq.client.protocol.consumer.stored_delivery import StoredDelivery
    from txmq.recover.local import StoreStats


class TopicStore:
    """The store of one topic, as the protocol knows it.

    `job`: work that is not at the disk yet; `busy`: other work is. `held`: messages in
    the local queue of which the broker has not been told, with their nacks.
    `suspended`: keys of which the broker has given a message to others, while it may
    not have judged later ones. `newer`: messages that were put since entries were
    read last: a verdict on such an entry is on the copy before. `handed_out`:
    deliveries to handlers. `full_until`: when a full store is tried again.
    `stuck_until`: when it is read again, where not even outcomes had space.
    """

    def __init__(self, topic: str, reports: StoreReports) -> None:
        self.topic, self.reports = topic, reports
        self.topic_id, self.opened, self.busy = 0, False, False
        self.job = StoreJob(topic)
        self.held: dict[Place, PendingNack] = {}
        self.suspended: set[str] = set()
        self.newer: set[Place] = set()
        self.damage: AlarmReport | None = None  # to be reported
        self.handed_out: dict[Place, StoredDelivery] = {}
        self.next_due: int | None = None
        self.stats: StoreStats | None = None
        self.take_after = self.full_until = self.stuck_until = self.linger_until = 0.0

    @property
    def messages(self) -> int:
        """The number of messages in the store that are not settled."""
        return 0 if self.stats is None else self.stats.messages

    def entries_read(self) -> None:
        """Note that entries were read: what is still to be put is newer than they."""
        self.newer = {put.message.place for put in self.job.puts}

    def change(
        self, place: Place, state: State, attempt: int, due: int, failure: FailureReport
    ) -> None:
        """Record an outcome, and have it told."""
        self.job.changes.append(Change(place, state, attempt, due, failure))
        self.reports.wants_entries = True


def missing_entry(place: Place) -> Entry:
    """Return the entry of an order's place that the store does not have."""
    return Entry(place, None, State.RETURNED, 0, 0, FailureReport(), 0, told=False)


def alarm_request(store: TopicStore) -> Request:
    """Return the request that reports a store's damage, once for each opening."""
    alarm, store.damage = store.damage, None
    id_hex = store.reports.store_id.hex if store.reports.store_id is not None else ""
    args = {
        "source": f"store-{id_hex}",
        "alarms": [] if alarm is None else [alarm._asdict()],
        "for_s": MAX_DURATION_S,
    }
    return call_request("alarms.report", args, _ignore, _ignore)


def _ignore(_answer: object, _now: float) -> None:
    """Do nothing: the log has it, too."""
