"""Poison isolation: find the message that kills its consumers.

When a member is lost, or its lease expires, any message it held may have been the
cause, and most had not even been started. So one death proves nothing. All of them
become suspects. Suspects are delivered in batches that shrink with every death: 512
after the first, 16 after the second, along with the member's other messages. From the
third death on a message is isolated: it is delivered alone, to a member that holds
nothing else and gets nothing else meanwhile.

A death counts as an attempt only for a message that was delivered alone. So a message
that kills every time becomes a dead letter, and no other message comes nearer to that.

A restart of the broker makes no suspects, nor does the return of a message. A member
has one lease of suspects at a time (`ConsumerGroup.suspect_leases`). Waiting suspects
are found through `isolated_rows` and `suspect_partitions` of the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.state import attempts, failed_changes, failed_messages, failed_rows
from txmq.core.state.failed_rows import FailedKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.state.consumer_groups import ConsumerGroup, GroupMember, Lease, MessageRef
    from txmq.core.state.failed_rows import FailedMessage, Move
    from txmq.core.state.positions import Redelivery
    from txmq.core.state.ranges import ValueRange
    from txmq.core.state.state import State
    from txmq.model.topic_partition import TopicPartition

BATCH_LIMITS = (0, 512, 16)  # suspects in one delivery, by their deaths
assert len(BATCH_LIMITS) == failed_messages.ISOLATED_AFTER, "with more deaths a message is isolated"
CONSUMER_DIED = "consumer died"


def batch_limit(deaths: int) -> int:
    """Return the number of suspects with so many deaths that fit in one delivery."""
    return BATCH_LIMITS[deaths] if deaths < failed_messages.ISOLATED_AFTER else 1


def suspect_lease(group: ConsumerGroup, member: GroupMember) -> Lease | None:
    """Return the member's lease of suspects, if it has one."""
    number = group.suspect_leases.get(member.name)
    return None if number is None else group.leases[number]


def holds_isolated(group: ConsumerGroup, member: GroupMember) -> bool:
    """Return True if an isolated message is leased to the member."""
    lease = suspect_lease(group, member) if group.suspect_leases else None
    return lease is not None and lease.single


def holds_nothing(group: ConsumerGroup, member: GroupMember) -> bool:
    """Return True if nothing is leased to the member."""
    return all(lease.member != member.name for lease in group.leases.values())


def next_redeliveries(group: ConsumerGroup, tp: TopicPartition) -> Iterator[ValueRange[Redelivery]]:
    """Yield the redeliveries that could be next: in an ordered group only the first."""
    limit = group.max_attempts
    for waiting in group.positions[tp].redeliver:
        if limit is None or waiting.value.attempt <= limit:
            yield waiting
        if group.ordered:
            return


def dead_letter_row(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage
) -> FailedMessage:
    """Return the row of an exhausted message as a dead letter, with an error text where
    it killed its consumers.

    The error of an earlier failure stays.
    """
    if row.error_text or not _has_died(state, group, ref, row):
        return row
    return row._replace(error_type=row.error_type or CONSUMER_DIED, error_text=_death_text(row))


def _has_died(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> bool:
    """Return whether the last attempt of an exhausted message had no outcome.

    It had one, a failure, where an operator has lowered the number of attempts since.
    """
    if not (row.deaths or row.trial_by):
        return False
    past = attempts.get(state, group, ref).attempts
    return not past or past[-1][1:3] != (row.attempt, row.replays)


def _death_text(row: FailedMessage) -> str:
    if not row.deaths:
        return "its last delivery had no outcome: the consumer left, or gave no answer"
    return (
        f"{row.deaths} consumers died, or fell silent, with this message; "
        "it was alone with the last of them"
    )


def record_deaths(state: State, group: ConsumerGroup, moves: Iterable[Move], at: int) -> None:
    """Apply: put into the histories of the dead letters among `moves` that they killed
    their consumers, where they did.
    """
    for move in moves:
        topic_id, partition, offset, row = failed_rows.decode_move(move)
        ref = (topic_id, partition, offset)
        if row.kind == FailedKind.LETTER and _has_died(state, group, ref, row):
            death = row._replace(
                error_type=CONSUMER_DIED, error_text=_death_text(row), fingerprint=""
            )
            failed_changes.sweep(state, group.group_id, ref)
            attempts.record(state, group, ref, death, at)
