"""Leases: what a fetch took, until it is acked, given back, or its time is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import failed_messages, poison
from txmq.core.consumers.authorization import active
from txmq.core.consumers.commands import ExpireLeases, ExtendLeases
from txmq.core.consumers.group_settings import LEASES
from txmq.core.events.consumers import Due, LeasesExpired, LeasesExtended
from txmq.core.state.consumer_groups import BLOCK, Group, Lease, Spot, Spotted
from txmq.core.state.positions import Back
from txmq.core.state.state import Outcome, Rejected, State
from txmq.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.events.base import Place
    from txmq.core.state.positions import Grant
    from txmq.core.state.ranges import Piece

AT_ONCE = 1_000  # rows and leases that one command ends, so that no apply takes long


class ExtendReply(NamedTuple):
    """Leases that end at `deadline` now, and those that were over already."""

    extended: tuple[int, ...]
    over: tuple[int, ...]
    deadline: int


class ExpireReply(NamedTuple):
    """How many leases ran out; `more`: call again at once."""

    expired: int
    more: bool


def back_off(group: Group, attempt: int, now: int, chance: float = 0.5) -> int | None:
    """When the message is delivered again after the failure of delivery `attempt`; None
    = it is exhausted.
    """
    policy = group.settings.policy
    if group.settings.on_exhausted == BLOCK:
        attempt = min(attempt, policy.retries)
    delay = policy.delay(attempt, chance)
    return None if delay is None else now + delay


def rows_due(
    state: State, group: Group, numbers: Iterable[int], now: int, *, died: bool
) -> tuple[Due, ...]:
    """The moved rows of these leases, and when each is due again: at once where this
    delivery does not count.
    """
    found = (
        (spotted, died and group.leases[number].single)
        for number in numbers
        for spotted in group.leases[number].rows
    )
    return tuple(
        (*one, _row_due(state, group, one, now) if counts else now) for one, counts in sorted(found)
    )


def _row_due(state: State, group: Group, spotted: Spotted, now: int) -> int:
    row = failed_messages.get(state, group, spotted)
    assert row is not None, "leased, so it is there"
    due = back_off(group, row.attempt, now)
    return now if due is None else due


def of_member(group: Group, member: str) -> tuple[int, ...]:
    """Numbers of a member's leases."""
    return tuple(number for number, lease in group.leases.items() if lease.member == member)


def grant(state: State, group: Group, number: int, lease: Lease) -> None:
    """Apply: a lease begins; what it covers is entered by `cover` and `cover_row`."""
    group.leases[number] = lease
    group.next_lease = number + 1
    if lease.deaths:
        group.lots[lease.member] = number
    state.consumers.deadlines.add((lease.deadline, group.group_id, number))
    state.consumers.dirty_groups.add(group.group_id)


def cover(state: State, group: Group, spot: Spot, piece: Piece[Grant]) -> None:
    """Apply: the lease holds a range that was waiting to be delivered."""
    position = state.consumers.touch(group, spot)
    position.take(piece.start, piece.end)
    position.leased.put(*piece)
    lease = group.leases[piece.value.lease]
    lease.left += piece.end - piece.start
    lease.spots.add(spot)


def cover_row(group: Group, number: int, spotted: Spotted) -> None:
    """Apply: the lease holds a moved row."""
    group.held_rows[spotted] = number
    group.leases[number].rows.add(spotted)
    group.leases[number].left += 1


def holder(group: Group, spotted: Spotted) -> int:
    """The number of the lease that a message is under, 0 = none."""
    if spotted in group.held_rows:
        return group.held_rows[spotted]
    held = group.positions[spotted[:2]].leased.overlap(spotted[2], spotted[2] + 1)
    return held[0].value.lease if held else 0


def release(state: State, group: Group, spot: Spot, start: int, end: int) -> list[Piece[Grant]]:
    """Apply: whatever is leased within [start, end) no longer is; a lease with nothing
    left ends.
    """
    pieces = state.consumers.touch(group, spot).leased.cut(start, end)
    for piece in pieces:
        _shrink(state, group, piece.value.lease, piece.end - piece.start)
    return pieces


def release_row(state: State, group: Group, spotted: Spotted) -> None:
    """Apply: a moved row is no longer leased."""
    number = group.held_rows.pop(spotted, None)
    if number is not None:
        group.leases[number].rows.discard(spotted)
        _shrink(state, group, number, 1)


def _shrink(state: State, group: Group, number: int, messages: int) -> None:
    lease = group.leases[number]
    lease.left -= messages
    if not lease.left:
        del group.leases[number]
        if lease.deaths:
            del group.lots[lease.member]
        state.consumers.deadlines.remove((lease.deadline, group.group_id, number))
    state.consumers.dirty_groups.add(group.group_id)


def end(state: State, group: Group, number: int, *, died: bool = False) -> None:
    """Apply: what is left of the lease's ranges is to be delivered again. `died`: its
    consumer may have died of it.
    """
    for spot in sorted(group.leases[number].spots):
        for piece in list(group.positions[spot].leased):
            if piece.value.lease == number:
                _back(state, group, spot, piece, died=died)
        poison.note(group, spot)


def give_back(state: State, group: Group, spot: Spot, start: int, stop: int) -> None:
    """Apply: leased messages have come back as if they had never gone out."""
    for piece in group.positions[spot].leased.overlap(start, stop):
        _back(state, group, spot, piece, died=False)
    poison.note(group, spot)


def _back(state: State, group: Group, spot: Spot, piece: Piece[Grant], *, died: bool) -> None:
    (start, stop, held), lease = piece, group.leases[piece.value.lease]
    release(state, group, spot, start, stop)
    back = Back(held.attempt + (died and lease.single), lease.deaths + died)
    group.positions[spot].give_back(start, stop, back)


def put_back(state: State, group: Group, rows: Iterable[Due], *, died: bool = False) -> None:
    """Apply: moved rows wait for their next delivery; otherwise as `end`."""
    for topic_id, partition, offset, due in rows:
        spotted = (topic_id, partition, offset)
        counts = died and group.leases[group.held_rows[spotted]].single
        row = failed_messages.drop(state, group, spotted)
        assert row is not None, "leased, so it is there"
        release_row(state, group, spotted)
        row = row._replace(due=due, attempt=row.attempt - (not counts), deaths=row.deaths + died)
        failed_messages.put(state, group, spotted, row)


def decide_expire(state: State, command: ExpireLeases, now: int) -> Outcome:
    del command
    over: dict[int, list[int]] = {}
    room = AT_ONCE
    more = False
    for deadline, group_id, number in state.consumers.deadlines:
        if deadline > now:
            break
        if room <= 0:
            more = True
            break
        over.setdefault(group_id, []).append(number)
        room -= 1 + len(state.consumers.by_id[group_id].leases[number].rows)
    events = []
    for group_id, numbers in over.items():
        due = rows_due(state, state.consumers.by_id[group_id], numbers, now, died=True)
        events.append(LeasesExpired(group_id, tuple(numbers), due))
    return Outcome(tuple(events), ExpireReply(sum(map(len, over.values())), more))


def apply_expired(state: State, event: LeasesExpired, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    put_back(state, group, event.rows, died=True)
    for number in event.leases:
        if number in group.leases:
            end(state, group, number, died=True)


def decide_extend(state: State, command: ExtendLeases, now: int) -> Outcome | Rejected:
    found = active(state, command.group, command.member)
    if isinstance(found, Rejected):
        return found
    group, _member = found
    length = group.settings.lease_us if command.lease_us is None else command.lease_us
    if not LEASES[0] <= length <= LEASES[1]:
        return Rejected(
            BadRequest,
            f"a lease of {length} µs is out of range",
            f"{LEASES[0]} to {LEASES[1]} are possible",
        )
    mine = of_member(group, command.member)
    wanted = command.leases or mine
    extended = tuple(
        n for n in wanted if n in mine and group.leases[n].generation <= command.generation
    )
    reply = ExtendReply(extended, tuple(n for n in wanted if n not in extended), now + length)
    events = (LeasesExtended(group.group_id, extended, now + length),) if extended else ()
    return Outcome(events, reply)


def apply_extended(state: State, event: LeasesExtended, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    for number in event.leases:
        lease = group.leases[number]
        state.consumers.deadlines.remove((lease.deadline, group.group_id, number))
        lease.deadline = event.deadline
        state.consumers.deadlines.add((lease.deadline, group.group_id, number))
    state.consumers.dirty_groups.add(group.group_id)


DECIDERS: dict[type, Any] = {ExpireLeases: decide_expire, ExtendLeases: decide_extend}
APPLIERS: dict[type, Any] = {LeasesExpired: apply_expired, LeasesExtended: apply_extended}
