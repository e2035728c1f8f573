"""Key fences: later messages of a failed key wait, all other keys go on.

Only ordered groups have fences. A fence belongs to (group, topic, key hash), whatever
the partition. Its head is the message that failed; the others of the key are parked
behind it. This chain (table `parked`) has the order of publication. The order of
parking may differ, because messages of the key may be leased when the fence is raised
and come back late.

Rule of release: the next message of the chain becomes the head only when no earlier
message of the key can still turn up in its partition. That is so when nothing before it
waits for redelivery, and no lease older than the fence covers anything before it: such
a lease may hold the key. A fence is lifted only when its chain is empty and the same
holds for the whole partition. Younger leases need no check: deliveries compare keys
with fences. Until the condition holds, the fence is WAITING, and each fetch tries
again.

A chain has a maximum length (`max_parked`). At the maximum, the partition stops before
the next new message of the key. Messages that were delivered before are always parked,
because the chain may wait for them.

Contract of consumers in an ordered group:

- A consumer processes one message of a key at a time, in the order of offsets.
- When a message fails, the reply names a lease number. The consumer returns,
  unprocessed, all messages of the key under older leases, also those that arrive later.
- There is no fence if the failure was not recorded (NotLeased), or if the message was
  acked in a transaction that was rolled back. Then the consumer returns everything that
  is under way and decides the rollback before it fetches again.
- After a lost connection the consumer joins again and names the messages it holds.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from txmq.core.consumers import leases
from txmq.core.events.consumers import FenceChange
from txmq.core.state import failed_changes, failed_messages, failed_rows
from txmq.core.state.consumer_groups import SKIP, FenceState, KeyFence
from txmq.core.state.failed_rows import FailedKind, Move
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State

LIFTED = 0
ALL_OFFSETS = 1 << 63
FENCES_PER_FETCH = 100  # waiting fences that one fetch advances, at most
LOOKED_AT = 100  # waiting fences of all partitions that one fetch looks at in vain, about

# The allowed next states of each state; LIFTED = the key has no fence.
TRANSITIONS: dict[int, frozenset[int]] = {
    FenceState.RETRYING: frozenset(
        (FenceState.RETRYING, FenceState.DEAD, FenceState.WAITING, LIFTED)
    ),
    FenceState.DEAD: frozenset((FenceState.RETRYING, FenceState.WAITING, LIFTED)),
    FenceState.WAITING: frozenset((FenceState.RETRYING, LIFTED)),
    LIFTED: frozenset((FenceState.RETRYING, FenceState.DEAD)),
}


def is_head(fence: KeyFence, ref: MessageRef) -> bool:
    """Return True if the other messages of the key wait for this one."""
    return fence.state is not FenceState.WAITING and (fence.partition, fence.offset) == ref[1:]


def is_full(group: ConsumerGroup, topic_id: int, key_hash: int | None, more: int = 0) -> bool:
    """Return True if the chain of a key, with `more` messages, has its maximum
    length.
    """
    fence = group.fence(topic_id, key_hash)
    return (0 if fence is None else fence.parked) + more >= group.settings.max_parked


def is_stopped(group: ConsumerGroup, tp: TopicPartition) -> bool:
    """Return True if the next new message of a partition belongs to a full chain."""
    if tp not in group.stops:
        return False
    offset, key_hash = group.stops[tp]
    fence = group.fence(tp[0], key_hash)
    return (
        group.positions[tp].cursor == offset
        and fence is not None
        and is_full(group, tp[0], key_hash)
    )


def no_earlier_message(
    group: ConsumerGroup, tp: TopicPartition, first_lease: int, below: int
) -> bool:
    """Return True if no message of the key can turn up below this offset any more."""
    position = group.positions.get(tp)
    if position is None:
        return True
    redelivery = position.redeliver.first()
    if redelivery is not None and redelivery.start < below:
        return False
    return all(
        held.value.lease >= first_lease
        for ranges in (position.leased, position.reserved)
        for held in ranges.overlap(0, below)
    )


class OpenLeases:
    """The oldest lease that holds messages of a partition, at one time. It is looked
    for once: an ack may process thousands of heads.
    """

    def __init__(self, group: ConsumerGroup) -> None:
        self._group = group
        self._oldest: dict[TopicPartition, int] = {}

    def oldest(self, tp: TopicPartition) -> int:
        """Return its number, 0 = messages wait for redelivery, whatever leases hold."""
        known = self._oldest.get(tp)
        if known is None:
            known = self._oldest[tp] = self._find(tp)
        return known

    def _find(self, tp: TopicPartition) -> int:
        position = self._group.positions.get(tp)
        if position is None:
            return ALL_OFFSETS
        if position.redeliver:
            return 0
        held = (*position.leased, *position.reserved)
        return min((one.value.lease for one in held), default=ALL_OFFSETS)


def advance(
    state: State,
    group: ConsumerGroup,
    topic_id: int,
    key_hash: int,
    now: int,
    open_leases: OpenLeases,
) -> tuple[tuple[Move, ...], tuple[FenceChange, ...]]:
    """Return the next head of a fence whose head is processed, or the fence's end.

    Both tuples are empty if the fence has to wait.
    """
    fence = group.fence(topic_id, key_hash)
    assert fence is not None, "its head is known, so there is a fence"
    following = (
        failed_messages.first_parked(state, group, topic_id, key_hash) if fence.parked else None
    )
    if following is None:
        tp = TopicPartition(topic_id, fence.partition)
        if open_leases.oldest(tp) < fence.first_lease:
            return (), ()
        head = (fence.partition, fence.offset)
        return (), (FenceChange(topic_id, key_hash, LIFTED, *head, fence.first_lease),)
    ref, row = following
    tp = TopicPartition(ref[0], ref[1])
    if open_leases.oldest(tp) < fence.first_lease and not no_earlier_message(
        group, tp, fence.first_lease, ref[2]
    ):
        return (), ()
    change = FenceChange(topic_id, key_hash, FenceState.RETRYING, *ref[1:], fence.first_lease)
    return (Move(*ref, row._replace(kind=FailedKind.RETRY, due=now)),), (change,)


def advance_waiting(
    state: State, group: ConsumerGroup, now: int
) -> tuple[tuple[Move, ...], tuple[FenceChange, ...]]:
    """Return the changes of waiting fences that can go on by now."""
    found = list(islice(waiting_advances(state, group, now), FENCES_PER_FETCH))
    moves = tuple(move for moved, _changes in found for move in moved)
    return moves, tuple(change for _moves, changes in found for change in changes)


def waiting_advances(
    state: State, group: ConsumerGroup, now: int
) -> Iterator[tuple[tuple[Move, ...], tuple[FenceChange, ...]]]:
    """Yield the changes of each waiting fence that can go on by now.

    There may be very many fences, and a consumer may keep those of a partition waiting
    for long. They hold up no fence of another partition.
    """
    open_leases = OpenLeases(group)
    most = max(1, LOOKED_AT // max(1, len(group.waiting_fences.partitions)))
    for tp, queue in group.waiting_fences.partitions.items():
        in_vain = 0
        for _first_lease, key_hash in queue:
            moves, changes = advance(state, group, tp[0], key_hash, now, open_leases)
            if changes:
                yield moves, changes
            elif (in_vain := in_vain + 1) >= most:
                break


class FailureChanges:
    """Builder of the `moves` and `fences` of one event.

    Each call takes account of the changes that were added before it. `moves` are the
    new rows of failed messages.
    """

    def __init__(
        self, state: State, group: ConsumerGroup, now: int, *, leasing: bool = False
    ) -> None:
        """`leasing`: the event also grants a lease, and that lease may hold a key whose
        fence is raised by the same event. So it counts as older than the fence.
        """
        self._state, self._group, self._now = state, group, now
        self._ordered = group.ordered
        self._first_lease = group.next_lease + leasing
        self._letter_number = group.next_letter
        self._fences: dict[tuple[int, int], FenceChange] = {}
        self._moves: list[Move] = []
        self._open_leases = OpenLeases(group)
        self._parked: Counter[tuple[int, int | None]] = Counter()

    def fields(self) -> tuple[tuple[Move, ...], tuple[FenceChange, ...]]:
        """Return the fields `moves` and `fences` of the event."""
        return tuple(self._moves), tuple(self._fences.values())

    def __bool__(self) -> bool:
        return bool(self._moves or self._fences)

    def is_fenced(self, ref: MessageRef, key_hash: int | None) -> bool:
        """Return True if this message has to wait behind another one of its key."""
        if key_hash is None or not self._ordered:
            return False
        change = self._fences.get((ref[0], key_hash))
        if change is not None:
            return change.state != LIFTED and ref[1:] != (change.partition, change.offset)
        fence = self._group.fence(ref[0], key_hash)
        return fence is not None and not is_head(fence, ref)

    def is_full(self, topic_id: int, key_hash: int | None) -> bool:
        """Return True if no further new message may be parked behind this key."""
        return is_full(self._group, topic_id, key_hash, self._parked[topic_id, key_hash])

    def first_lease(self, topic_id: int, key_hash: int | None) -> int:
        """Return the lease below which messages of this key have to go back; 0 = none
        have to.
        """
        change = None if key_hash is None else self._fences.get((topic_id, key_hash))
        if change is not None:
            return 0 if change.state == LIFTED else change.first_lease
        fence = self._group.fence(topic_id, key_hash)
        return 0 if fence is None else fence.first_lease

    def topic_has_fences(self, topic_id: int) -> bool:
        """Return True if deliveries of the topic have to compare keys with fences."""
        return topic_id in self._group.fences or any(
            topic == topic_id for topic, _key in self._fences
        )

    def park(self, ref: MessageRef, row: FailedMessage) -> None:
        """Add a message to the chain of its key."""
        self._parked[ref[0], row.key_hash] += 1
        self._moves.append(Move(*ref, row._replace(kind=FailedKind.PARKED, due=0, store=b"")))

    def retry(self, ref: MessageRef, row: FailedMessage, due: int) -> None:
        """Schedule the next delivery of a message at the time `due`.

        In an ordered group a message with a key becomes the head of its key.
        """
        if self.is_fenced(ref, row.key_hash):
            self.park(ref, row)
        else:
            self.lead(ref, row, due)

    def dead_head(self, ref: MessageRef, key_hash: int | None) -> MessageRef | None:
        """Return the dead letter that this message would have to wait behind, until an
        operator deals with it.
        """
        if not self.is_fenced(ref, key_hash):
            return None
        assert key_hash is not None, "it has a fence"
        fence = self._fences.get((ref[0], key_hash)) or self._group.fence(ref[0], key_hash)
        assert fence is not None, "likewise"
        is_dead = fence.state == FenceState.DEAD
        return (ref[0], fence.partition, fence.offset) if is_dead else None

    def lead(self, ref: MessageRef, row: FailedMessage, due: int) -> None:
        """Schedule the next delivery of a message as the head of its key. A dead letter
        that has been its head has to be parked then.
        """
        self._moves.append(Move(*ref, row._replace(kind=FailedKind.RETRY, due=due, store=b"")))
        self._set_head(ref, row.key_hash, FenceState.RETRYING)

    def put_back(self, ref: MessageRef, row: FailedMessage) -> None:
        """Deliver a letter again that its plan has come to.

        Its row changes only where it waits behind another message of its key.
        """
        if self.is_fenced(ref, row.key_hash):
            self.park(ref, failed_rows.replayed_row(row)._replace(plan=row.plan))
        else:
            self._set_head(ref, row.key_hash, FenceState.RETRYING)

    def leave_at_consumer(self, ref: MessageRef, row: FailedMessage) -> None:
        """Leave a message in the store of a consumer, which retries it there.

        In an ordered group a message with a key becomes the head of its key.
        """
        if self.is_fenced(ref, row.key_hash):
            self.park(ref, row)
            return
        self._moves.append(Move(*ref, row._replace(kind=FailedKind.LOCAL)))
        self._set_head(ref, row.key_hash, FenceState.RETRYING)

    def dead_letter(self, ref: MessageRef, row: FailedMessage) -> None:
        """Make the message a dead letter.

        With the policy `skip` its key goes on, otherwise the key waits for an operator.
        """
        if self.is_fenced(ref, row.key_hash):
            self.park(ref, row)
            return
        self._moves.append(Move(*ref, self._numbered(row._replace(kind=FailedKind.LETTER))))
        if self._group.settings.on_exhausted == SKIP:
            self.processed(ref, row.key_hash)
        else:
            self._set_head(ref, row.key_hash, FenceState.DEAD)

    def abandon(self, ref: MessageRef, row: FailedMessage, reason: str) -> None:
        """Close a dead letter; its key goes on."""
        self._moves.append(Move(*ref, row._replace(kind=FailedKind.ABANDONED, reason=reason)))
        self.processed(ref, row.key_hash)

    def drop(self, ref: MessageRef, row: FailedMessage, reason: str) -> None:
        """Close a message that is retried; its key goes on."""
        self.abandon(ref, self._numbered(row), reason)

    def _numbered(self, row: FailedMessage) -> FailedMessage:
        """Return the row as one that is a dead letter from now on."""
        number = self._letter_number
        self._letter_number += 1
        return row._replace(
            due=0,
            dead_at=self._now,
            number=number,
            store=b"",
            exported=0,
            trial_by="",
            accepted=True,
        )

    def processed(self, ref: MessageRef, key_hash: int | None) -> None:
        """Advance the fence of the key if this message is its head."""
        fence = self._group.fence(ref[0], key_hash)
        if key_hash is None or fence is None or not is_head(fence, ref):
            return
        moves, changes = advance(
            self._state, self._group, ref[0], key_hash, self._now, self._open_leases
        )
        waiting = FenceChange(ref[0], key_hash, FenceState.WAITING, *ref[1:], fence.first_lease)
        self._moves += moves
        self._fences[ref[0], key_hash] = changes[0] if changes else waiting

    def advance(self) -> None:
        """Add the changes of waiting fences that can go on by now."""
        moves, changes = advance_waiting(self._state, self._group, self._now)
        self._moves += moves
        self._fences.update({(change.topic_id, change.key_hash): change for change in changes})

    def _set_head(self, ref: MessageRef, key_hash: int | None, state: FenceState) -> None:
        if key_hash is None or not self._ordered:
            return
        fence = self._group.fence(ref[0], key_hash)
        first_lease = self._first_lease if fence is None else fence.first_lease
        self._fences[ref[0], key_hash] = FenceChange(ref[0], key_hash, state, *ref[1:], first_lease)


def apply_changes(
    state: State,
    group: ConsumerGroup,
    moves: Iterable[Move],
    changes: Iterable[FenceChange],
    at: int,
) -> None:
    """Apply: change fences, and put each moved message into its new row.

    A message leaves the one place where it was: its partition, a lease or its old row.
    """
    for change in changes:
        _apply_change(state, group, change, at)
    for raw in moves:
        topic_id, partition, offset, row = failed_rows.decode_move(raw)
        ref = (topic_id, partition, offset)
        if failed_changes.drop(state, group, ref) is None:
            tp = TopicPartition(topic_id, partition)
            leases.release_range(state, group, tp, offset, offset + 1)
            position = group.positions[tp]
            position.remove_ready(offset, offset + 1)
            position.settle(offset, offset + 1)
        else:
            leases.release_row(state, group, ref)
        failed_changes.put(state, group, ref, row)
        group.next_letter = max(group.next_letter, row.number + 1)
        state.groups.dirty_groups.add(group.group_id)


def _apply_change(state: State, group: ConsumerGroup, change: FenceChange, at: int) -> None:
    topic_id, key_hash, wanted, partition, offset, first_lease = change
    fence = group.fence(topic_id, key_hash)
    before = LIFTED if fence is None else fence.state
    assert wanted in TRANSITIONS[before], f"a fence went from {before} to {wanted}"
    if wanted == LIFTED:
        fence = None
    elif fence is None:
        fence = KeyFence(FenceState(wanted), partition, offset, first_lease, at)
    else:
        fence.state, fence.partition, fence.offset = FenceState(wanted), partition, offset
    group.set_fence(topic_id, key_hash, fence)
    state.groups.dirty_fences.add((group.group_id, topic_id, key_hash))


def settle_head(state: State, group: ConsumerGroup, ref: MessageRef, key_hash: int | None) -> None:
    """Apply: set the fence to WAITING if this processed message is its head."""
    fence = group.fence(ref[0], key_hash)
    if fence is None or key_hash is None or not is_head(fence, ref):
        return
    fence.state = FenceState.WAITING
    group.set_fence(ref[0], key_hash, fence)
    state.groups.dirty_fences.add((group.group_id, ref[0], key_hash))
