"""Deliveries: what was planned and read is leased, after a second look, for the state
may have gone on meanwhile.

Each message is READY (live, given back, or a retry that is due), then IN FLIGHT
(leased), then settled or moved; the look-through for fences happens on the way out, so
that a message of a fenced key is parked and never leased. One fetch is one event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import (
    changes,
    circuit_breaker,
    failed_messages,
    key_fences,
    leases,
    planning,
    poison,
)
from txmq.core.consumers.authorization import current
from txmq.core.consumers.candidates import Candidate, Source
from txmq.core.consumers.changes import Changes
from txmq.core.consumers.commands import Deliver, Pick
from txmq.core.consumers.failed_messages import Kind
from txmq.core.events.consumers import Attempted, Delivered, Range
from txmq.core.state.consumer_groups import Group, Lease, Member, Spot, Spotted
from txmq.core.state.positions import Back, Grant
from txmq.core.state.ranges import Piece
from txmq.core.state.state import Outcome, Rejected, State

if TYPE_CHECKING:
    from txmq.core.events.base import Place
    from txmq.core.state.positions import Position


class Delivery(NamedTuple):
    """Rows that go out: offsets start <= offset < end of the batch of this pick."""

    pick: int
    start: int
    end: int
    attempt: int


class DeliverReply(NamedTuple):
    """What one fetch gets. `again`: fences moved on, so plan once more before waiting.
    Lease 0 = nothing was leased.
    """

    lease: int
    generation: int
    deadline: int
    deliveries: tuple[Delivery, ...]
    again: bool


def decide_deliver(state: State, command: Deliver, now: int) -> Outcome | Rejected:
    found = current(state, command.group, command.member, command.generation)
    if isinstance(found, Rejected):
        return found
    group, member = found
    draft = _Draft(state, group, member, now)
    if not group.paused:
        draft.made.advance()
    free = not group.paused and not poison.has_one_alone(group, member)
    if free and circuit_breaker.may_deliver(
        group, sum(pick.candidate.rows for pick in command.picks), now
    ):
        for number, pick in enumerate(command.picks):
            draft.add(number, pick)
    return draft.outcome()


class _Draft:
    """The event of one fetch as it grows, pick by pick."""

    def __init__(self, state: State, group: Group, member: Member, now: int) -> None:
        self._state, self._group, self._member, self._now = state, group, member, now
        self.made = Changes(state, group, now, leasing=True)
        self._ranges: list[Attempted] = []
        self._rows: list[Spotted] = []
        self._deliveries: list[Delivery] = []
        self._stops: list[Range] = []
        self._expired: list[Range] = []
        self._expired_rows: list[Spotted] = []
        self._unwanted: list[Range] = []
        self._cursors: dict[
            Spot, int
        ] = {}  # where the live part of a partition begins after the picks so far
        self._passed: dict[Spot, int] = {}  # below this, what had come back is dealt with
        self._deaths = 0  # of each message that goes out

    def add(self, number: int, pick: Pick) -> None:
        """Take a pick in, if it still stands."""
        spot = (pick.candidate.topic_id, pick.candidate.partition)
        if self._group.stands(spot):
            return
        if pick.candidate.source is Source.MOVED:
            self._moved_row(number, pick, spot)
        elif self._stands(pick, spot, self._group.positions[spot]):
            self._range(number, pick, spot)

    def _stands(self, pick: Pick, spot: Spot, position: Position) -> bool:
        candidate = pick.candidate
        group = self._group
        if spot not in self._member.partitions:
            return False
        keyless = pick.keys is None and not pick.unwanted
        if keyless and (candidate.needs_keys or (group.ordered and self.made.any_fence(spot[0]))):
            return False
        if group.ordered and planning.blocked(group, self._member, spot):
            return False
        if candidate.source is Source.LIVE:
            return self._next_live(candidate.start, spot, position)
        return self._next_given_back(candidate, spot, position)

    def _next_live(self, start: int, spot: Spot, position: Position) -> bool:
        if self._group.ordered and position.redeliver.first(self._passed.get(spot, 0)) is not None:
            return False
        return not self._deaths and start == self._cursors.get(spot, position.cursor)

    def _next_given_back(self, candidate: Candidate, spot: Spot, position: Position) -> bool:
        start, end = candidate.start, candidate.start + candidate.rows
        passed = self._passed.get(spot, 0)
        piece = position.redeliver.first(passed if self._group.ordered else start)
        value = Back(candidate.attempt, candidate.deaths)
        whole = (
            piece is not None and piece.start == start and piece.end >= end and piece.value == value
        )
        limit = self._group.limit
        over = limit is not None and candidate.attempt > limit
        if not whole or start < passed or over is not (candidate.source is Source.EXHAUSTED):
            return False
        return over or self._joins(candidate.deaths)

    def _joins(self, deaths: int) -> bool:
        """Whether messages of so many deaths may go out with those before them; the
        first ones decide.
        """
        alone = deaths >= poison.ALONE
        if self._deliveries or not deaths:
            return deaths == self._deaths and not alone
        if poison.lot_of(self._group, self._member) is not None:
            return False
        if alone and not poison.empty_handed(self._group, self._member):
            return False
        self._deaths = deaths
        return True

    def _range(self, number: int, pick: Pick, spot: Spot) -> None:
        candidate = pick.candidate
        start, end = candidate.start, candidate.start + candidate.rows
        if candidate.source is Source.LIVE:
            self._cursors[spot] = end
        else:
            self._passed[spot] = end
        if pick.unwanted:
            self._unwanted.append((*spot, start, end))
            return
        if pick.keys is None and not pick.expired:
            self._lease(number, spot, start, end, candidate.attempt)
            return
        free = start  # the first offset of a run that goes out
        for offset in range(start, end):
            if offset in pick.expired:
                self._lease(number, spot, free, offset, candidate.attempt)
                free = offset + 1
                self._expired.append((*spot, offset, free))
                continue
            key_hash = None if pick.keys is None else pick.keys[offset - start]
            fenced = self.made.fenced((*spot, offset), key_hash)
            if fenced and candidate.source is Source.LIVE and self.made.full(spot[0], key_hash):
                self._stop(spot, offset, key_hash)
                end = offset
                break
            if fenced or candidate.source is Source.EXHAUSTED:
                self._lease(number, spot, free, offset, candidate.attempt)
                free = offset + 1
                self._move((*spot, offset), candidate, key_hash)
        self._lease(number, spot, free, end, candidate.attempt)

    def _stop(self, spot: Spot, offset: int, key_hash: int | None) -> None:
        """No further: the fence of this key is full."""
        assert key_hash is not None, "fenced, so it has a key"
        self._cursors[spot] = offset
        self._stops.append((*spot, offset, key_hash))

    def _move(self, spotted: Spotted, candidate: Candidate, key_hash: int | None) -> None:
        """Behind its key's fence or, if it is exhausted and no fence stands before it,
        to the dead letters.
        """
        place, entry = spotted[2] - candidate.base_offset, candidate.batch
        row = failed_messages.row_of(
            entry, place, key_hash, attempt=candidate.attempt - 1, deaths=candidate.deaths
        )
        if candidate.source is Source.EXHAUSTED:
            self.made.bury(spotted, poison.buried(row._replace(first_failed_at=self._now)))
        else:
            self.made.park(spotted, row)

    def _lease(self, number: int, spot: Spot, start: int, end: int, attempt: int) -> None:
        if start == end:
            return
        self._deliveries.append(Delivery(number, start, end, attempt))
        if (
            self._ranges
            and self._ranges[-1][:2] == spot
            and self._ranges[-1][3:] == (start, attempt)
        ):
            start = self._ranges.pop()[2]
        self._ranges.append((*spot, start, end, attempt))

    def _moved_row(self, number: int, pick: Pick, spot: Spot) -> None:
        spotted = (*spot, pick.candidate.start)
        group = self._group
        row = failed_messages.get(self._state, group, spotted)
        if (
            row is None
            or row.kind != Kind.RETRY
            or row.token
            or row.due > self._now
            or spotted in group.held_rows
        ):
            return
        taken = (
            spotted in self._rows
            or spotted in self._expired_rows
            or self.made.fenced(spotted, row.key_hash)
        )
        if taken or not planning.may_take_row(group, self._member, spot):
            return
        if pick.expired:
            self._expired_rows.append(spotted)
            self.made.done(spotted, row.key_hash)
        elif planning.exhausted(group, row):
            self.made.bury(spotted, poison.buried(row))
        elif row.deaths == pick.candidate.deaths and self._joins(row.deaths):
            self._rows.append(spotted)
            self._deliveries.append(Delivery(number, spotted[2], spotted[2] + 1, row.attempt + 1))

    def outcome(self) -> Outcome:
        """The event and the reply. First deliveries go out early: lost with the power,
        they are simply made again.
        """
        group, some = self._group, bool(self._deliveries)
        lease = group.next_lease if some else 0
        deadline = self._now + group.settings.lease_us if some else 0
        passed = bool(self.made or self._expired or self._expired_rows or self._unwanted)
        reply = DeliverReply(
            lease, group.generation, deadline, tuple(self._deliveries), passed and not some
        )
        if not (some or passed or self._stops):
            return Outcome(reply=reply)
        event = Delivered(
            group.group_id, lease, self._member.name, deadline, self._deaths >= poison.ALONE, tuple(self._ranges),
            tuple(self._rows), self.made.moves, self.made.fences, tuple(self._stops), tuple(self._expired),
            tuple(self._expired_rows), tuple(self._unwanted), self._deaths,
        )  # fmt: skip
        first = not self._deaths and all(delivery.attempt == 1 for delivery in self._deliveries)
        first = first and not (self._rows or self._expired_rows)
        return Outcome((event,), reply, early=first and not (self.made or self._stops))


def apply_delivered(state: State, event: Delivered, place: Place) -> None:
    group = state.consumers.by_id[event.group_id]
    changes.apply(state, group, event.moves, event.fences, place.stored_at)
    for topic_id, partition, offset, key_hash in event.stops:
        group.stops[topic_id, partition] = (offset, key_hash)
        state.consumers.dirty_groups.add(group.group_id)
    _apply_passed(state, group, event)
    if not event.lease:
        return
    lease = Lease(
        event.member,
        group.generation,
        place.stored_at,
        event.deadline,
        event.single,
        deaths=event.deaths,
    )
    leases.grant(state, group, event.lease, lease)
    circuit_breaker.probing(group, event.lease, place.stored_at)
    for topic_id, partition, start, end, attempt in event.ranges:
        leases.cover(
            state, group, (topic_id, partition), Piece(start, end, Grant(event.lease, attempt))
        )
    for spotted in event.rows:
        row = failed_messages.drop(state, group, spotted)
        assert row is not None, "picked, so it is there"
        leases.cover_row(group, event.lease, spotted)
        failed_messages.put(
            state, group, spotted, row._replace(attempt=row.attempt + 1, consumer=event.member)
        )
    if event.deaths:
        for spot in lease.spots:
            poison.note(group, spot)


def _apply_passed(state: State, group: Group, event: Delivered) -> None:
    for topic_id, partition, start, end in event.expired + event.unwanted:
        position = state.consumers.touch(group, (topic_id, partition))
        position.take(start, end)
        position.settle(start, end)
    group.expired += sum(end - start for _topic_id, _partition, start, end in event.expired)
    for spotted in event.expired_rows:
        row = failed_messages.drop(state, group, spotted)
        assert row is not None, "picked, so it is there"
        key_fences.head_done(state, group, spotted, row.key_hash)
        group.expired += 1
    if event.expired or event.expired_rows:
        state.consumers.dirty_groups.add(group.group_id)


DECIDERS: dict[type, Any] = {Deliver: decide_deliver}
APPLIERS: dict[type, Any] = {Delivered: apply_delivered}
