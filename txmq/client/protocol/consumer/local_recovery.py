"""Local recovery: failed messages of a member in a store on its own disk.

    failed ─► put (durable) ─► told to the broker ─► due ─► attempt counted (durable)
       ─► handler ─► acked or dead, or failed again (durable) ─► told ─► forgotten

A failed message stays NACKED in the local queue, and so leased, until the broker has
answered the report of it. In an ordered group it blocks its key there for as long.
While the member is connected, handlers get only messages of which the broker knows that
this store has them; while the broker is away, whatever is due.

Nothing here waits: jobs for the disk go out (`jobs`), their results come in
(`finished`), and `work_added` is called when there may be a job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.consume_timeout import CHECKS, timeout_failure
from txmq.client.protocol.consumer.fetched import DUPLICATE, NACKED, OUTSTANDING, SETTLED
from txmq.client.protocol.consumer.settlement import ANY_LEASE, PendingNack, place_name
from txmq.client.protocol.consumer.store_jobs import (
    JobResult,
    StoredPut,
    StoreJob,
    StoreName,
    damage_alarm,
)
from txmq.client.protocol.consumer.store_reports import (
    ELSEWHERE,
    ENTRIES_PER_REPORT,
    KEPT,
    UNKNOWN,
    StoredReply,
    StoreReports,
    Telling,
    Verdict,
)
from txmq.client.protocol.consumer.stored_delivery import StoredDelivery
from txmq.client.protocol.consumer.stored_failure import (
    FailureOutcome,
    after_failure,
    local_policy,
)
from txmq.client.protocol.consumer.topic_store import TopicStore, alarm_request, missing_entry
from txmq.errors import LocalProtocolError, TxmqError
from txmq.model.retry import FailureReport
from txmq.model.units import SECOND
from txmq.recover.local import Entry, Place, State, StoredMessage
from txmq.wire.data_requests import AckedRange

if TYPE_CHECKING:
    from txmq.client.protocol.consumer.fetched import DeliveredMessage
    from txmq.client.protocol.consumer.fetcher import Fetcher
    from txmq.client.protocol.consumer.local_queue import LocalQueue
    from txmq.client.protocol.consumer.membership import Identities, Membership
    from txmq.client.protocol.consumer.requests import Request
    from txmq.client.protocol.consumer.settings import ConsumerSettings
    from txmq.client.protocol.consumer.settlement import Settlement
    from txmq.client.protocol.consumer.stats import ConsumerStats
    from txmq.errors import RequestRejected

MOST_HELD = 10_000  # failed messages that wait for disk or broker; no fetch beyond
LINGER_S = 0.05  # that a failed message waits for others to share its sync
FULL_S = 5.0  # before a full store is tried again
EMPTY_HANDED_S = 0.05  # before due messages that may not be handed out are looked at again
LEFT_ALONE_US = SECOND  # before a message is handed out again that a handler gave back
log = get_logger()


class RecoveryMember(Protocol):
    """The member whose failed messages are recovered."""

    settings: ConsumerSettings
    queue: LocalQueue
    stats: ConsumerStats
    settlement: Settlement
    fetcher: Fetcher
    owner: object

    def wall_us(self) -> int:
        """Return the time of day, in µs, never going back."""

    def rejoin(self) -> None:
        """Join the group anew."""

    def refused(self, error: RequestRejected, now: float) -> None:
        """React to a refusal that concerns the member as a whole."""

    def fail(self, error: TxmqError) -> None:
        """End with an error."""


class LocalRecovery:
    """The local stores of a member, one for each topic. Not thread-safe.

    `capacity`: how many stored messages may be at handlers. `serving`: the member is
    connected and in its group. `ready` wait for a handler. `attempts`: how many were
    begun.
    """

    def __init__(self, member: RecoveryMember) -> None:
        self._member, self._settings = member, member.settings
        # The group's, or the consumer's while it is unknown.
        self._policy = local_policy(member.settings.retry)
        self.ready: list[StoredDelivery] = []
        self._timeout_s: float | None = None
        self._identities: Identities | None = None
        self._next_check, self._session = 0.0, 0
        self.stores = {
            topic: TopicStore(
                topic, StoreReports(topic, partial(self._told, topic), member.refused)
            )
            for topic in member.settings.topics
        }
        self.capacity, self.attempts = 1, 0
        self.serving = self.closing = False
        self.work_added: Callable[[], None] = _nothing

    def joined(self, membership: Membership) -> None:
        """Begin with a membership: open what is not open, and tell the broker."""
        self.serving, self._session = True, self._session + 1
        self.updated(membership)
        for store in self.stores.values():
            store.reports.restart()
            topic_id = membership.identities.topics[store.topic]
            if not store.opened or topic_id != store.topic_id:
                store.opened, store.topic_id = False, topic_id
                store.job.open_as = StoreName(membership.group, store.topic, topic_id)
            if store.full_until:
                self._puts_to_broker(store, store.job)
        self.work_added()

    def updated(self, membership: Membership) -> None:
        """Go on with what the broker reports of the group."""
        self._policy = local_policy(membership.retry)
        self._timeout_s = membership.consume_timeout_s
        self._identities = membership.identities

    def disconnected(self) -> None:
        """Go on without the broker."""
        self.serving = False
        for store in self.stores.values():
            store.reports.restart()
        self.work_added()

    def close(self) -> None:
        """Hand nothing out any more, and take back what no handler has begun."""
        self.closing = True
        for delivery in self.ready:
            self._take_back(delivery, 0)
        self.ready.clear()
        self.work_added()

    @property
    def opened(self) -> bool:
        """True once all stores are open."""
        return all(store.opened for store in self.stores.values())

    @property
    def holds_back(self) -> bool:
        """True if nothing must be fetched: the broker does not know yet what the stores
        have, or a store takes nothing more.
        """
        return sum(len(store.held) for store in self.stores.values()) > MOST_HELD or any(
            not store.opened or store.full_until or store.reports.telling is Telling.UNTOLD
            for store in self.stores.values()
        )

    @property
    def written(self) -> bool:
        """True if nothing waits for the disk."""
        return not any(
            store.busy or (store.opened and store.job.has_work) for store in self.stores.values()
        )

    @property
    def idle(self) -> bool:
        """True if nothing waits for the disk, and the broker knows of all changes."""
        return self.written and not any(
            store.held or not store.reports.idle or store.reports.telling is Telling.UNTOLD
            for store in self.stores.values()
            if store.opened
        )

    def counters(self) -> ConsumerStats:
        """A copy of the consumer's counters, with the figures of the stores."""
        known = [store.stats for store in self.stores.values() if store.stats is not None]
        now = self._member.wall_us()
        oldest = min((one.oldest for one in known if one.oldest), default=now)
        return replace(
            self._member.stats,
            stored=sum(one.messages for one in known),
            stored_bytes=sum(one.bytes for one in known),
            stored_oldest_s=max(0, now - oldest) / SECOND,
            stored_attempts=self.attempts,
            stores_full=sum(bool(store.full_until) for store in self.stores.values()),
        )

    def takes(self, nack: PendingNack) -> bool:
        """Put a failed message into the store if it belongs there. Return whether it
        does; otherwise the nack is for the broker.

        With `on_failure="broker"` the store is for the time in which the broker is
        away. A message that is dead, or did not fail, is for the broker if it is there.
        """
        store = self.stores.get(nack.place.topic)
        if store is None or not store.opened or store.full_until:
            return False
        message = self._queue.message_at(nack.place)
        if message is None or message.fetched.topic_id != store.topic_id:
            return False
        change = after_failure(self._policy, message.attempt, nack, self._member.wall_us())
        if self.serving and (
            self._settings.on_failure == "broker"
            or nack.postpone
            or change.state is not State.STORED
        ):
            return False
        self._put(store, message, nack, change)
        self._member.stats.nacked += not nack.postpone
        self._member.stats.postponed += nack.postpone
        return True

    def take_followers(self) -> None:
        """Put later messages of held keys behind them, where the broker is away now and
        the order of keys matters.
        """
        for store in self.stores.values():
            for nack in list(store.held.values()) if self._settings.ordered else ():
                for message in self._queue.take_key(store.topic, nack.key) if nack.key else ():
                    place = AckedRange(*message[:2], message.offset, message.offset + 1)
                    follows = PendingNack(place, message.key, None, FailureReport())
                    change = FailureOutcome(State.STORED, message.attempt - 1, 0)
                    self._put(store, message, follows, change)

    @property
    def _queue(self) -> LocalQueue:
        return self._member.queue

    def _put(
        self,
        store: TopicStore,
        message: DeliveredMessage,
        nack: PendingNack,
        outcome: FailureOutcome,
    ) -> None:
        fetched, offset = message.fetched, message.offset
        place = Place(fetched.topic_id, fetched.partition, offset)
        epoch = fetched.epoch
        if epoch is None:
            epoch = 0 if fetched.epoch_at is None else fetched.epoch_at(offset)
        stored = StoredMessage(
            *(place, message.key, message.tag, dict(message.headers), bytes(message.body)),
            *(message.message_id, outcome.attempt, message.born_at, message.stored_at),
            epoch=epoch,
            generation=fetched.generation,
        )
        store.held[place] = nack
        store.newer.add(place)
        store.job.puts.append(StoredPut(stored, outcome.due, nack.failure))
        if outcome.state is not State.STORED:
            store.change(place, *outcome, nack.failure)
        store.reports.wants_entries = True
        self.work_added()

    # Messages of the store at handlers

    def receive(self, most: int, now: float) -> list[DeliveredMessage]:
        """Return at most so many stored messages that are due."""
        if not self.ready or self.closing:
            return []
        paused = self._member.fetcher.paused
        chosen = [one for one in self.ready if one.topic not in paused][:most]
        self.ready = [one for one in self.ready if one not in chosen]
        for delivery in chosen:
            delivery.status, delivery.timed_from = OUTSTANDING, now
            delivery.begin()
        self._member.stats.delivered += len(chosen)
        return [delivery.deliver() for delivery in chosen]

    def ack(self, delivery: StoredDelivery) -> bool:
        """Record the success of a handler; return whether it had the message."""
        if not self._end(delivery, SETTLED):
            return False
        store = self.stores[delivery.topic]
        store.change(delivery.place, State.ACKED, delivery.attempt, 0, FailureReport())
        self._member.stats.acked += 1
        self.work_added()
        return True

    def nack(self, delivery: StoredDelivery, nack: PendingNack) -> bool:
        """Record the failure of a handler; return whether it had the message."""
        if not self._end(delivery, NACKED):
            return False
        outcome = after_failure(self._policy, delivery.attempt, nack, self._member.wall_us())
        self.stores[delivery.topic].change(delivery.place, *outcome, nack.failure)
        self._member.stats.nacked += not nack.postpone
        self._member.stats.postponed += nack.postpone
        self._member.stats.dead_lettered += outcome.state is State.DEAD
        self.work_added()
        return True

    def give_back(self, delivery: StoredDelivery) -> bool:
        """Take a message back as if it had not been handed out."""
        if not self._end(delivery, SETTLED):
            return False
        self._take_back(delivery, self._member.wall_us() + LEFT_ALONE_US)
        self._member.stats.returned += 1
        self.work_added()
        return True

    def _end(self, delivery: StoredDelivery, status: int) -> bool:
        if delivery.status != OUTSTANDING:
            return False
        delivery.status = status
        self.stores[delivery.topic].handed_out.pop(delivery.place, None)
        return True

    def _take_back(self, delivery: StoredDelivery, due: int) -> None:
        store, before = self.stores[delivery.topic], delivery.attempt - 1
        delivery.status = SETTLED
        store.handed_out.pop(delivery.place, None)
        store.change(delivery.place, State.STORED, before, due, FailureReport())

    def tick(self, now: float) -> None:
        """End attempts that exceed the consume timeout, and look for due messages. To
        be called now and then.
        """
        try:
            self._member.settlement.release_nacks()
            self._end_late_attempts(now)
            self.work_added()
        except Exception as error:
            log.exception("local_store.failed")
            self._member.fail(_has_failed(", ".join(self.stores), error))

    def _end_late_attempts(self, now: float) -> None:
        timeout_s = self._timeout_s
        if timeout_s is not None and now >= self._next_check:
            self._next_check = now + timeout_s / CHECKS
            for delivery in self._deliveries():
                if delivery.status == OUTSTANDING and now - delivery.timed_from >= timeout_s:
                    offset = delivery.place.offset
                    place = AckedRange(*delivery.partition_name, offset, offset + 1)
                    log.warning("message.timed_out", place=place_name(place), after_s=timeout_s)
                    failure = timeout_failure(timeout_s)
                    self.nack(delivery, PendingNack(place, None, None, failure))

    def _deliveries(self) -> list[StoredDelivery]:
        return [one for store in self.stores.values() for one in store.handed_out.values()]

    # The disk

    def jobs(self, now: float) -> list[StoreJob]:
        """Return the jobs to do now, at most one for each store."""
        found = []
        for store in self.stores.values():
            if store.busy or not (store.opened or store.job.open_as):
                continue
            if now < store.linger_until and not self._is_urgent(store):
                continue
            job = self._job(store, now)
            if job.has_work:
                store.linger_until = now + LINGER_S
                store.busy = True
                found.append(job)
        return found

    def _is_urgent(self, store: TopicStore) -> bool:
        """Return whether a handler or an operator waits for the store's next job. What
        else there is shares a job with what comes meanwhile: nobody waits for it.
        """
        job = store.job
        return bool(
            self.closing
            or (self.ready or store.handed_out or job.changes)
            or (job.open_as or job.hasten or job.return_to_broker)
            or store.reports.telling is Telling.UNTOLD
        )

    def _job(self, store: TopicStore, now: float) -> StoreJob:
        job, store.job = store.job, StoreJob(store.topic)
        if job.open_as:  # and nothing else, before it is open
            store.job, job = job, StoreJob(store.topic, job.open_as, policy=self._policy)
            store.job.open_as = None
            return job
        if now < store.full_until:
            store.job.puts, job.puts = job.puts, []
            store.job.changes, job.changes = job.changes, []
        else:
            job.look = bool(store.full_until)
        job.supersede()
        wall, room = self._member.wall_us(), self.capacity - len(self._deliveries())
        is_due = store.next_due is not None and store.next_due <= wall
        if is_due and room > 0 and now >= store.take_after and self._may_take(store):
            job.take = room
            job.skip = {*store.handed_out, *(store.held if self.serving else ())}
            job.skip_keys = frozenset(store.suspended)
        reports = store.reports
        if now < store.stuck_until:
            store.job.unknown, job.unknown = job.unknown, []
        elif self.serving and reports.may_read:
            if reports.wants_entries:
                job.untold, reports.wants_entries = ENTRIES_PER_REPORT, False
            elif reports.telling is Telling.AGAIN and not self.closing:
                job.again, job.again_after = ENTRIES_PER_REPORT, reports.again_after
        job.now, job.policy, job.session = wall, self._policy, self._session
        return job

    def _may_take(self, store: TopicStore) -> bool:
        """Return whether handlers may get messages: not while the broker is being told
        what the store has, because another consumer may have got them, or those before
        them.
        """
        telling, ordered = store.reports.telling, self._settings.ordered
        told = telling is Telling.CHANGES or (telling is Telling.AGAIN and not ordered)
        told = told or not self.serving
        return (
            told
            and not (self.closing or store.full_until)
            and store.topic not in self._member.fetcher.paused
        )

    def finished(self, result: JobResult, now: float) -> None:
        """Go on with the result of a job. An exception ends the member: nobody else
        would hear of it.
        """
        try:
            self._finished(result, now)
        except Exception as error:
            log.exception("local_store.failed", topic=result.job.topic)
            self._member.fail(_has_failed(result.job.topic, error))

    def _finished(self, result: JobResult, now: float) -> None:
        job, store = result.job, self.stores[result.job.topic]
        store.busy = False
        if result.error is not None:
            self._member.fail(result.error)
            return
        if job.open_as is not None:
            store.opened, store.reports.store_id = True, result.store_id
            store.damage = damage_alarm(store.topic, result.report)
        damaged = 0 if store.stats is None else store.stats.damaged
        store.stats, store.next_due = result.stats, result.next_due
        if result.stats is not None and result.stats.damaged > damaged:
            store.reports.wants_entries = True  # the store has given messages back
        if result.stuck:
            store.stuck_until = now + FULL_S
            store.job.unknown[:0] = job.unknown
            store.reports.wants_entries |= bool(job.untold)
        if result.full is not None:
            self._on_full(store, result, now)
        elif job.look or job.puts:
            store.full_until = 0.0
            log.info("local_store.stored", topic=store.topic, messages=len(job.puts))
        self._taken(store, result, now)
        if self.serving and job.session == self._session:
            if result.entries is not None:
                store.entries_read()
                take = store.reports.read_again if job.again else store.reports.read
                take(result.entries)
            store.reports.add([missing_entry(place) for place in result.missing])
        self.work_added()

    def _taken(self, store: TopicStore, result: JobResult, now: float) -> None:
        """Make due messages ready for handlers."""
        superseded = {put.message.place for put in store.job.puts} if result.taken else ()
        for message, attempt, begin in result.taken:
            if message.place in superseded or self._is_another(store, message):
                continue
            delivery = StoredDelivery(message, store.topic, self._member.owner, attempt, begin)
            store.handed_out[message.place] = delivery
            self.ready.append(delivery)
            self.attempts += 1
        store.reports.wants_entries |= result.exhausted
        if result.job.take and not result.taken:
            store.take_after = now + EMPTY_HANDED_S
        if self.closing and result.taken:
            self.close()

    def _is_another(self, store: TopicStore, message: StoredMessage) -> bool:
        """Return whether the message at that place is another one by now: the partition
        was reset for reprocessing, or the log restored to the past. If so, drop it.
        """
        place, identities = message.place, self._identities
        if identities is None or message.generation == 0:
            return False
        epoch = identities.epoch_of((store.topic, place.partition), place.offset)
        if epoch == message.epoch:
            return False
        log.warning("local_store.outdated", topic=store.topic, place=tuple(place), epoch=epoch)
        store.job.unknown.append(place)
        return True

    def _on_full(self, store: TopicStore, result: JobResult, now: float) -> None:
        """Keep what was not written. Messages that do not fit are nacked at the broker,
        at once or as soon as it is there.
        """
        if not store.full_until:
            log.warning("local_store.full", topic=store.topic, error=str(result.full))
        store.full_until = now + FULL_S
        unwritten = {put.message.place for put in result.job.puts}
        store.job.changes[:0] = [one for one in result.job.changes if one.place in unwritten]
        if self.serving:
            self._puts_to_broker(store, result.job)
        else:
            store.job.puts[:0] = result.job.puts

    def _puts_to_broker(self, store: TopicStore, job: StoreJob) -> None:
        places = {put.message.place for put in job.puts}
        job.puts = []
        for place in places:
            self._member.settlement.nack_at_broker(store.held.pop(place))
        store.newer -= places
        store.job.changes = [one for one in store.job.changes if one.place not in places]

    # The broker

    def due_at(self) -> float | None:
        """Return when a report is due; None if there is nothing to tell or ask."""
        dues = [
            store.reports.due_at(has_messages=bool(store.messages))
            for store in self.stores.values()
        ]
        dues += [0.0 for store in self.stores.values() if store.damage is not None]
        return min((due for due in dues if due is not None), default=None)

    def requests(self, membership: Membership, now: float) -> list[Request]:
        """Return the reports to send now."""
        found = [
            store.reports.request(membership, now, has_messages=bool(store.messages))
            for store in self.stores.values()
        ]
        damaged = [store for store in self.stores.values() if store.damage is not None]
        return [*filter(None, found), *map(alarm_request, damaged)]

    def _told(
        self, topic: str, verdicts: Sequence[Verdict], reply: StoredReply, now: float
    ) -> None:
        store = self.stores[topic]
        for entry, word, fence_lease in verdicts:
            self._judge(store, entry, word)
            if entry.place in store.newer:
                continue  # the next delivery is told, too, and what follows waits for it
            nack = store.held.pop(entry.place, None)
            if self._settings.ordered and entry.key and fence_lease:
                self._member.settlement.return_unprocessed(
                    self._queue.drop_key(topic, entry.key, fence_lease)
                )
            if nack is not None:
                if word == ELSEWHERE:
                    self._prepare_next_delivery(nack)
                self._queue.settle(nack.place, now=now, old=NACKED)
        for _topic, topic_id, partition, offset, order in reply.orders:
            self._obey(store, Place(topic_id, partition, offset), order)
        store.reports.answered(has_messages=bool(store.messages))
        if store.reports.idle:
            store.suspended.clear()
        self.work_added()

    def _prepare_next_delivery(self, nack: PendingNack) -> None:
        """Prepare for the next delivery of a message that the store may not keep.

        It may have come before this answer: a first attempt is delivered before its
        lease is durable. The broker has it back then. In an ordered group later
        messages of its key may be here, or on their way, and would come first: the
        member joins anew, and the broker delivers all in order.
        """
        if self._settings.ordered and nack.key:
            self._member.settlement.return_unprocessed(
                self._queue.drop_key(nack.place.topic, nack.key, ANY_LEASE)
            )
            self._member.rejoin()
        elif self._queue.delivery(nack.place, DUPLICATE) is not None:
            self._member.settlement.return_unprocessed([nack.place])

    def _judge(self, store: TopicStore, entry: Entry, word: str) -> None:
        place, job, is_old = entry.place, store.job, entry.place in store.newer
        if word == KEPT:
            job.told += [] if is_old else [entry]
            return
        if entry.state is State.STORED:
            self._withdraw(store, place)
            if self._settings.ordered and entry.key:
                store.suspended.add(entry.key)
        if is_old:
            return  # the next delivery has taken its place, or will
        if word == UNKNOWN:
            log.warning("local_store.unknown", topic=store.topic, place=tuple(place))
            job.unknown.append(place)
        else:
            log.info("local_store.forgotten", topic=store.topic, place=tuple(place), verdict=word)
            job.forget.append(place)

    def _withdraw(self, store: TopicStore, place: Place) -> None:
        """Take a message from its handler, whose ack or nack has no effect any more."""
        delivery = store.handed_out.pop(place, None)
        if delivery is not None:
            delivery.status = SETTLED
            self.ready = [one for one in self.ready if one is not delivery]

    def _obey(self, store: TopicStore, place: Place, order: str) -> None:
        """Obey an operator, or a reset. An order is not for a delivery of which the
        broker does not know yet that the store has it.

        A dropped message is reported as returned: the broker, which has dropped it,
        then repeats the order no more.
        """
        if place in store.held:
            return
        if order == "drop":
            self._withdraw(store, place)
            store.job.return_to_broker.append(place)
            store.reports.wants_entries = True
        elif place not in store.handed_out:
            store.job.hasten.append(place)
            store.reports.wants_entries = True


def _nothing() -> None:
    """Do nothing, before a face drives the stores."""


def _has_failed(topic: str, error: Exception) -> TxmqError:
    return LocalProtocolError(
        f"the local store of topic {topic!r} has failed: {error!r}",
        hint="this is a bug of the client; what is stored stays on disk: start the consumer again",
    )
