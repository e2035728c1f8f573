"""Acks, and the return of messages that a member has not started."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import circuit_breaker, key_fences, leases
from txmq.core.consumers.authorization import LeaseClaim, find_member
from txmq.core.consumers.commands import AckMessages, ReturnMessages, TopicRange
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.consumers import Acked, Range, Returned
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes, failed_messages, passed_letters
from txmq.core.state.ranges import gaps
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State

STALE_ROWS_READ = 1_000  # of one stale range, whose width the client chooses


class AckReply(NamedTuple):
    """Number of messages acked or returned, and ranges that were not leased.

    `stale` ranges are not leased to the member, or no longer. `refused` are the stale
    ranges that will be delivered again; it stays empty for ReturnMessages.
    """

    messages: int
    stale: tuple[TopicRange, ...]
    refused: tuple[TopicRange, ...] = ()


def _claim(
    state: State,
    group: ConsumerGroup,
    command: AckMessages | ReturnMessages,
    ranges: Iterable[TopicRange],
) -> LeaseClaim:
    claim = LeaseClaim(group, command.member, command.generation)
    for claimed in ranges:
        claim.add(state, *claimed)
    return claim


def _messages(claim: LeaseClaim) -> int:
    return sum(end - start for _topic, _partition, start, end in claim.ranges) + len(claim.rows)


def decide_ack(state: State, command: AckMessages, now: int) -> Outcome:
    group, _member = find_member(state, command.group, command.member)
    done = _claim(state, group, command, command.ranges)
    passed = _claim(state, group, command, command.filtered)
    stale = (*done.stale, *passed.stale)
    refused = tuple(_unprocessed(state, group, stale)) if stale else ()
    reply = AckReply(_messages(done) + _messages(passed), stale, refused)
    if not reply.messages:
        return Outcome(reply=reply)
    changes = FailureChanges(state, group, now)
    for ref in (*done.rows, *passed.rows):
        if ref[0] in group.fences:
            changes.processed(ref, failed_messages.key_of(state, group, ref))
    settled, filtered = (done.ranges, tuple(done.rows)), (passed.ranges, tuple(passed.rows))
    event = Acked(group.group_id, *settled, *changes.fields(), *filtered)
    return Outcome((event,), reply)


def _unprocessed(
    state: State, group: ConsumerGroup, stale: Iterable[TopicRange]
) -> Iterator[TopicRange]:
    """Yield the parts of stale ranges that were not acked before.

    A client repeats an ack after a lost connection; such a repetition is no error.
    """
    for topic, partition, start, end in stale:
        found = state.topics.get(topic)
        tp = TopicPartition(found.topic_id if found is not None else 0, partition)
        position = group.positions.get(tp)
        if position is None:
            yield topic, partition, start, end
            continue
        low = max(start, position.floor)
        for open_range in gaps(position.settled.overlap(low, end), low, end) if low < end else ():
            yield topic, partition, *open_range
        for ref, _row in failed_messages.rows_between(
            state, group, tp, start, end, STALE_ROWS_READ
        ):
            yield topic, partition, ref[2], ref[2] + 1


def apply_acked(state: State, event: Acked, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    if event.moves or event.fences:
        key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)
    _settle_rows(state, group, event.rows)
    for acked in event.ranges:
        _settle_range(state, group, acked)
    if event.filtered or event.filtered_rows:
        _pass_over(state, group, event, context.stored_at)


def _settle_range(state: State, group: ConsumerGroup, acked: Range) -> None:
    """Apply: leased messages of a partition are processed."""
    topic_id, partition, start, end = acked
    tp = TopicPartition(topic_id, partition)
    position = group.positions[tp]
    for released in leases.release_range(state, group, tp, start, end):
        position.settle(released.start, released.end)
        messages = released.end - released.start
        circuit_breaker.record_acks(group, released.value.lease, messages)
        group.processed[topic_id] += messages


def _pass_over(state: State, group: ConsumerGroup, event: Acked, at: int) -> None:
    """Apply: messages are settled that a member's filter does not want. They tell a
    circuit breaker nothing.
    """
    for topic_id, partition, start, end in event.filtered:
        tp = TopicPartition(topic_id, partition)
        for released in leases.release_range(state, group, tp, start, end):
            group.positions[tp].settle_filtered(released.start, released.end)
            group.filtered += released.end - released.start
            circuit_breaker.record_filtered(group, released.value.lease, at)
    for topic_id, partition, offset in event.filtered_rows:
        ref = (topic_id, partition, offset)
        circuit_breaker.record_filtered(group, group.leased_rows.get(ref, 0), at)
        settle_row(state, group, ref, "filtered")
        position = state.groups.position_for_update(group, TopicPartition(topic_id, partition))
        position.settle_filtered(offset, offset + 1)
        group.filtered += 1
    state.groups.dirty_groups.add(group.group_id)


def _settle_rows(state: State, group: ConsumerGroup, rows: tuple[MessageRef, ...]) -> None:
    """Apply: messages that had failed before are processed."""
    refs: list[MessageRef] = [(ref[0], ref[1], ref[2]) for ref in rows]
    fenced = [ref for ref in refs if ref[0] in group.fences]
    keys = {ref: failed_messages.key_of(state, group, ref) for ref in fenced}
    others = set(passed_letters.remove_processed(state, group, refs))
    acked = [ref for ref in refs if ref not in others] if others else refs
    for lease, messages in leases.release_rows(state, group, acked).items():
        circuit_breaker.record_acks(group, lease, messages)
    for topic_id, _partition, _offset in acked:
        group.processed[topic_id] += 1
    for ref in refs:
        if ref in others:
            settle_row(state, group, ref)
        elif ref in keys:
            key_fences.settle_head(state, group, ref, keys[ref])


def settle_row(
    state: State,
    group: ConsumerGroup,
    ref: MessageRef,
    why: str = failed_changes.PROCESSED,
) -> None:
    """Apply: a message that had failed before is processed, or ends for this reason."""
    row = failed_changes.remove(state, group, ref, why)
    if row is not None:
        if why == failed_changes.PROCESSED:
            circuit_breaker.record_acks(group, group.leased_rows.get(ref, 0), 1)
            group.processed[ref[0]] += 1
        leases.release_row(state, group, ref)
        key_fences.settle_head(state, group, ref, row.key_hash)


def decide_return(state: State, command: ReturnMessages, now: int) -> Outcome:
    group, _member = find_member(state, command.group, command.member)
    claim = _claim(state, group, command, command.ranges)
    reply = AckReply(_messages(claim), tuple(claim.stale))
    due = tuple((*ref, now) for ref in claim.rows)
    returned = Returned(group.group_id, claim.ranges, due)
    return Outcome((returned,) if reply.messages else (), reply)


def apply_returned(state: State, event: Returned, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    leases.return_rows(state, group, event.rows)
    for topic_id, partition, start, end in event.ranges:
        leases.return_range(state, group, TopicPartition(topic_id, partition), start, end)


DECIDERS: Deciders = {AckMessages: decide_ack, ReturnMessages: decide_return}
APPLIERS: Appliers = {Acked: apply_acked, Returned: apply_returned}
