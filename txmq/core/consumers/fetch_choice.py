"""Candidates of a fetch: the batches and rows that a member could get now.

The engine reads the chosen batches, and `delivery` leases them.

The order within a partition is: redeliveries by offset, then messages that were never
delivered. An ordered group passes nothing over, and a partition that came from another
member waits until that member holds none of its messages. Suspects (`poison`) are
delivered by themselves, before everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import circuit_breaker, key_fences, poison
from txmq.core.consumers.authorization import find_current_member
from txmq.core.consumers.candidates import (
    SINGLE_ROW_BYTES,
    Candidate,
    CandidateSource,
    FetchLimits,
    RunBuilder,
)
from txmq.core.state import failed_messages, visibility
from txmq.core.state.positions import UNDELIVERED
from txmq.core.state.state import State
from txmq.core.topics import topics
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Collection

    from txmq.core.state.consumer_groups import ConsumerGroup, GroupMember, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.positions import GroupPosition, Redelivery

# Due suspects of one partition that a fetch passes over, because they have other counts
# of deaths than the suspects it delivers.
SUSPECTS_SKIPPED = 64
# failed messages of one fetch: each has a row that changes, but for letters that plans
# have put back: for these so many rows are read, one for neighbours of a batch
MAX_ROWS = 1_000
# Bytes of a fetch that each partition gets at least. Batches of partitions alternate in
# the log, so smaller amounts would mean more reads.
MIN_PARTITION_BYTES = 256 << 10


class ChosenCandidates(NamedTuple):
    """The candidates of one fetch. `fences_can_advance`: a delivery is worthwhile even
    without candidates, because key fences can go on.
    """

    candidates: tuple[Candidate, ...] = ()
    fences_can_advance: bool = False


def choose_candidates(
    state: State,
    group: str,
    member: str,
    generation: int,
    durable: int,
    limits: FetchLimits,
    now: int,
    excluded: Collection[TopicPartition] = (),
) -> ChosenCandidates:
    """Return the batches to read for one fetch.

    They have at most `limits.max_bytes` in all, or are one larger batch, and are
    visible at the log position `durable`. Partitions that are `excluded` have none.
    """
    found = find_current_member(state, group, member, generation)
    if found[0].paused:
        return ChosenCandidates()
    fences = fences_can_advance(state, found[0], now)
    if poison.holds_isolated(*found) or not circuit_breaker.allows(found[0], 1, now):
        return ChosenCandidates(fences_can_advance=fences)
    probing = found[0].breaker is not None
    if probing:
        limits = limits._replace(max_messages=1)
    chooser = _Chooser(state, *found, durable, now, limits, excluded)
    if chooser.suspects():
        return ChosenCandidates(tuple(chooser.candidates), fences)
    if probing:
        chooser.partitions()  # a message that has not failed yet is the better probe
    chooser.due_rows(max(1, limits.max_messages // 2))
    if not probing:
        chooser.partitions()
    return ChosenCandidates(tuple(chooser.candidates), fences)


def fences_can_advance(state: State, group: ConsumerGroup, now: int) -> bool:
    """Return True if a waiting key fence can go on."""
    return (
        bool(group.waiting_fences)
        and not group.paused
        and next(key_fences.waiting_advances(state, group, now), None) is not None
    )


def held_by_others(group: ConsumerGroup, member: GroupMember, tp: TopicPartition) -> bool:
    """Return True if another member still holds messages of this partition.

    In an ordered group such messages may have any key.
    """
    position = group.positions[tp]
    first = position.leased.first()
    if first is not None and group.leases[first.value.lease].member != member.name:
        return True
    return any(
        reserved.value.member != member.name or reserved.value.generation < member.since
        for reserved in position.reserved
    )


def may_deliver_row(group: ConsumerGroup, member: GroupMember, tp: TopicPartition) -> bool:
    """Return True if failed messages of this partition may go to the member.

    In an ordered group they go to the owner of the partition, otherwise to any member
    that reads the topic.
    """
    if not group.ordered:
        return tp[0] in member.topics
    return tp in member.partitions and not held_by_others(group, member, tp)


def may_try(group: ConsumerGroup, name: str, tp: TopicPartition) -> bool:
    """Return True if a member gets failed messages of this partition."""
    member = group.members.get(name)
    if member is None:
        return False
    return tp in member.partitions if group.ordered else tp[0] in member.topics


def is_for_others(
    group: ConsumerGroup, member: GroupMember, tp: TopicPartition, row: FailedMessage
) -> bool:
    """Return True if another member is to try the message."""
    return row.trial_by not in ("", member.name) and not is_exhausted(group, tp, row)


def is_exhausted(group: ConsumerGroup, tp: TopicPartition, row: FailedMessage) -> bool:
    """Return True if a failed message has had its last attempt.

    That attempt got no answer, or the limit was higher then: otherwise a nack would
    have made it a dead letter. A trial is one attempt, by one member.
    """
    if row.trial_by and (row.attempt or row.deaths or not may_try(group, row.trial_by, tp)):
        return True
    return group.max_attempts is not None and row.attempt >= group.max_attempts


class _Chooser:
    """Collector of candidates, until the fetch is full."""

    def __init__(
        self,
        state: State,
        group: ConsumerGroup,
        member: GroupMember,
        durable: int,
        now: int,
        limits: FetchLimits,
        excluded: Collection[TopicPartition],
    ) -> None:
        self._state, self._group, self._member = state, group, member
        self._durable, self._now = durable, now
        self._limits, self._excluded = limits, excluded
        self._messages, self._bytes = limits.max_messages, limits.max_bytes
        self._rest = 0  # bytes reserved for the partitions that follow
        self._deaths = 0  # of each suspect that is chosen
        # Positions of large batches of which single rows are chosen.
        self._single_row_batches: set[int] = set()
        self.candidates: list[Candidate] = []
        # Failed messages that stand side by side in one batch, to be one candidate: the
        # first one with its row, and their number.
        self._first_row: tuple[MessageRef, FailedMessage] | None = None
        self._rows = 0

    def _full(self, length: int = 0) -> bool:
        return self._messages <= 0 or (
            self._bytes < self._limits.max_bytes and length > self._bytes
        )

    def suspects(self) -> bool:
        """Choose redeliveries of suspects; return True if nothing else may be delivered
        now.
        """
        group = self._group
        if not (group.suspect_partitions or group.isolated_rows):
            return False
        if self._isolated():
            return True
        for tp in filter(self._may_redeliver, group.suspect_partitions):
            for start, end, redelivery in poison.next_redeliveries(group, tp):
                if redelivery.deaths and self._fits_deaths(redelivery.deaths):
                    self._range(CandidateSource.REDELIVER, tp, start, end, redelivery)
        return bool(self.candidates)

    def _isolated(self) -> bool:
        """Choose one isolated message if the member holds nothing; return True if one
        waits.
        """
        group = self._group
        ready = poison.holds_nothing(group, self._member)
        for ref, due in group.isolated_rows.items():
            if due <= self._now and self._may_redeliver(TopicPartition(ref[0], ref[1])):
                row = failed_messages.get(self._state, group, ref)
                assert row is not None, "it waits, so it is there"
                if not is_exhausted(group, TopicPartition(ref[0], ref[1]), row):
                    if ready:
                        self._add_row(ref, row)
                        self._close_rows()
                    return True
        for tp in filter(self._may_redeliver, group.suspect_partitions):
            for start, _end, redelivery in poison.next_redeliveries(group, tp):
                if redelivery.deaths >= failed_messages.ISOLATED_AFTER:
                    if ready:
                        self._range(CandidateSource.REDELIVER, tp, start, start + 1, redelivery)
                    return True
        return False

    def _may_redeliver(self, tp: TopicPartition) -> bool:
        """Return True if the member owns the partition and may get its redeliveries."""
        mine = tp in self._member.partitions and not self._is_stopped(tp)
        return mine and not (self._group.ordered and held_by_others(self._group, self._member, tp))

    def _fits_deaths(self, deaths: int) -> bool:
        """Return True if messages with so many deaths may be chosen, too.

        The first one that is chosen sets the number.
        """
        if self.candidates or self._rows or not deaths:
            return deaths == self._deaths
        if (
            deaths >= failed_messages.ISOLATED_AFTER
            or poison.suspect_lease(self._group, self._member) is not None
        ):
            return False
        self._deaths, self._messages = deaths, min(self._messages, poison.batch_limit(deaths))
        return True

    def _is_stopped(self, tp: TopicPartition) -> bool:
        topic = self._state.topics_by_id[tp[0]]
        closed = topic.deleted or not topic.settings.readable
        unwanted = tp in self._excluded or tp[0] in self._limits.excluded_topics
        return closed or unwanted or self._group.is_stopped(tp)

    def due_rows(self, most: int) -> None:
        """Choose at most `most` failed messages that are due."""
        self._due_rows(most)
        self._close_rows()

    def _due_rows(self, letters: int) -> None:
        most = reads = min(letters, MAX_ROWS)
        for tp in list(self._group.retrying):
            if self._is_stopped(tp) or not may_deliver_row(self._group, self._member, tp):
                continue
            passed = 0
            for ref, row in failed_messages.due_rows(self._state, self._group, tp, self._now):
                if most <= 0 or self._full(self._size(ref, row)):
                    return
                if row.trial_by and is_for_others(self._group, self._member, tp, row):
                    continue
                if self._fits_deaths(
                    row.deaths if row.deaths and not is_exhausted(self._group, tp, row) else 0
                ):
                    most, letters = most - 1, letters - 1
                    self._add_row(ref, row)
                elif (passed := passed + 1) > SUSPECTS_SKIPPED:
                    break
            if not self._deaths:  # letters that were put back are no suspects
                letters, reads = self._put_back(tp, letters, reads)

    def _put_back(self, tp: TopicPartition, letters: int, reads: int) -> tuple[int, int]:
        """Choose letters that plans have put back, and return how many more of them may
        be, and how many more rows may be read for it.
        """
        for ref, row, count in failed_messages.put_back_letters(
            self._state, self._group, tp, letters
        ):
            if letters <= 0 or reads <= 0 or self._full(self._size(ref, row)):
                return 0, 0
            rows = min(count, letters, self._messages)
            letters, reads = letters - rows, reads - 1
            self._add_row(ref, row, rows)
        return letters, reads

    def _add_row(self, ref: MessageRef, row: FailedMessage, rows: int = 1) -> None:
        """Add a failed message, with those next to it that are as it is."""
        self._messages -= rows
        if self._first_row is not None and self._is_next(*self._first_row, ref, row):
            self._rows += rows
            return
        self._close_rows()
        self._bytes -= self._size(ref, row)
        if row.length > SINGLE_ROW_BYTES:
            self._single_row_batches.add(row.position)
        self._first_row, self._rows = (ref, row), rows

    def _is_next(
        self, first_ref: MessageRef, first: FailedMessage, ref: MessageRef, row: FailedMessage
    ) -> bool:
        """Return True if a failed message follows those before it in their batch."""
        return (
            row.position == first.position
            and row.row == first.row + self._rows
            and ref[2] == first_ref[2] + self._rows
            and ref[:2] == first_ref[:2]
            and row.attempt == first.attempt
            and not row.deaths
            and not first.deaths
        )

    def _close_rows(self) -> None:
        """Make one candidate of neighbouring failed messages."""
        if self._first_row is None:
            return
        (topic_id, partition, offset), row = self._first_row
        tp = TopicPartition(topic_id, partition)
        deaths = 0 if row.deaths and is_exhausted(self._group, tp, row) else row.deaths
        self.candidates.append(
            Candidate(
                CandidateSource.FAILED,
                *(topic_id, partition, offset - row.row, row.row, self._rows),
                row.attempt + 1,
                needs_keys=False,
                batch=t.BatchEntry(row.position, row.length, 0, row.stored_at, 0, row.visible_at),
                deaths=deaths,
            )
        )
        self._first_row, self._rows = None, 0

    def _size(self, ref: MessageRef, row: FailedMessage) -> int:
        """Return the bytes that a failed message counts for: its whole batch, unless it
        goes out with another one of it.
        """
        before = self._first_row
        together = row.position in self._single_row_batches or (
            before is not None and self._is_next(*before, ref, row)
        )
        return 0 if together else row.length

    def partitions(self) -> None:
        """Choose messages of the member's partitions, in a rotating order.

        The rotation prevents that one partition is always last.
        """
        if self._deaths:
            return
        partitions = list(self._member.partitions)
        turn = self._group.next_lease % len(partitions) if partitions else 0
        for after, tp in zip(
            range(len(partitions) - 1, -1, -1), partitions[turn:] + partitions[:turn], strict=True
        ):
            if self._messages <= 0:
                return
            self._rest = self._bytes - max(MIN_PARTITION_BYTES, self._bytes // (after + 1))
            if not self._is_stopped(tp) and not (
                self._group.ordered and held_by_others(self._group, self._member, tp)
            ):
                self._partition(tp, self._group.positions[tp])

    def _partition(self, tp: TopicPartition, position: GroupPosition) -> None:
        if (
            self._redeliveries(tp, position) and not key_fences.is_stopped(self._group, tp)
        ) or not self._group.ordered:
            self._range(CandidateSource.LIVE, tp, position.cursor, self._end(tp), UNDELIVERED)

    def _end(self, tp: TopicPartition) -> int:
        end = visibility.visible_end(self._state, *tp, self._durable)
        stop = topics.growth_limit(self._state, self._group, tp) if self._group.ordered else None
        span = self._group.settings.span
        ahead = self._group.positions[tp].floor + span if span else end
        return min(end, ahead) if stop is None else min(end, ahead, stop)

    def _redeliveries(self, tp: TopicPartition, position: GroupPosition) -> bool:
        """Choose the redeliveries of a partition; return True if all of them fit."""
        limit = self._group.max_attempts if position.redeliver else None
        complete = True
        for start, end, redelivery in position.redeliver:
            if limit is not None and redelivery.attempt > limit:
                self._range(CandidateSource.EXHAUSTED, tp, start, end, redelivery)
                complete = False  # its key may get a fence, so later ones are chosen afresh
            elif redelivery.deaths:
                complete = False
            else:
                complete &= self._range(CandidateSource.REDELIVER, tp, start, end, redelivery)
            if self._messages <= 0 or (self._group.ordered and not complete):
                return False
        return complete

    def _range(
        self,
        source: CandidateSource,
        tp: TopicPartition,
        start: int,
        end: int,
        redelivery: Redelivery,
    ) -> bool:
        """Choose the messages of [start, end); return True if all of them fit."""
        if start >= end:
            return True
        needs_keys = source is CandidateSource.EXHAUSTED or (
            self._group.ordered and tp[0] in self._group.fences
        )
        run = RunBuilder(
            source,
            tp,
            redelivery,
            needs_keys=needs_keys,
            most=0 if needs_keys else self._limits.max_run_rows,
        )
        complete = self._fill(run, tp, start, end)
        self.candidates += run.candidates()
        return complete

    def _fill(self, run: RunBuilder, tp: TopicPartition, start: int, end: int) -> bool:
        durable, left, rest, whole = self._durable, self._bytes, self._rest, self._limits.max_bytes
        # Exhausted messages become dead letters, whatever tags the member wants.
        tags = 0 if run.source is CandidateSource.EXHAUSTED else self._limits.tag_filter
        for base, entry in topics.scan_entries(self._state, tp, start):
            if base >= end:
                return True
            _position, length, count, _stored_at, tag_filter, visible_at = entry
            no_room = left <= rest or self._messages <= 0 or length > left < whole
            if visible_at > durable or no_room:
                return False
            first = start - base if base < start else 0
            rows = (count if base + count <= end else end - base) - first
            chosen = min(rows, self._messages)
            self._messages -= chosen
            self._bytes = left = left - length
            wanted = length > 0 and (not tags or bool(tag_filter & tags))
            run.add(base, first, chosen, entry, wanted=wanted)
            if chosen < rows:
                return False
        return True
