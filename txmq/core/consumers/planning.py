"""What a member could get now. Reading is the engine's: this names batches and rows,
`delivery` leases what was read.

The order within a partition: what has come back, in the order of its offsets, then what
was never delivered. In an ordered group nothing is passed over, and a partition that
came from another member waits until nothing of it is out any more. Messages whose
consumers were lost with them go out by themselves (`suspects`), before all else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import circuit_breaker, failed_messages, key_fences
from txmq.core.consumers import poison as suspects
from txmq.core.consumers.authorization import current
from txmq.core.consumers.candidates import WORTH_SLICING, Candidate, Runs, Source, Wish
from txmq.core.state import visibility
from txmq.core.state.positions import FIRST
from txmq.core.state.state import Rejected, State
from txmq.core.topics import growth, topics
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Collection

    from txmq.core.consumers.failed_messages import Moved
    from txmq.core.state.consumer_groups import Group, Member, Spot, Spotted
    from txmq.core.state.positions import Back, Position

SUSPECTS_PASSED = (
    64  # failed messages of a partition that wait for their lot, until the next one waits with them
)

ROWS_AT_ONCE = 500  # failed messages that are due, for one fetch: a record and a chunk each

SHARE_BYTES = (
    256 << 10
)  # that a partition gets of a fetch though others wait: in the log they stand side by side


class Plan(NamedTuple):
    """Candidates; `steps`: a delivery is worth asking for even without any, because
    fences can go on.
    """

    candidates: tuple[Candidate, ...] = ()
    steps: bool = False


def plan(  # all that a fetch says
    state: State,
    group: str,
    member: str,
    generation: int,
    durable: int,
    wish: Wish,
    now: int,
    without: Collection[Spot] = (),
) -> Plan | Rejected:
    """What to read for one fetch: batches of at most so many bytes in all (or one),
    seen up to log position `durable`; nothing of partitions `without` which it has to
    do.
    """
    found = current(state, group, member, generation)
    if isinstance(found, Rejected):
        return found
    if found[0].paused:
        return Plan()
    steps = steps_possible(state, found[0], now)
    if suspects.has_one_alone(*found) or not circuit_breaker.may_deliver(found[0], 1, now):
        return Plan(steps=steps)
    guarded = found[0].flood is not None
    planner = _Planner(state, *found, durable, now, wish._replace(messages=1) if guarded else wish)
    planner.without = without
    if planner.suspects():
        return Plan(tuple(planner.candidates), steps)
    if guarded:
        planner.partitions()  # first what did not fail yet: it tells more
    planner.moved_rows(min(max(1, wish.messages // 2), ROWS_AT_ONCE))
    if not guarded:
        planner.partitions()
    return Plan(tuple(planner.candidates), steps)


def steps_possible(state: State, group: Group, now: int) -> bool:
    """Whether a waiting fence can go on."""
    return (
        bool(group.waiting)
        and not group.paused
        and any(key_fences.advance_waiting(state, group, now))
    )


def blocked(group: Group, member: Member, spot: Spot) -> bool:
    """Whether somebody else still has messages of this partition: in an ordered group
    they could be of any key.
    """
    position = group.positions[spot]
    first = position.leased.first()
    if first is not None and group.leases[first.value.lease].member != member.name:
        return True
    return any(
        piece.value.member != member.name or piece.value.generation < member.since
        for piece in position.reserved
    )


def may_take_row(group: Group, member: Member, spot: Spot) -> bool:
    """In an ordered group moved messages go where their partition goes, else to whoever
    asks.
    """
    if not group.ordered:
        return spot[0] in member.topics
    return spot in member.partitions and not blocked(group, member, spot)


def exhausted(group: Group, row: Moved) -> bool:
    """Whether a moved message has had all its deliveries, the last of them without an
    answer (a nack looks before).
    """
    return group.limit is not None and row.attempt >= group.limit


class _Planner:
    """Collects candidates until the fetch is full."""

    def __init__(
        self, state: State, group: Group, member: Member, durable: int, now: int, wish: Wish
    ) -> None:
        self._state, self._group, self._member = state, group, member
        self._durable, self._now, self._wish = durable, now, wish
        self._messages, self._bytes = wish.messages, wish.size
        self._rest = 0  # bytes that are left to the partitions that follow
        self._deaths = 0  # of what is planned: its lot's
        self._sliced = set[int]()  # large batches, by position, of which single rows go out
        self.without: Collection[Spot] = ()
        self.candidates: list[Candidate] = []

    def _full(self, length: int = 0) -> bool:
        return self._messages <= 0 or (self._bytes < self._wish.size and length > self._bytes)

    def suspects(self) -> bool:
        """What may have killed its consumer and has come back; True = nothing else goes
        out now.
        """
        group = self._group
        if not (group.suspects or group.loners):
            return False
        if self._alone():
            return True
        for spot in filter(self._goes_out, group.suspects):
            for start, end, back in suspects.in_turn(group, spot):
                if back.deaths and self._joins(back.deaths):
                    self._range(Source.REDELIVER, spot, start, end, back)
        return bool(self.candidates)

    def _alone(self) -> bool:
        """One that goes out alone, as soon as the member has nothing else; whether one
        waits.
        """
        group = self._group
        ready = suspects.empty_handed(group, self._member)
        for spotted, due in group.loners.items():
            if due <= self._now and self._goes_out(spotted[:2]):
                row = failed_messages.get(self._state, group, spotted)
                assert row is not None, "it waits, so it is there"
                if not exhausted(group, row):
                    if ready:
                        self._add_row(spotted, row)
                    return True
        for spot in filter(self._goes_out, group.suspects):
            for start, _end, back in suspects.in_turn(group, spot):
                if back.deaths >= suspects.ALONE:
                    if ready:
                        self._range(Source.REDELIVER, spot, start, start + 1, back)
                    return True
        return False

    def _goes_out(self, spot: Spot) -> bool:
        """Whether what has come back to a partition may go to this member, because it
        is its own.
        """
        mine = spot in self._member.partitions and not self._stands(spot)
        return mine and not (self._group.ordered and blocked(self._group, self._member, spot))

    def _joins(self, deaths: int) -> bool:
        """Whether messages of so many deaths may go out with what is planned: what is
        planned first decides.
        """
        if self.candidates or not deaths:
            return deaths == self._deaths
        if deaths >= suspects.ALONE or suspects.lot_of(self._group, self._member) is not None:
            return False
        self._deaths, self._messages = deaths, min(self._messages, suspects.at_once(deaths))
        return True

    def _stands(self, spot: Spot) -> bool:
        topic = self._state.topics_by_id[spot[0]]
        closed = topic.deleted or not topic.settings.readable
        unwanted = spot in self.without or spot[0] in self._wish.without
        return closed or unwanted or self._group.stands(spot)

    def moved_rows(self, most: int) -> None:
        """Retries that are due."""
        for spot in list(self._group.retrying):
            if self._stands(spot) or not may_take_row(self._group, self._member, spot):
                continue
            passed = 0
            for spotted, row in failed_messages.due_rows(self._state, self._group, spot, self._now):
                if most <= 0 or self._full(self._size(row)):
                    return
                if self._joins(row.deaths if row.deaths and not exhausted(self._group, row) else 0):
                    most -= 1
                    self._add_row(spotted, row)
                elif (passed := passed + 1) > SUSPECTS_PASSED:
                    break

    def _add_row(self, spotted: Spotted, row: Moved) -> None:
        batch = t.Entry(row.position, row.length, 0, row.stored_at, 0, row.visible_at)
        topic_id, partition, offset = spotted
        place = (topic_id, partition, offset - row.row, row.row, 1)
        deaths = 0 if row.deaths and exhausted(self._group, row) else row.deaths
        self._messages -= 1
        self._bytes -= self._size(row)
        if row.length > WORTH_SLICING:
            self._sliced.add(row.position)
        self.candidates.append(
            Candidate(
                Source.MOVED, *place, row.attempt + 1, needs_keys=False, batch=batch, deaths=deaths
            )
        )

    def _size(self, row: Moved) -> int:
        """What counts for it: its whole batch, which is read; once where rows of it go
        out, which are less in all.
        """
        return 0 if row.position in self._sliced else row.length

    def partitions(self) -> None:
        """The member's partitions, beginning with another one each time, so that none
        is always last.
        """
        if self._deaths:
            return
        spots = list(self._member.partitions)
        turn = self._group.next_lease % len(spots) if spots else 0
        for after, spot in zip(
            range(len(spots) - 1, -1, -1), spots[turn:] + spots[:turn], strict=True
        ):
            if self._messages <= 0:
                return
            self._rest = self._bytes - max(SHARE_BYTES, self._bytes // (after + 1))
            if not self._stands(spot) and not (
                self._group.ordered and blocked(self._group, self._member, spot)
            ):
                self._partition(spot, self._group.positions[spot])

    def _partition(self, spot: Spot, position: Position) -> None:
        if (
            self._given_back(spot, position) and not key_fences.stopped(self._group, spot)
        ) or not self._group.ordered:
            self._range(Source.LIVE, spot, position.cursor, self._end(spot), FIRST)

    def _end(self, spot: Spot) -> int:
        end = visibility.end(self._state, *spot, self._durable)
        stop = growth.limit(self._state, self._group, spot) if self._group.ordered else None
        span = self._group.settings.span
        ahead = self._group.positions[spot].floor + span if span else end
        return min(end, ahead) if stop is None else min(end, ahead, stop)

    def _given_back(self, spot: Spot, position: Position) -> bool:
        """What has come back; False = not all of it is in the plan."""
        limit = self._group.limit if position.redeliver else None
        complete = True
        for start, end, back in position.redeliver:
            if limit is not None and back.attempt > limit:
                self._range(Source.EXHAUSTED, spot, start, end, back)
                complete = False  # its key may get a fence: what follows is looked at afresh
            elif back.deaths:
                complete = False
            else:
                complete &= self._range(Source.REDELIVER, spot, start, end, back)
            if self._messages <= 0 or (self._group.ordered and not complete):
                return False
        return complete

    def _range(self, source: Source, spot: Spot, start: int, end: int, back: Back) -> bool:
        """Candidates for the messages of [start, end); False = they did not all fit."""
        if start >= end:
            return True
        needs_keys = source is Source.EXHAUSTED or (
            self._group.ordered and spot[0] in self._group.fences
        )
        run = Runs(
            source, spot, back, needs_keys=needs_keys, most=0 if needs_keys else self._wish.run
        )
        complete = self._fill(run, spot, start, end)
        self.candidates += run.candidates()
        return complete

    def _fill(self, run: Runs, spot: Spot, start: int, end: int) -> bool:
        durable, left, rest, whole = self._durable, self._bytes, self._rest, self._wish.size
        tags = (
            0 if run.source is Source.EXHAUSTED else self._wish.tags
        )  # these go to the dead letters whoever asks
        for base, entry in topics.entries_from(self._state, spot, start):
            if base >= end:
                return True
            _position, length, count, _stored_at, tag_filter, visible_at = entry
            no_room = left <= rest or self._messages <= 0 or length > left < whole
            if visible_at > durable or no_room:
                return False
            first = start - base if base < start else 0
            rows = (count if base + count <= end else end - base) - first
            taken = min(rows, self._messages)
            self._messages -= taken
            self._bytes = left = left - length
            run.add(base, first, taken, entry, wanted=not tags or bool(tag_filter & tags))
            if taken < rows:
                return False
        return True
