"""What one event moves: messages to their next row, fences to their next state. Worked
out in decisions, recorded by `apply`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from txmq.core.consumers import failed_messages, leases
from txmq.core.consumers import key_fences as fences
from txmq.core.consumers.failed_messages import Kind, Move
from txmq.core.events.consumers import FenceSet
from txmq.core.state.consumer_groups import SKIP, FenceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.consumers.failed_messages import Moved
    from txmq.core.state.consumer_groups import Group, Spotted
    from txmq.core.state.state import State


class Changes:
    """The moves and fences of one event. What was put here before is taken into account
    by what comes after.
    """

    def __init__(self, state: State, group: Group, now: int, *, leasing: bool = False) -> None:
        """`leasing`: the event grants a lease too, which may hold a key that gets its
        fence only after that.
        """
        self._state, self._group, self._now = state, group, now
        self._born = group.next_lease + leasing
        self._number = group.next_letter
        self._fences: dict[tuple[int, int], FenceSet] = {}
        self._moves: list[Move] = []
        self._parked: Counter[tuple[int, int | None]] = Counter()

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(self._moves)

    @property
    def fences(self) -> tuple[FenceSet, ...]:
        return tuple(self._fences.values())

    def __bool__(self) -> bool:
        return bool(self._moves or self._fences)

    def fenced(self, spotted: Spotted, key_hash: int | None) -> bool:
        """Whether this message must wait behind another one of its key."""
        if key_hash is None or not self._group.ordered:
            return False
        change = self._fences.get((spotted[0], key_hash))
        if change is not None:
            return change.state != fences.LIFTED and spotted[1:] != (
                change.partition,
                change.offset,
            )
        fence = self._group.fence(spotted[0], key_hash)
        return fence is not None and not fences.is_head(fence, spotted)

    def full(self, topic_id: int, key_hash: int | None) -> bool:
        """Whether no more new messages may be parked behind this key."""
        return fences.full(self._group, topic_id, key_hash, self._parked[topic_id, key_hash])

    def any_fence(self, topic_id: int) -> bool:
        """Whether any key of the topic has a fence, so that deliveries must look at
        keys.
        """
        return topic_id in self._group.fences or any(
            topic == topic_id for topic, _key in self._fences
        )

    def park(self, spotted: Spotted, row: Moved) -> None:
        """Behind its key's fence."""
        self._parked[spotted[0], row.key_hash] += 1
        self._moves.append(Move(*spotted, row._replace(kind=Kind.PARKED, due=0)))

    def retry(self, spotted: Spotted, row: Moved, due: int) -> None:
        """To be delivered again at `due`; a keyed message of an ordered group is the
        head of its key meanwhile.
        """
        if self.fenced(spotted, row.key_hash):
            self.park(spotted, row)
            return
        self._moves.append(Move(*spotted, row._replace(kind=Kind.RETRY, due=due)))
        self._head(spotted, row.key_hash, FenceState.RETRYING)

    def bury(self, spotted: Spotted, row: Moved) -> None:
        """To the dead letters: with `skip` the key goes on, else it waits for an
        operator's word.
        """
        if self.fenced(spotted, row.key_hash):
            self.park(spotted, row)
            return
        letter = row._replace(kind=Kind.LETTER, due=0, dead_at=self._now, number=self._number)
        self._number += 1
        self._moves.append(Move(*spotted, letter))
        if self._group.settings.on_exhausted == SKIP:
            self.done(spotted, row.key_hash)
        else:
            self._head(spotted, row.key_hash, FenceState.DEAD)

    def close(self, spotted: Spotted, row: Moved, reason: str) -> None:
        """A letter is abandoned; what waited for it goes on."""
        self._moves.append(Move(*spotted, row._replace(kind=Kind.ABANDONED, reason=reason)))
        self.done(spotted, row.key_hash)

    def done(self, spotted: Spotted, key_hash: int | None) -> None:
        """A message is done with: if it was the head of its key, the next in the chain
        follows, as soon as it may.
        """
        fence = self._group.fence(spotted[0], key_hash)
        if key_hash is None or fence is None or not fences.is_head(fence, spotted):
            return
        moves, sets = fences.advance(self._state, self._group, spotted[0], key_hash, self._now)
        waiting = FenceSet(spotted[0], key_hash, FenceState.WAITING, *spotted[1:], fence.born)
        self._moves += moves
        self._fences[spotted[0], key_hash] = sets[0] if sets else waiting

    def advance(self) -> None:
        """Fences whose next step has become possible take it."""
        moves, sets = fences.advance_waiting(self._state, self._group, self._now)
        self._moves += moves
        self._fences.update({(item.topic_id, item.key_hash): item for item in sets})

    def _head(self, spotted: Spotted, key_hash: int | None, state: FenceState) -> None:
        if key_hash is None or not self._group.ordered:
            return
        fence = self._group.fence(spotted[0], key_hash)
        born = self._born if fence is None else fence.born
        self._fences[spotted[0], key_hash] = FenceSet(
            spotted[0], key_hash, state, *spotted[1:], born
        )


def apply(
    state: State, group: Group, moves: Iterable[Move], sets: Iterable[FenceSet], at: int
) -> None:
    """Record what an event moved: each message leaves the one place where it was."""
    fences.apply(state, group, sets, at)
    for raw in moves:
        topic_id, partition, offset, row = failed_messages.of(raw)
        spotted = (topic_id, partition, offset)
        if failed_messages.drop(state, group, spotted) is None:
            leases.release(state, group, spotted[:2], offset, offset + 1)
            position = group.positions[spotted[:2]]
            position.take(offset, offset + 1)
            position.settle(offset, offset + 1)
        else:
            leases.release_row(state, group, spotted)
        failed_messages.put(state, group, spotted, row)
        group.next_letter = max(group.next_letter, row.number + 1)
        state.consumers.dirty_groups.add(group.group_id)
