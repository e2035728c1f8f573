"""Reports of consumers' local stores: which messages are there, and what became of
them.

A message that a store has is a failed message of kind LOCAL. It is delivered to nobody,
and in an ordered group it is the head of its key's fence. A report is taken where the
message is leased to this member, is in this store already, or is unsettled and leased
to nobody: then the store knows more than the broker. Anything else is somebody else's
by now, and the store forgets it.

In an ordered group a message without a lease and a row is taken only if nothing before
it in its partition is still to be processed: that could have its key. Where an earlier
message of its key was refused in the same report, it goes back as well, and where a
message before it was lost to its lease. An old copy is not taken either: one from
before a reset of its partition, or of a store that was adopted.
"""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from txmq.core.consumers import circuit_breaker, failures, head_of_line, key_fences, leases
from txmq.core.consumers.authorization import find_group, find_member
from txmq.core.consumers.commands import KeySource, ReportStored, StoredEntry
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.consumers import GroupGuarded, StoreReported
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import (
    attempts,
    failed_changes,
    failed_messages,
    failed_rows,
    local_stores,
    restores,
)
from txmq.core.state.consumer_groups import ConsumerStore
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.local_stores import StoreOrder
from txmq.core.topics import topics
from txmq.errors import Conflict, Throttled
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, FailingUnit, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.positions import GroupPosition
    from txmq.core.state.state import State

STORED, ACKED, DEAD, RETURNED = STATES = ("stored", "acked", "dead", "returned")
KEPT, SETTLED, PARKED, ELSEWHERE, UNKNOWN = "kept", "settled", "parked", "elsewhere", "unknown"
STEP_ENTRIES = 250  # of one command, so that each apply is short
MAX_ORDERS = 1_000  # of one reply
MAX_STORES = 1_000  # of one group, each with messages
NO_LEASE = -1  # of messages that were processed from a store


# A message, and in an ordered group its topic with the hash of its key.
Units: TypeAlias = "tuple[MessageRef] | tuple[MessageRef, tuple[int, int]]"


class StoreReply(NamedTuple):
    """The verdicts on the entries of a report, one for each.

    `fences` are as `NackReply.fence_lease`. `orders` are (message, StoreOrder); `more`:
    there are further ones.
    """

    verdicts: tuple[str, ...]
    fences: tuple[int, ...]
    orders: tuple[tuple[MessageRef, StoreOrder], ...] = ()
    more: bool = False


def key_source(state: State, group_name: str, entry: StoredEntry) -> KeySource | None:
    """Return the place of the key of a message that may get its first row.

    None if no key has to be read.
    """
    group = state.groups.by_name.get(group_name)
    tp = TopicPartition(entry.topic_id, entry.partition)
    if group is None or entry.state == ACKED or tp not in group.positions:
        return None
    position, offset = group.positions[tp], entry.offset
    if offset < position.floor or position.settled.overlap(offset, offset + 1):
        return None
    for base, batch in topics.entry_at(state, *tp, entry.offset):
        return KeySource(batch, entry.offset - base)
    return None


def units(state: State, group: ConsumerGroup, entry: StoredEntry) -> Units:
    """Return the message of an entry, and in an ordered group its key: entries that
    share one are judged one after the other.
    """
    ref = (entry.topic_id, entry.partition, entry.offset)
    row = failed_messages.get(state, group, ref) if group.ordered else None
    key_hash = entry.key_hash if row is None else row.key_hash
    return (ref, (ref[0], key_hash)) if group.ordered and key_hash is not None else (ref,)


def find_store(
    state: State, group_name: str, store_id: bytes
) -> tuple[ConsumerGroup, ConsumerStore]:
    """Return a group and its store."""
    group = find_group(state, group_name)
    store = group.stores.get(store_id)
    if store is None:
        message = f"consumer group {group_name!r} knows no store {store_id.hex()}"
        raise Conflict(message, hint="list the stores with messages: txmq recover list")
    return group, store


def refuse_while_owned(group: ConsumerGroup, store: ConsumerStore) -> None:
    """Refuse that somebody else speaks for a store whose owner is there."""
    if not group.has_owner(store):
        return
    at = f" on {store.host}" if store.host else ""
    raise Conflict(
        f"the store belongs to {store.member!r}{at}, a member of {group.name!r}",
        hint="stop that consumer first; or order the store: txmq retry now, txmq retry skip",
        detail={"member": store.member, "host": store.host},
    )


def decide_report(state: State, command: ReportStored, now: int) -> Outcome:
    instance = ""
    if command.member:
        found = find_member(state, command.group, command.member)
        group, instance = found[0], found[1].instance
    else:
        group = find_group(state, command.group)
    store = group.stores.get(command.store)
    if not command.member and store is not None and not command.force:
        refuse_while_owned(group, store)
    if command.member and store is not None:
        _refuse_another_copy(group, store, command.member)
    report = _Report(state, group, command, now)
    for entry in command.entries:
        report.add(entry)
    if store is None and report.keeps and len(local_stores.with_messages(group)) >= MAX_STORES:
        message = f"consumer group {group.name!r} has messages in {MAX_STORES} stores, the maximum"
        raise Throttled(message, hint="adopt those without an owner: txmq recover list")
    return report.outcome(instance)


def _refuse_another_copy(group: ConsumerGroup, store: ConsumerStore, name: str) -> None:
    """Refuse a member that has no say about a store any more.

    The lock of a directory lets the next process have it only after the one before, and
    each joins before it opens its stores. So if a later member has reported this store,
    there are two copies of it. The later one goes on: it may have come after a crash.
    """
    if not group.has_owner(store) or group.members[store.member].since <= group.members[name].since:
        return
    at = f" on {store.host}" if store.host else ""
    raise Conflict(
        f"{store.member!r}{at} has a copy of this local store, and joined {group.name!r} later",
        hint="a store's directory must not be copied for a second consumer: give it its own",
        detail={"member": store.member, "host": store.host},
    )


class _Report:
    """Builder of the event of one report, entry by entry. They share no `units`."""

    def __init__(self, state: State, group: ConsumerGroup, command: ReportStored, now: int) -> None:
        self._state, self._group, self._command, self._now = state, group, command, now
        self._store = group.stores.get(command.store)
        self._changes = FailureChanges(state, group, now)
        # offsets that were in their partitions, and that the event takes out of them
        self._taken: dict[TopicPartition, list[int]] = {}
        self._verdicts: list[str] = []
        self._fences: list[int] = []
        self._settled: list[MessageRef] = []
        self._failed: list[MessageRef] = []
        self._answered: list[MessageRef] = []
        self._returned: list[MessageRef] = []
        self._units: dict[tuple[str, str], set[FailingUnit]] = {}  # failing ones, by error
        self.keeps = False

    def add(self, entry: StoredEntry) -> None:
        """Judge an entry, and add to the event what it changes."""
        ref = (entry.topic_id, entry.partition, entry.offset)
        row = failed_messages.get(self._state, self._group, ref)
        key_hash = entry.key_hash if row is None else row.key_hash
        verdict = self._judge(entry, ref, row)
        if verdict is None:
            verdict = self._take(entry, ref, row)
        self._verdicts.append(verdict)
        self._fences.append(self._fence_lease(entry.topic_id, key_hash, verdict))
        if verdict != KEPT and self._order(ref) is not None:
            self._answered.append(ref)

    def _order(self, ref: MessageRef) -> StoreOrder | None:
        if self._store is None or not self._store.orders:
            return None
        return local_stores.order_of(self._state, self._group, self._command.store, ref)

    def _judge(self, entry: StoredEntry, ref: MessageRef, row: FailedMessage | None) -> str | None:
        """Return the verdict on an entry that changes nothing; None = take it."""
        topic = self._state.topics_by_id.get(entry.topic_id)
        position = self._group.positions.get(TopicPartition(ref[0], ref[1]))
        if topic is None or topic.deleted or position is None:
            return UNKNOWN
        if entry.offset >= topic.end_offsets[entry.partition]:
            return UNKNOWN
        tp = TopicPartition(ref[0], ref[1])
        if restores.is_lost(self._state, tp, entry.offset, entry.epoch):
            return UNKNOWN
        if row is not None:
            return self._judge_row(entry, ref, row)
        return self._judge_unfailed(entry, ref, position)

    def _judge_unfailed(
        self, entry: StoredEntry, ref: MessageRef, position: GroupPosition
    ) -> str | None:
        """Judge a message that has no row: it is in its partition, or was processed."""
        tp, offset, end = TopicPartition(ref[0], ref[1]), ref[2], ref[2] + 1
        if offset < position.floor or position.settled.overlap(offset, end):
            return SETTLED
        begun = self._group.pending_resets.get(tp)
        if begun is not None and offset >= begun:
            return ELSEWHERE
        if position.leased.overlap(offset, end):
            # A store that answers an order to drop a message never had this delivery.
            dropped = entry.state == RETURNED and self._order(ref) is StoreOrder.DROP
            taken = not dropped and self._is_of_lease(ref, entry)
            if (taken and self._goes_back(entry, ref)) or (
                not (taken or dropped) and self._is_given_up(ref, entry)
            ):
                self._returned.append(ref)
                return ELSEWHERE
        else:
            taken = bool(position.redeliver.overlap(offset, end)) and not (
                self._is_old(entry, ref) or (entry.state != ACKED and self._has_earlier(tp, offset))
            )
        if not taken:
            return ELSEWHERE
        # A damaged message cannot be delivered to anybody else anyway.
        return KEPT if entry.damaged and entry.state == STORED else None

    def _is_given_up(self, ref: MessageRef, entry: StoredEntry) -> bool:
        """Return True if a message is leased to this member for a store that may not
        keep it: it is being adopted. If the message stayed with the member until the
        lease ends, later ones of its key would come first.
        """
        return entry.state != ACKED and self._is_of_lease(ref, entry, adopted=True)

    def _goes_back(self, entry: StoredEntry, ref: MessageRef) -> bool:
        """Return True if a leased message may be later than one of its key that is
        delivered again: with a fence of its own it would come first.
        """
        if entry.state == ACKED:
            return False
        return self._is_behind_a_refused(entry) or self._is_overtaken(ref)

    def _is_overtaken(self, ref: MessageRef) -> bool:
        """Return True if a message before it in its partition waits for redelivery, or
        has been delivered again since: a store may tell of the two in two reports.
        """
        if not self._group.ordered:
            return False
        position = self._group.positions[TopicPartition(ref[0], ref[1])]
        waiting = position.redeliver.first()
        if waiting is not None and waiting.start < ref[2]:
            return True
        lease = leases.lease_of(self._group, ref)
        earlier = takewhile(lambda held: held.start < ref[2], position.leased)
        return any(held.value.lease > lease for held in earlier)

    def _is_behind_a_refused(self, entry: StoredEntry) -> bool:
        """Return True if the message before it of its key goes to somebody else."""
        if entry.behind is None:
            return False
        topic_id, partition, offset = entry.behind
        if failed_messages.get(self._state, self._group, entry.behind) is not None:
            return False  # the fence of the key keeps the order
        position = self._group.positions.get(TopicPartition(topic_id, partition))
        return (
            position is not None
            and offset >= position.floor
            and not position.settled.overlap(offset, offset + 1)
        )

    def _judge_row(self, entry: StoredEntry, ref: MessageRef, row: FailedMessage) -> str | None:
        """Judge a message that has failed before."""
        if row.kind == FailedKind.LOCAL:
            return self._judge_local(entry, row)
        if row.kind == FailedKind.ABANDONED:
            return SETTLED
        if row.kind == FailedKind.LETTER:
            return SETTLED if entry.state == DEAD else ELSEWHERE
        if ref in self._group.leased_rows:
            return None if self._is_of_lease(ref, entry) else ELSEWHERE
        if row.token or self._is_old(entry, ref):
            return ELSEWHERE
        return self._judge_waiting(entry, row)

    @staticmethod
    def _judge_waiting(entry: StoredEntry, row: FailedMessage) -> str | None:
        """Judge a message that is parked, or waits for its next delivery."""
        if row.kind == FailedKind.PARKED:
            return None if entry.state == ACKED else PARKED
        return SETTLED if entry.state == RETURNED else None

    def _judge_local(self, entry: StoredEntry, row: FailedMessage) -> str | None:
        if row.store != self._command.store or (self._store is not None and self._store.adopted):
            return ELSEWHERE
        if entry.state != STORED:
            return None
        same = (entry.attempt, entry.due) == (row.attempt, row.due)
        return KEPT if same and self._with_failure(row, entry) == row else None

    def _is_of_lease(self, ref: MessageRef, entry: StoredEntry, *, adopted: bool = False) -> bool:
        """Return True if the message is leased to this member, in the generation that
        it names or before, and this copy is of that lease or a later one. `adopted`:
        also where the store is being adopted.

        Or it was processed under that lease, by a process that is gone: its session has
        not ended yet, and this one has its store under another name.
        """
        number = leases.lease_of(self._group, ref)
        lease, command, store = self._group.leases[number], self._command, self._store
        if command.member and lease.member == command.member:
            of_lease = lease.generation <= command.generation <= self._group.generation
        else:
            of_lease = entry.state == ACKED and lease.generation == entry.generation > 0
        return (
            of_lease
            and not self._is_from_before_a_reset(entry, ref)
            and (store is None or (number >= store.fence and store.adopted <= adopted))
        )

    def _is_old(self, entry: StoredEntry, ref: MessageRef) -> bool:
        """Return True if the store's copy of a message without a lease is outdated."""
        store = self._store
        fenced = store is not None and (store.fence or self._order(ref) is StoreOrder.DROP)
        return bool(fenced) or self._is_from_before_a_reset(entry, ref)

    def _is_from_before_a_reset(self, entry: StoredEntry, ref: MessageRef) -> bool:
        tp = TopicPartition(ref[0], ref[1])
        if 0 < entry.generation < self._group.resets.get(tp, 0):
            return True
        known = restores.epoch_at(self._state, self._group, tp, ref[2])
        return bool(entry.epoch) and entry.epoch != known

    def _has_earlier(self, tp: TopicPartition, offset: int) -> bool:
        """Return True if a message before this one may have its key and is still to be
        processed.
        """
        if not self._group.ordered:
            return False
        before = self._group.positions[tp].unprocessed_below(offset)
        return before > sum(1 for taken in self._taken.get(tp, ()) if taken < offset)

    def _take(self, entry: StoredEntry, ref: MessageRef, row: FailedMessage | None) -> str:
        """Add the entry to the event, and return its verdict."""
        if row is None:
            self._taken.setdefault(TopicPartition(ref[0], ref[1]), []).append(ref[2])
        if entry.state == ACKED:
            self._settled.append(ref)
            if row is not None:
                self._changes.processed(ref, row.key_hash)
            return SETTLED
        before = self._first_row(ref, entry) if row is None else row
        # A store that has lost the message does not know its attempts.
        attempt = entry.attempt or (before.attempt if entry.state == RETURNED else 0)
        after = self._with_failure(before, entry)._replace(attempt=attempt)
        tried = before.trial_by != "" and entry.failure is not None  # its one attempt is over
        ends = entry.state == DEAD or tried
        if ends or self._is_new_failure(entry, row, after):
            self._count_failure(ref, after)
        fenced = self._changes.is_fenced(ref, after.key_hash)
        if ends:
            self._changes.dead_letter(ref, after)
        elif entry.state == RETURNED:
            latest = self._now + failures.MAX_DELAY
            self._changes.retry(ref, after, min(max(entry.due, self._now), latest))
        else:
            self._changes.leave_at_consumer(
                ref, after._replace(due=entry.due, store=self._command.store)
            )
        if fenced:
            return PARKED
        if entry.state != STORED or tried:
            return SETTLED
        self.keeps = True
        if row is None or row.kind != FailedKind.LOCAL or self._obeys(entry, row):
            self._answered += [ref] * (self._order(ref) is not None)
        return KEPT

    def _obeys(self, entry: StoredEntry, row: FailedMessage) -> bool:
        return entry.attempt != row.attempt or entry.due < row.due

    def _first_row(self, ref: MessageRef, entry: StoredEntry) -> FailedMessage:
        """Return the row of a message that is in its partition."""
        assert entry.source is not None, "leased or to be redelivered, so it is in a batch"
        position = self._group.positions[TopicPartition(ref[0], ref[1])]
        held = position.leased.overlap(ref[2], ref[2] + 1)
        if held:
            deaths = self._group.leases[held[0].value.lease].deaths
        else:
            deaths = position.redeliver.overlap(ref[2], ref[2] + 1)[0].value.deaths
        batch, place = entry.source
        return failed_rows.new_row(
            batch, place, entry.key_hash, attempt=entry.attempt, deaths=deaths
        )

    def _with_failure(self, row: FailedMessage, entry: StoredEntry) -> FailedMessage:
        """Return the row with the failure that the entry tells of, if it does."""
        began = row.first_failed_at or self._now
        if entry.failure is None:
            return row._replace(first_failed_at=began, accepted=True)
        return row._replace(
            consumer=self._command.member or row.consumer,
            first_failed_at=began,
            accepted=True,
            **failures.cut_failure(entry.failure),
        )

    @staticmethod
    def _is_new_failure(
        entry: StoredEntry, row: FailedMessage | None, after: FailedMessage
    ) -> bool:
        """Return True if a store that retries a message tells of a further failure."""
        before = 0 if row is None else row.attempt
        failed = entry.failure is not None and after.attempt > before
        return failed and entry.state != RETURNED

    def _count_failure(self, ref: MessageRef, after: FailedMessage) -> None:
        self._failed.append(ref)
        if head_of_line.is_poison(self._group, ref, after):
            return
        unit = circuit_breaker.failing_unit(ref, after)
        self._units.setdefault((after.fingerprint, after.error_type), set()).add(unit)

    def _fence_lease(self, topic_id: int, key_hash: int | None, verdict: str) -> int:
        """Return the lease below which messages of the key follow this one."""
        if not self._group.ordered or verdict in (SETTLED, UNKNOWN):
            return 0
        if verdict == ELSEWHERE:
            return self._group.next_lease
        return self._changes.first_lease(topic_id, key_hash)

    def outcome(self, instance: str) -> Outcome:
        """Return the events and the reply."""
        command, store = self._command, self._store
        owner = (command.member, instance, command.host) if command.member else ("", "", "")
        known = None if store is None else (store.member, store.instance, store.host)
        moves, fences = self._changes.fields()
        settled, failed = tuple(self._settled), tuple(self._failed)
        event = StoreReported(
            self._group.group_id, command.store, *owner, settled, moves, fences, failed,
            tuple(self._answered), tuple(self._returned),
        )  # fmt: skip
        claims = bool(command.member) and known is not None and known != owner
        changed = bool(settled or moves or fences or self._answered or self._returned or claims)
        orders = self._orders()
        reply = StoreReply(
            tuple(self._verdicts), tuple(self._fences), orders[:MAX_ORDERS],
            len(orders) > MAX_ORDERS,
        )  # fmt: skip
        return Outcome((event, *self._guarded()) if changed else (), reply)

    def _orders(self) -> tuple[tuple[MessageRef, StoreOrder], ...]:
        if self._store is None or not self._command.member:
            return ()
        answered = set(self._answered)
        waiting = (
            item
            for item in local_stores.orders(self._state, self._group, self._command.store)
            if item[0] not in answered
        )
        return tuple(islice(waiting, MAX_ORDERS + 1))

    def _guarded(self) -> Iterator[GroupGuarded]:
        """Yield the opening of the circuit breaker, if so many failed alike."""
        for (fingerprint, error_type), units in self._units.items():
            if circuit_breaker.would_trip(self._group, fingerprint, units, self._now):
                yield GroupGuarded(self._group.group_id, fingerprint, error_type)
                return


def apply_reported(state: State, event: StoreReported, context: RecordContext) -> None:
    group, at = state.groups.by_id[event.group_id], context.stored_at
    store = group.stores.get(event.store)
    if store is None:
        store = group.stores[event.store] = ConsumerStore("", "", "", at, lost_at=at)
    if event.member:
        store.member, store.instance, store.host = event.member, event.instance, event.host
        store.lost_at = 0 if group.has_owner(store) else at
    store.seen_at = at
    _count_failures(state, group, event, at)
    key_fences.apply_changes(state, group, event.moves, event.fences, at)
    for tp in {TopicPartition(*move[:2]) for move in event.moves} & group.suspect_partitions:
        group.update_suspects(tp)
    for ref in event.settled:
        _settle(state, group, ref)
    for topic_id, partition, offset in event.returned:
        tp = TopicPartition(topic_id, partition)
        leases.return_range(state, group, tp, offset, offset + 1)
    for ref in event.answered:
        local_stores.drop_order(state, group, event.store, ref)
    local_stores.forget_if_idle(state, group, event.store)
    state.groups.dirty_groups.add(group.group_id)


def _count_failures(state: State, group: ConsumerGroup, event: StoreReported, at: int) -> None:
    failed = set(event.failed)
    for move in event.moves if failed else ():
        topic_id, partition, offset, row = failed_rows.decode_move(move)
        ref = (topic_id, partition, offset)
        if ref not in failed:
            continue
        if group.breaker is not None:
            circuit_breaker.record_probe_failure(group, leases.lease_of(group, ref), at)
        else:
            circuit_breaker.record_failure(group, ref, row, at)
        failed_changes.sweep(state, group.group_id, ref)
        attempts.record(state, group, ref, row, at)


def _settle(state: State, group: ConsumerGroup, ref: MessageRef) -> None:
    """Apply: a message was processed from a store, wherever it is."""
    row = failed_changes.remove(state, group, ref)
    number = leases.lease_of(group, ref) or NO_LEASE
    circuit_breaker.record_acks(group, number, 1)
    group.processed[ref[0]] += 1
    if row is not None:
        leases.release_row(state, group, ref)
        key_fences.settle_head(state, group, ref, row.key_hash)
        return
    tp, (offset, end) = TopicPartition(ref[0], ref[1]), (ref[2], ref[2] + 1)
    leases.release_range(state, group, tp, offset, end)
    position = group.positions[tp]
    position.remove_ready(offset, end)
    position.settle(offset, end)
    group.update_suspects(tp)


DECIDERS: Deciders = {ReportStored: decide_report}
APPLIERS: Appliers = {StoreReported: apply_reported}
