"""Fences: in an ordered group the later messages of a failed key wait behind its head;
all other keys flow.

A fence is found by (group, topic, key hash), whatever the partition. Its chain (table
`parked`) is in the order of publication, not of parking: the two differ, because
messages of the key may be out on leases when the fence goes up and come back late.

Therefore the rule of release: the next of the chain becomes the head only when nothing
before it in its partition waits to be delivered again, and no lease older than the
fence holds anything before it there, for such a lease may hold the key. A fence is
lifted only when the chain is empty and that is true for the whole partition. Leases
younger than the fence were looked through when they were granted. Until then the fence
is WAITING; each fetch looks again.

A chain has an end (`max_parked`): with more of the key to come, its partition stands
still before the next new message of it, until the chain is shorter. What had been
delivered before is always parked, for the chain may wait for it.

The consumer's part in an ordered group: it processes one message of a key at a time, in
the order of offsets. When one fails, it gives back, unprocessed, what it has of the key
under leases below the number in the reply, also what arrives later. Where the failure
could not be recorded (NotLeased), or the message was acked in a transaction that was
rolled back, there is no fence to rely on: everything under way arrives and is given
back, and the rollback is decided, before it fetches again. After a lost connection it
joins again and names what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.consumers import failed_messages
from txmq.core.consumers.failed_messages import Kind, Move
from txmq.core.events.consumers import FenceSet
from txmq.core.state.consumer_groups import Fence, FenceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.state.consumer_groups import Group, Spot, Spotted
    from txmq.core.state.state import State

LIFTED = 0
EVERYTHING = 1 << 63
STEPS_AT_ONCE = 100  # fences looked at in one fetch

# From each state, those that may follow; LIFTED = there is no fence.
TRANSITIONS: dict[int, frozenset[int]] = {
    FenceState.RETRYING: frozenset(
        (FenceState.RETRYING, FenceState.DEAD, FenceState.WAITING, LIFTED)
    ),
    FenceState.DEAD: frozenset((FenceState.RETRYING, FenceState.WAITING, LIFTED)),
    FenceState.WAITING: frozenset((FenceState.RETRYING, LIFTED)),
    LIFTED: frozenset((FenceState.RETRYING, FenceState.DEAD)),
}


def is_head(fence: Fence, spotted: Spotted) -> bool:
    """Whether this is the message that the others of its key wait for."""
    return fence.state is not FenceState.WAITING and (fence.partition, fence.offset) == spotted[1:]


def full(group: Group, topic_id: int, key_hash: int | None, more: int = 0) -> bool:
    """Whether as many messages are parked behind a key as may be, with so many
    `more`.
    """
    fence = group.fence(topic_id, key_hash)
    return (0 if fence is None else fence.parked) + more >= group.settings.max_parked


def stopped(group: Group, spot: Spot) -> bool:
    """Whether a partition stands still, because its next new message belongs behind a
    fence that is full.
    """
    if spot not in group.stops:
        return False
    offset, key_hash = group.stops[spot]
    fence = group.fence(spot[0], key_hash)
    return (
        group.positions[spot].cursor == offset
        and fence is not None
        and full(group, spot[0], key_hash)
    )


def clear(group: Group, spot: Spot, born: int, below: int) -> bool:
    """Whether no earlier message of the key can turn up any more among the offsets
    below this one.
    """
    position = group.positions.get(spot)
    if position is None:
        return True
    back = position.redeliver.first()
    if back is not None and back.start < below:
        return False
    out = [piece for piece in (*position.leased, *position.reserved) if piece.start < below]
    return all(piece.value.lease >= born for piece in out)


def advance(
    state: State, group: Group, topic_id: int, key_hash: int, now: int
) -> tuple[tuple[Move, ...], tuple[FenceSet, ...]]:
    """What follows for a fence whose head is done with: the next head, the end of the
    fence, or nothing yet.
    """
    fence = group.fence(topic_id, key_hash)
    assert fence is not None, "its head is known, so there is a fence"
    following = failed_messages.first_parked(state, group, topic_id, key_hash)
    if following is None:
        if not clear(group, (topic_id, fence.partition), fence.born, EVERYTHING):
            return (), ()
        return (), (
            FenceSet(topic_id, key_hash, LIFTED, fence.partition, fence.offset, fence.born),
        )
    spotted, row = following
    if not clear(group, spotted[:2], fence.born, spotted[2]):
        return (), ()
    head = FenceSet(topic_id, key_hash, FenceState.RETRYING, *spotted[1:], fence.born)
    return (Move(*spotted, row._replace(kind=Kind.RETRY, due=now)),), (head,)


def advance_waiting(
    state: State, group: Group, now: int
) -> tuple[tuple[Move, ...], tuple[FenceSet, ...]]:
    """The steps that have become possible since heads were done with."""
    moves: tuple[Move, ...] = ()
    fences: tuple[FenceSet, ...] = ()
    for topic_id, key_hash in sorted(group.waiting)[:STEPS_AT_ONCE]:
        more_moves, more_fences = advance(state, group, topic_id, key_hash, now)
        moves += more_moves
        fences += more_fences
    return moves, fences


def apply(state: State, group: Group, fences: Iterable[FenceSet], at: int) -> None:
    """Record what became of fences."""
    for item in fences:
        topic_id, key_hash, wanted, partition, offset, born = item
        fence = group.fence(topic_id, key_hash)
        before = LIFTED if fence is None else fence.state
        assert wanted in TRANSITIONS[before], f"a fence went from {before} to {wanted}"
        if wanted == LIFTED:
            fence = None
        elif fence is None:
            fence = Fence(FenceState(wanted), partition, offset, born, at)
        else:
            fence.state, fence.partition, fence.offset = FenceState(wanted), partition, offset
        group.set_fence(topic_id, key_hash, fence)
        state.consumers.dirty_fences.add((group.group_id, topic_id, key_hash))


def head_done(state: State, group: Group, spotted: Spotted, key_hash: int | None) -> None:
    """Apply: a moved message is done with; if its key waits for it, the key now waits
    for who is next.
    """
    fence = group.fence(spotted[0], key_hash)
    if fence is None or key_hash is None or not is_head(fence, spotted):
        return
    fence.state = FenceState.WAITING
    group.set_fence(spotted[0], key_hash, fence)
    state.consumers.dirty_fences.add((group.group_id, spotted[0], key_hash))
