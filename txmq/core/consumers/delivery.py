"""Deliveries: lease what was chosen and read, and park messages of fenced keys.

The life of a message is: READY (never delivered, returned, or a retry that is due),
LEASED, then settled or failed. Keys are compared with fences at delivery, so a message
of a fenced key is parked and never leased. One fetch is one event.

A delivery checks each candidate again, because the command may come later than they
were chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import circuit_breaker, fetch_choice, key_fences, leases, poison
from txmq.core.consumers.authorization import find_current_member
from txmq.core.consumers.candidates import Candidate, CandidateSource
from txmq.core.consumers.commands import CandidateRead, Deliver
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.consumers import AttemptRange, Delivered, Range
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import (
    failed_changes,
    failed_messages,
    failed_rows,
    passed_letters,
    put_back_queues,
)
from txmq.core.state.consumer_groups import ConsumerGroup, GroupMember, Lease, MessageRef
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.positions import Grant, Redelivery
from txmq.core.state.ranges import ValueRange
from txmq.core.state.state import State
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.positions import GroupPosition


class DeliveredRange(NamedTuple):
    """Rows that are delivered: offsets start <= offset < end of the batches of this
    read. `accepted`: no filter may pass them over (`FailedMessage`).
    """

    read_index: int
    start: int
    end: int
    attempt: int
    accepted: bool = False


class DeliverReply(NamedTuple):
    """The messages of one fetch. Lease 0 = nothing was leased.

    `again`: key fences or expired messages moved on: choose once more before waiting.
    """

    lease: int
    generation: int
    deadline: int
    deliveries: tuple[DeliveredRange, ...]
    again: bool


def decide_deliver(state: State, command: Deliver, now: int) -> Outcome:
    group, member = find_current_member(state, command.group, command.member, command.generation)
    builder = _DeliveryBuilder(state, group, member, now, command.durable)
    if not group.paused:
        builder.changes.advance()
        messages = sum(read.candidate.rows for read in command.reads)
        isolated = poison.holds_isolated(group, member)
        if not isolated and circuit_breaker.allows(group, messages, now):
            for number, read in enumerate(command.reads):
                builder.add(number, read)
    return builder.outcome()


class _DeliveryBuilder:
    """Builder of the event of one fetch, candidate by candidate."""

    def __init__(
        self, state: State, group: ConsumerGroup, member: GroupMember, now: int, durable: int
    ) -> None:
        self._state, self._group, self._member, self._now = state, group, member, now
        self._durable = durable
        self._first = True  # each failed message is delivered first since its replay
        self.changes = FailureChanges(state, group, now, leasing=True)
        self._ranges: list[AttemptRange] = []
        self._rows: list[MessageRef] = []
        self._decided: set[MessageRef] = set()  # failed messages
        self._deliveries: list[DeliveredRange] = []
        self._stops: list[Range] = []
        self._expired: list[Range] = []
        self._expired_rows: list[MessageRef] = []
        self._unwanted: list[Range] = []
        self._ordered = group.ordered
        # By (failed messages?, partition): the state is fixed meanwhile, so one check
        # of each partition is enough.
        self._open: dict[tuple[bool, TopicPartition], bool] = {}
        # Where the undelivered part of a partition begins after the candidates so far.
        self._cursors: dict[TopicPartition, int] = {}
        # Redeliveries of a partition below this offset are part of the event.
        self._passed: dict[TopicPartition, int] = {}
        self._deaths = 0  # of each delivered message

    def add(self, number: int, read: CandidateRead) -> None:
        """Add a candidate, if its messages can still be delivered to the member."""
        candidate = read.candidate
        tp = TopicPartition(candidate.topic_id, candidate.partition)
        failed = candidate.source is CandidateSource.FAILED
        is_open = self._open.get((failed, tp))
        if is_open is None:
            is_open = self._open[failed, tp] = self._is_open(tp, failed=failed)
        if not is_open:
            return
        if failed and self._add_put_back(number, read, tp):
            return
        if failed:
            for offset in range(candidate.start, candidate.start + candidate.rows):
                self._add_row(number, read, tp, offset)
        elif self._is_deliverable(read, tp):
            self._add_range(number, read, tp)

    def _is_open(self, tp: TopicPartition, *, failed: bool) -> bool:
        group, member = self._group, self._member
        if group.is_stopped(tp):
            return False
        if failed:
            return fetch_choice.may_deliver_row(group, member, tp)
        if tp not in member.partitions:
            return False
        return not (self._ordered and fetch_choice.held_by_others(group, member, tp))

    def _is_deliverable(self, read: CandidateRead, tp: TopicPartition) -> bool:
        candidate, position = read.candidate, self._group.positions[tp]
        keyless = read.keys is None and not read.unwanted
        if keyless and (
            candidate.needs_keys or (self._ordered and self.changes.topic_has_fences(tp[0]))
        ):
            return False
        if candidate.source is CandidateSource.LIVE:
            return self._is_next_live(candidate.start, tp, position)
        return self._is_next_redelivery(candidate, tp, position)

    def _is_next_live(self, start: int, tp: TopicPartition, position: GroupPosition) -> bool:
        if self._ordered and position.redeliver.first(self._passed.get(tp, 0)) is not None:
            return False
        return not self._deaths and start == self._cursors.get(tp, position.cursor)

    def _is_next_redelivery(
        self, candidate: Candidate, tp: TopicPartition, position: GroupPosition
    ) -> bool:
        start, end = candidate.start, candidate.start + candidate.rows
        passed = self._passed.get(tp, 0)
        waiting = position.redeliver.first(passed if self._ordered else start)
        value = Redelivery(candidate.attempt, candidate.deaths)
        whole = (
            waiting is not None
            and waiting.start == start
            and waiting.end >= end
            and waiting.value == value
        )
        limit = self._group.max_attempts
        over = limit is not None and candidate.attempt > limit
        if (
            not whole
            or start < passed
            or over is not (candidate.source is CandidateSource.EXHAUSTED)
        ):
            return False
        return over or self._fits_deaths(candidate.deaths)

    def _fits_deaths(self, deaths: int) -> bool:
        """Return True if messages with so many deaths may join this delivery.

        The first message that is delivered sets the number.
        """
        isolated = deaths >= failed_messages.ISOLATED_AFTER
        if self._deliveries or not deaths:
            return deaths == self._deaths and not isolated
        if poison.suspect_lease(self._group, self._member) is not None:
            return False
        if isolated and not poison.holds_nothing(self._group, self._member):
            return False
        self._deaths = deaths
        return True

    def _add_range(self, number: int, read: CandidateRead, tp: TopicPartition) -> None:
        candidate = read.candidate
        start, end = candidate.start, candidate.start + candidate.rows
        if candidate.source is CandidateSource.LIVE:
            self._cursors[tp] = end
        else:
            self._passed[tp] = end
        if read.unwanted:
            self._unwanted.append((*tp, start, end))
            return
        if read.keys is None and not read.expired:
            self._lease(number, tp, start, end, candidate.attempt)
            return
        free = start  # first offset of the messages to lease next
        for offset in range(start, end):
            if offset in read.expired:
                self._lease(number, tp, free, offset, candidate.attempt)
                free = offset + 1
                self._expired.append((*tp, offset, free))
                continue
            key_hash = None if read.keys is None else read.keys[offset - start]
            fenced = self.changes.is_fenced((*tp, offset), key_hash)
            if (
                fenced
                and candidate.source is CandidateSource.LIVE
                and self.changes.is_full(tp[0], key_hash)
            ):
                self._stop_at_full_fence(tp, offset, key_hash)
                end = offset
                break
            if fenced or candidate.source is CandidateSource.EXHAUSTED:
                self._lease(number, tp, free, offset, candidate.attempt)
                free = offset + 1
                self._change_row((*tp, offset), candidate, key_hash)
        self._lease(number, tp, free, end, candidate.attempt)

    def _stop_at_full_fence(self, tp: TopicPartition, offset: int, key_hash: int | None) -> None:
        """Stop the partition before this message, whose key has a full chain."""
        assert key_hash is not None, "fenced, so it has a key"
        self._cursors[tp] = offset
        self._stops.append((*tp, offset, key_hash))

    def _change_row(self, ref: MessageRef, candidate: Candidate, key_hash: int | None) -> None:
        """Park a fenced message; an exhausted message without a fence becomes a dead
        letter.
        """
        place, entry = ref[2] - candidate.base_offset, candidate.batch
        row = failed_rows.new_row(
            entry, place, key_hash, attempt=candidate.attempt - 1, deaths=candidate.deaths
        )
        if candidate.source is CandidateSource.EXHAUSTED:
            row = row._replace(first_failed_at=self._now)
            self._dead_letter(ref, row)
        else:
            self.changes.park(ref, row)

    def _dead_letter(self, ref: MessageRef, row: FailedMessage) -> None:
        letter = poison.dead_letter_row(self._state, self._group, ref, row)
        self.changes.dead_letter(ref, letter)

    def _lease(self, number: int, tp: TopicPartition, start: int, end: int, attempt: int) -> None:
        if start == end:
            return
        self._deliveries.append(DeliveredRange(number, start, end, attempt))
        if self._ranges and self._ranges[-1][:2] == tp and self._ranges[-1][3:] == (start, attempt):
            start = self._ranges.pop()[2]
        self._ranges.append((*tp, start, end, attempt))

    def _add_put_back(self, number: int, read: CandidateRead, tp: TopicPartition) -> bool:
        """Add letters that plans have put back, neighbours of one batch, all at once.
        Return False if each has to be looked at.
        """
        candidate = read.candidate
        start, end = candidate.start, candidate.start + candidate.rows
        if read.expired or candidate.attempt != 1 or candidate.deaths:
            return False
        waiting = put_back_queues.waiting_at(self._group, tp, start, candidate.rows)
        if waiting is None:
            return False
        refs: list[MessageRef] = [(*tp, offset) for offset in range(start, end)]
        if (
            self._ordered
            and self.changes.topic_has_fences(tp[0])
            and any(map(self.changes.is_fenced, refs, waiting.keys))
        ):
            return False
        if not self._decided.isdisjoint(refs) or not self._fits_deaths(0):
            return False
        self._decided.update(refs)
        self._rows += refs
        self._first = self._first and waiting.end <= self._durable
        self._deliveries.append(DeliveredRange(number, start, end, 1, accepted=True))
        return True

    def _add_row(self, number: int, read: CandidateRead, tp: TopicPartition, offset: int) -> None:
        ref = (*tp, offset)
        group = self._group
        row = failed_messages.get(self._state, group, ref)
        if (
            row is None
            or row.kind != FailedKind.RETRY
            or row.token
            or row.due > self._now
            or ref in group.leased_rows
            or fetch_choice.is_for_others(group, self._member, tp, row)
        ):
            return
        if ref in self._decided or self.changes.is_fenced(ref, row.key_hash):
            return
        self._decided.add(ref)
        if offset in read.expired:
            self._expired_rows.append(ref)
            self.changes.processed(ref, row.key_hash)
        elif fetch_choice.is_exhausted(group, tp, row):
            self._dead_letter(ref, row)
        elif row.deaths == read.candidate.deaths and self._fits_deaths(row.deaths):
            self._rows.append(ref)
            self._first = False
            one = DeliveredRange(number, offset, offset + 1, row.attempt + 1, row.accepted)
            if self._deliveries:
                last = self._deliveries[-1]
                if last._replace(start=offset, end=offset + 1) == one and last.end == offset:
                    one = one._replace(start=self._deliveries.pop().start)
            self._deliveries.append(one)

    def outcome(self) -> Outcome:
        """Return the event and the reply.

        A delivery of first attempts only may be answered before it is durable, also of
        letters that a plan has certainly put back. If it is lost with the power, the
        messages are simply delivered again.
        """
        group, leased = self._group, bool(self._deliveries)
        lease = group.next_lease if leased else 0
        deadline = self._now + group.settings.lease_us if leased else 0
        passed = bool(self.changes or self._expired or self._expired_rows or self._unwanted)
        reply = DeliverReply(
            lease, group.generation, deadline, tuple(self._deliveries), passed and not leased
        )
        if not (leased or passed or self._stops):
            return Outcome(reply=reply)
        isolated = self._deaths >= failed_messages.ISOLATED_AFTER
        event = Delivered(
            group.group_id, lease, self._member.name, deadline, isolated, tuple(self._ranges),
            tuple(self._rows), *self.changes.fields(), tuple(self._stops), tuple(self._expired),
            tuple(self._expired_rows), tuple(self._unwanted), self._deaths,
        )  # fmt: skip
        first = not self._deaths and all(delivery.attempt == 1 for delivery in self._deliveries)
        first = first and self._first and not self._expired_rows
        return Outcome((event,), reply, early=first and not (self.changes or self._stops))


def apply_delivered(state: State, event: Delivered, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    if event.moves or event.fences:
        poison.record_deaths(state, group, event.moves, context.stored_at)
        key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)
    for topic_id, partition, offset, key_hash in event.stops:
        group.stops[TopicPartition(topic_id, partition)] = (offset, key_hash)
        state.groups.dirty_groups.add(group.group_id)
    _apply_passed(state, group, event)
    if not event.lease:
        return
    lease = Lease(
        event.member,
        group.generation,
        context.stored_at,
        event.deadline,
        event.single,
        deaths=event.deaths,
    )
    leases.grant(state, group, event.lease, lease)
    circuit_breaker.record_probe(group, event.lease, context.stored_at)
    for topic_id, partition, start, end, attempt in event.ranges:
        leases.add_range(
            state,
            group,
            TopicPartition(topic_id, partition),
            ValueRange(start, end, Grant(event.lease, attempt)),
        )
    for ref in _take_put_back(state, group, event):
        if passed_letters.take_from_queue(state, group, ref):
            leases.add_row(group, event.lease, ref)  # its row stays as it is
            continue
        row = failed_changes.drop(state, group, ref)
        assert row is not None, "chosen for delivery, so it is there"
        leases.add_row(group, event.lease, ref)
        failed_changes.put(
            state, group, ref, row._replace(attempt=row.attempt + 1, consumer=event.member)
        )
    if event.deaths:
        for tp in lease.partitions:
            group.update_suspects(tp)


def _take_put_back(state: State, group: ConsumerGroup, event: Delivered) -> Iterator[MessageRef]:
    """Apply: lease letters that plans have put back, neighbours at once. Yield the
    other failed messages, each in its turn.
    """
    if not group.put_back:
        yield from event.rows
        return
    side: list[MessageRef] = []
    for ref in (*event.rows, (0, 0, 0)):
        if side and ref != (*side[-1][:2], side[-1][2] + 1):
            if put_back_queues.take(state, group, side):
                leases.add_rows(group, event.lease, side)
            else:
                yield from side
            side = []
        side.append((ref[0], ref[1], ref[2]))


def _apply_passed(state: State, group: ConsumerGroup, event: Delivered) -> None:
    for topic_id, partition, start, end in event.expired + event.unwanted:
        position = state.groups.position_for_update(group, TopicPartition(topic_id, partition))
        position.remove_ready(start, end)
        position.settle(start, end)
        position.pass_over(start, end)
    group.expired += sum(end - start for _topic_id, _partition, start, end in event.expired)
    for topic_id, partition, start, end in event.unwanted:
        group.positions[TopicPartition(topic_id, partition)].settle_filtered(start, end)
        group.filtered += end - start
    for ref in event.expired_rows:
        row = failed_changes.remove(state, group, ref, "expired")
        assert row is not None, "chosen for delivery, so it is there"
        key_fences.settle_head(state, group, ref, row.key_hash)
        state.groups.pass_over(group, ref)
        group.expired += 1
    if event.expired or event.expired_rows or event.unwanted:
        state.groups.dirty_groups.add(group.group_id)


DECIDERS: Deciders = {Deliver: decide_deliver}
APPLIERS: Appliers = {Delivered: apply_delivered}
