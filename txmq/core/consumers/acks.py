"""Acks, and messages given back un-started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import changes, circuit_breaker, failed_messages, key_fences, leases
from txmq.core.consumers.authorization import Claim, active
from txmq.core.consumers.changes import Changes
from txmq.core.consumers.commands import Ack, Return, TopicRange
from txmq.core.events.consumers import Acked, Range, Returned
from txmq.core.state.ranges import gaps
from txmq.core.state.state import Outcome, Rejected, State

if TYPE_CHECKING:
    from txmq.core.events.base import Place
    from txmq.core.state.consumer_groups import Group, Spotted

MOST_ROWS = 1_000  # looked up for one stale range, which may be as wide as a client likes


class AckReply(NamedTuple):
    """How many messages were settled or given back; `stale` were not leased to the
    member (any more).

    `refused` are those stale ones that the group is not done with either, so that they
    come again; not for Return.
    """

    messages: int
    stale: tuple[TopicRange, ...]
    refused: tuple[TopicRange, ...] = ()


class _Claimed(NamedTuple):
    group: Group
    ranges: tuple[Range, ...]
    rows: tuple[Spotted, ...]
    reply: AckReply


def _claim(state: State, command: Ack | Return) -> _Claimed | Rejected:
    found = active(state, command.group, command.member)
    if isinstance(found, Rejected):
        return found
    group, _member = found
    claim = Claim(group, command.member, command.generation)
    for asked in command.ranges:
        claim.add(state, *asked)
    ranges = claim.ranges
    messages = sum(end - start for _topic_id, _partition, start, end in ranges) + len(claim.rows)
    return _Claimed(group, ranges, tuple(claim.rows), AckReply(messages, tuple(claim.stale)))


def decide_ack(state: State, command: Ack, now: int) -> Outcome | Rejected:
    found = _claim(state, command)
    if isinstance(found, Rejected):
        return found
    group, ranges, rows, reply = found
    if reply.stale:
        reply = reply._replace(refused=tuple(_not_done(state, group, reply.stale)))
    if not reply.messages:
        return Outcome(reply=reply)
    made = Changes(state, group, now)
    for spotted in rows:
        row = failed_messages.get(state, group, spotted)
        assert row is not None, "leased, so it is there"
        made.done(spotted, row.key_hash)
    event = Acked(group.group_id, ranges, rows, made.moves, made.fences)
    return Outcome((event,), reply)


def _not_done(state: State, group: Group, stale: Iterable[TopicRange]) -> Iterator[TopicRange]:
    """What of these ranges was not acked before: an ack may come twice, after a lost
    connection.
    """
    for topic, partition, start, end in stale:
        found = state.topics.get(topic)
        spot = (found.topic_id if found is not None else 0, partition)
        position = group.positions.get(spot)
        if position is None:
            yield topic, partition, start, end
            continue
        low = max(start, position.floor)
        for open_range in gaps(position.settled.overlap(low, end), low, end) if low < end else ():
            yield topic, partition, *open_range
        for spotted, _row in failed_messages.between(state, group, spot, start, end, MOST_ROWS):
            yield topic, partition, spotted[2], spotted[2] + 1


def apply_acked(state: State, event: Acked, place: Place) -> None:
    group = state.consumers.by_id[event.group_id]
    changes.apply(state, group, event.moves, event.fences, place.stored_at)
    for spotted in event.rows:
        settle_row(state, group, spotted)
    for acked in event.ranges:
        settle(state, group, acked)


def settle(state: State, group: Group, acked: Range) -> None:
    """Apply: leased messages are done with."""
    topic_id, partition, start, end = acked
    position = group.positions[topic_id, partition]
    for piece in leases.release(state, group, (topic_id, partition), start, end):
        position.settle(piece.start, piece.end)
        circuit_breaker.note_acks(group, piece.value.lease, piece.end - piece.start)


def settle_row(state: State, group: Group, spotted: Spotted) -> None:
    """Apply: a moved message is done with."""
    row = failed_messages.drop(state, group, spotted)
    if row is not None:
        circuit_breaker.note_acks(group, group.held_rows.get(spotted, 0), 1)
        leases.release_row(state, group, spotted)
        key_fences.head_done(state, group, spotted, row.key_hash)


def decide_return(state: State, command: Return, now: int) -> Outcome | Rejected:
    found = _claim(state, command)
    if isinstance(found, Rejected):
        return found
    group, ranges, rows, reply = found
    due = tuple((*spotted, now) for spotted in rows)
    return Outcome((Returned(group.group_id, ranges, due),) if reply.messages else (), reply)


def apply_returned(state: State, event: Returned, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    leases.put_back(state, group, event.rows)
    for topic_id, partition, start, end in event.ranges:
        leases.give_back(state, group, (topic_id, partition), start, end)


DECIDERS: dict[type, Any] = {Ack: decide_ack, Return: decide_return}
APPLIERS: dict[type, Any] = {Acked: apply_acked, Returned: apply_returned}
