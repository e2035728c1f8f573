"""Leases: messages delivered to a member until it settles or returns them, or time is
up.

A lease covers what one fetch delivered: ranges of partitions, and rows of failed
messages that were due again. It ends with its last message. Messages of an expired
lease, and of a member that is gone, are redelivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers.authorization import find_member
from txmq.core.consumers.commands import ExpireLeases, ExtendLeases
from txmq.core.consumers.group_settings import LEASE_RANGE
from txmq.core.events.consumers import DueRow, LeasesExpired, LeasesExtended
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes, failed_messages
from txmq.core.state.positions import Redelivery
from txmq.errors import BadRequest
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, Lease, MessageRef
    from txmq.core.state.positions import Grant
    from txmq.core.state.ranges import ValueRange
    from txmq.core.state.state import State

EXPIRED_PER_COMMAND = 1_000  # leases and their rows, so that each apply is short


class ExtendReply(NamedTuple):
    """Leases that end at `deadline` now, and leases that had ended before."""

    extended: tuple[int, ...]
    over: tuple[int, ...]
    deadline: int


class ExpireReply(NamedTuple):
    """Number of expired leases; `more`: others are overdue, so repeat the command."""

    expired: int
    more: bool


def rows_due(
    state: State, group: ConsumerGroup, numbers: Iterable[int], now: int, *, died: bool
) -> tuple[DueRow, ...]:
    """Return the rows of these leases, with the time when each is due again.

    `died`: the consumer was lost. Only a message that was delivered alone then waits as
    after a failure. All others are due at once, because their delivery does not count.
    """
    found = (
        (ref, died and group.leases[number].single)
        for number in numbers
        for ref in group.leases[number].rows
    )
    return tuple(
        (*ref, _row_due(state, group, ref, now) if counts else now) for ref, counts in sorted(found)
    )


def _row_due(state: State, group: ConsumerGroup, ref: MessageRef, now: int) -> int:
    row = failed_messages.get(state, group, ref)
    assert row is not None, "leased, so it is there"
    return now + (group.settings.redelivery_delay(row.attempt) or 0)


def leases_of(group: ConsumerGroup, member: str) -> tuple[int, ...]:
    """Return the numbers of a member's leases."""
    return tuple(number for number, lease in group.leases.items() if lease.member == member)


def grant(state: State, group: ConsumerGroup, number: int, lease: Lease) -> None:
    """Apply: begin a lease, to which `add_range` and `add_row` add messages."""
    group.leases[number] = lease
    group.next_lease = number + 1
    if lease.deaths:
        group.suspect_leases[lease.member] = number
    state.groups.deadlines.add((lease.deadline, group.group_id, number))
    state.groups.dirty_groups.add(group.group_id)


def add_range(
    state: State, group: ConsumerGroup, tp: TopicPartition, leased: ValueRange[Grant]
) -> None:
    """Apply: add a range that was ready for delivery to its lease."""
    position = state.groups.position_for_update(group, tp)
    position.remove_ready(leased.start, leased.end)
    position.leased.put(*leased)
    lease = group.leases[leased.value.lease]
    lease.remaining += leased.end - leased.start
    lease.partitions.add(tp)


def add_row(group: ConsumerGroup, number: int, ref: MessageRef) -> None:
    """Apply: add a failed message to a lease."""
    group.leased_rows[ref] = number
    group.leases[number].rows.add(ref)
    group.leases[number].remaining += 1


def add_rows(group: ConsumerGroup, number: int, refs: list[MessageRef]) -> None:
    """Apply: add failed messages to a lease."""
    group.leased_rows.update(dict.fromkeys(refs, number))
    group.leases[number].rows.update(refs)
    group.leases[number].remaining += len(refs)


def lease_of(group: ConsumerGroup, ref: MessageRef) -> int:
    """Return the number of the lease that covers a message, 0 = none."""
    if ref in group.leased_rows:
        return group.leased_rows[ref]
    held = group.positions[TopicPartition(ref[0], ref[1])].leased.overlap(ref[2], ref[2] + 1)
    return held[0].value.lease if held else 0


def release_range(
    state: State, group: ConsumerGroup, tp: TopicPartition, start: int, end: int
) -> list[ValueRange[Grant]]:
    """Apply: take [start, end) out of all leases; return what was leased.

    A lease ends with its last message.
    """
    released = state.groups.position_for_update(group, tp).leased.cut(start, end)
    for part in released:
        _shrink(state, group, part.value.lease, part.end - part.start)
    return released


def release_row(state: State, group: ConsumerGroup, ref: MessageRef) -> None:
    """Apply: take a failed message out of its lease, if it has one."""
    number = group.leased_rows.pop(ref, None)
    if number is not None:
        group.leases[number].rows.discard(ref)
        _shrink(state, group, number, 1)


def release_rows(state: State, group: ConsumerGroup, refs: Iterable[MessageRef]) -> dict[int, int]:
    """Apply: take failed messages out of their leases. Return the number of messages by
    the number of the lease; 0 = they had none.
    """
    released: dict[int, list[MessageRef]] = {}
    for ref in refs:
        number = group.leased_rows.pop(ref, 0)
        if number in released:
            released[number].append(ref)
        else:
            released[number] = [ref]
    for number, rows in released.items():
        if number:
            group.leases[number].rows.difference_update(rows)
            _shrink(state, group, number, len(rows))
    return {number: len(rows) for number, rows in released.items()}


def _shrink(state: State, group: ConsumerGroup, number: int, messages: int) -> None:
    lease = group.leases[number]
    lease.remaining -= messages
    if not lease.remaining:
        del group.leases[number]
        if lease.deaths:
            del group.suspect_leases[lease.member]
        state.groups.deadlines.remove((lease.deadline, group.group_id, number))
    state.groups.dirty_groups.add(group.group_id)


def end(state: State, group: ConsumerGroup, number: int, *, died: bool = False) -> None:
    """Apply: redeliver the ranges of a lease. `died`: its consumer was lost with them.

    Its rows have to be returned before, with `return_rows`.
    """
    for tp in sorted(group.leases[number].partitions):
        for leased in list(group.positions[tp].leased):
            if leased.value.lease == number:
                _redeliver(state, group, tp, leased, died=died)
        group.update_suspects(tp)


def return_range(
    state: State, group: ConsumerGroup, tp: TopicPartition, start: int, stop: int
) -> None:
    """Apply: redeliver leased messages; this delivery does not count."""
    for leased in group.positions[tp].leased.overlap(start, stop):
        _redeliver(state, group, tp, leased, died=False)
    group.update_suspects(tp)


def _redeliver(
    state: State, group: ConsumerGroup, tp: TopicPartition, leased: ValueRange[Grant], *, died: bool
) -> None:
    (start, stop, granted), lease = leased, group.leases[leased.value.lease]
    release_range(state, group, tp, start, stop)
    counts = died and lease.single
    redelivery = Redelivery(granted.attempt + counts, lease.deaths + died)
    group.positions[tp].redeliver_range(start, stop, redelivery)


def return_rows(
    state: State, group: ConsumerGroup, rows: Iterable[DueRow], *, died: bool = False
) -> None:
    """Apply: failed messages leave their leases and wait for their next delivery.

    `died`: the consumer was lost with them. The delivery counts only for a message that
    was delivered alone.
    """
    for topic_id, partition, offset, due in rows:
        ref = (topic_id, partition, offset)
        counts = died and group.leases[group.leased_rows[ref]].single
        row = failed_changes.drop(state, group, ref)
        assert row is not None, "leased, so it is there"
        release_row(state, group, ref)
        row = row._replace(due=due, attempt=row.attempt - (not counts), deaths=row.deaths + died)
        failed_changes.put(state, group, ref, row)


def decide_expire(state: State, command: ExpireLeases, now: int) -> Outcome:
    overdue: dict[int, list[int]] = {}
    room = EXPIRED_PER_COMMAND
    more = False
    for deadline, group_id, number in state.groups.deadlines:
        if deadline > command.at:
            break
        if room <= 0:
            more = True
            break
        overdue.setdefault(group_id, []).append(number)
        room -= 1 + len(state.groups.by_id[group_id].leases[number].rows)
    events = []
    for group_id, numbers in overdue.items():
        rows = rows_due(state, state.groups.by_id[group_id], numbers, now, died=True)
        events.append(LeasesExpired(group_id, tuple(numbers), rows))
    return Outcome(tuple(events), ExpireReply(sum(map(len, overdue.values())), more))


def apply_expired(state: State, event: LeasesExpired, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    return_rows(state, group, event.rows, died=True)
    for number in event.leases:
        if number in group.leases:
            end(state, group, number, died=True)


def decide_extend(state: State, command: ExtendLeases, now: int) -> Outcome:
    group, _member = find_member(state, command.group, command.member)
    length = group.settings.lease_us if command.lease_us is None else command.lease_us
    if not LEASE_RANGE[0] <= length <= LEASE_RANGE[1]:
        raise BadRequest(
            f"a lease of {length} µs is out of range",
            hint=f"choose {LEASE_RANGE[0]} to {LEASE_RANGE[1]} µs",
        )
    own = leases_of(group, command.member)
    wanted = command.leases or own
    extended = tuple(
        n for n in wanted if n in own and group.leases[n].generation <= command.generation
    )
    reply = ExtendReply(extended, tuple(n for n in wanted if n not in extended), now + length)
    events = (LeasesExtended(group.group_id, extended, now + length),) if extended else ()
    return Outcome(events, reply)


def apply_extended(state: State, event: LeasesExtended, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    for number in event.leases:
        lease = group.leases[number]
        state.groups.deadlines.remove((lease.deadline, group.group_id, number))
        lease.deadline = event.deadline
        state.groups.deadlines.add((lease.deadline, group.group_id, number))
    state.groups.dirty_groups.add(group.group_id)


DECIDERS: Deciders = {ExpireLeases: decide_expire, ExtendLeases: decide_extend}
APPLIERS: Appliers = {LeasesExpired: apply_expired, LeasesExtended: apply_extended}
