"""Retention: which messages are kept no longer.

    batches too old, or too many bytes of them ─► FirstsMoved: the first offset of a partition goes up

What outlives its batch is copied first (`outliving`). Nothing of an undecided
transaction goes: not the batches it holds, nor the messages it acks. A group that
stands below the first offset goes on from there; how many messages it has missed is
counted in table `passed`. Segments are dropped by `broker/data_directory/storage.py`,
below what `needed` names.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import leases
from txmq.core.events.base import FirstsMoved
from txmq.core.retention.relocation import COPIED_AT_ONCE, Outlived, moved_from
from txmq.core.state import log_pins, visibility
from txmq.core.state.state import Outcome
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import Place
    from txmq.core.state.consumer_groups import Group, Spot
    from txmq.core.state.positions import Position
    from txmq.core.state.state import State, Topic

AT_ONCE = 500  # batches that one command may take away, so that no apply takes long


class Keep(NamedTuple):
    """How long (microseconds) and how much (bytes, of all partitions together) is kept;
    0 = no limit.
    """

    time: int
    size: int


class Retain(NamedTuple):
    """Take away what a topic keeps no longer. Batches below `oldest` are lost anyway:
    the log begins there.
    """

    topic_id: int
    keep: Keep
    durable: int
    oldest: int


class Retained(NamedTuple):
    """How many batches went. `outlived` are the messages to be copied before more can;
    `more`: call again.
    """

    batches: int
    outlived: tuple[Outlived, ...]
    more: bool


def keep_of(topic: Topic, default: Keep) -> Keep:
    """What a topic keeps; a deleted one nothing."""
    time, size = topic.settings[:2]
    return Keep(default.time if time < 0 else time, default.size if size < 0 else size)


def decide_retain(state: State, command: Retain, now: int) -> Outcome:
    topic = state.topics_by_id[command.topic_id]
    draft = _drafted(state, topic, command, now)
    firsts = tuple(sorted(draft.firsts.items()))
    event = FirstsMoved(topic.topic_id, firsts, tuple(_passed(state, topic, firsts)))
    return Outcome((event,) if firsts else (), draft.reply)


def planned(state: State, command: Retain, now: int) -> Retained:
    """What the command would come to now."""
    return _drafted(state, state.topics_by_id[command.topic_id], command, now).reply


def _drafted(state: State, topic: Topic, command: Retain, now: int) -> _Draft:
    draft = _Draft(state, topic, command, now)
    draft.take()
    return draft


class _Draft:
    """What is taken from one topic: the oldest batches first, whatever their
    partition.
    """

    def __init__(self, state: State, topic: Topic, command: Retain, now: int) -> None:
        self._state, self._topic, self._command = state, topic, command
        self._excess = sum(topic.sizes) - command.keep.size if command.keep.size else 0
        self._before = now - command.keep.time if command.keep.time else -1
        self._barriers: dict[int, int] = {}
        self.firsts: dict[int, int] = {}
        self.outlived: list[Outlived] = []
        self.batches = 0

    @property
    def reply(self) -> Retained:
        return Retained(self.batches, tuple(self.outlived), self.batches >= AT_ONCE)

    def take(self) -> None:
        heads = [head for number in range(len(self._topic.ends)) for head in self._head(number)]
        heapify(heads)
        while heads and self.batches < AT_ONCE:
            _visible_at, partition, base, entry = heappop(heads)
            if not self._is_over(entry):
                return
            if self._may_go(partition, base, entry):
                self.firsts[partition] = base + entry.count
                self.batches += 1
                self._excess -= entry.length
                for head in self._head(partition):
                    heappush(heads, head)

    def _head(self, partition: int) -> Iterator[tuple[int, int, int, t.Entry]]:
        topic_id = self._topic.topic_id
        first = self.firsts.get(partition, self._topic.firsts[partition])
        row = self._state.entries.get(t.ENTRY_KEY.pack(topic_id, partition, first))
        if row is not None:
            entry = t.Entry._make(row)
            yield entry.visible_at, partition, first, entry

    def _is_over(self, entry: t.Entry) -> bool:
        lost = entry.position < self._command.oldest
        return lost or self._topic.deleted or entry.stored_at < self._before or self._excess > 0

    def _may_go(self, partition: int, base: int, entry: t.Entry) -> bool:
        if entry.visible_at > self._command.durable:
            return False
        barrier = self._barriers.get(partition)
        if barrier is None:
            barrier = self._barriers[partition] = self._barrier(partition)
        if base + entry.count <= barrier:
            return True
        self._outlive(partition, base + entry.count)
        return False

    def _barrier(self, partition: int) -> int:
        """The first offset that has to stay: it is not seen yet, acked in an undecided
        transaction, to be copied, or a clone that is being made has yet to tell whether
        it is done with it (`consumers/cloning.py`).
        """
        spot = (self._topic.topic_id, partition)
        stays = [visibility.end(self._state, *spot, self._command.durable)]
        for group, position in _readers(self._state, spot):
            stays += [piece.start for piece in islice(position.reserved, 1)]
            stays += [row.offset for row in islice(self._rows(group, spot), 1)]
            stays += [position.floor] if group.cloning is not None else []
        return min(stays)

    def _outlive(self, partition: int, end: int) -> None:
        spot = (self._topic.topic_id, partition)
        for group, _position in _readers(self._state, spot):
            for row in self._rows(group, spot):
                if row.offset >= end or len(self.outlived) >= COPIED_AT_ONCE:
                    break
                self.outlived.append(row)

    def _rows(self, group: Group, spot: Spot) -> Iterator[Outlived]:
        """Messages that left their place, and are not copied yet."""
        start = self._topic.firsts[spot[1]]
        for offset, row in moved_from(self._state, group.group_id, spot, start):
            if row.position >= self._command.oldest and not log_pins.at(self._state, row.position):
                yield Outlived(group.group_id, *spot, offset, row.position, row.length, row.row)


def _readers(state: State, spot: Spot) -> Iterator[tuple[Group, Position]]:
    for group in state.consumers.by_id.values():
        position = group.positions.get(spot)
        if position is not None:
            yield group, position


def _passed(
    state: State, topic: Topic, firsts: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, int, int]]:
    if topic.deleted:
        return
    for partition, first in firsts:
        for group, position in _readers(state, (topic.topic_id, partition)):
            missed = position.missed_below(first)
            if missed:
                yield group.group_id, partition, missed


def apply_firsts(state: State, event: FirstsMoved, place: Place) -> None:
    topic = state.topics_by_id[event.topic_id]
    for partition, first in event.firsts:
        _drop_entries(state, topic, partition, first)
        topic.firsts[partition] = first
        spot = (topic.topic_id, partition)
        for group, position in _readers(state, spot):
            if position.floor < first:
                leases.release(state, group, spot, 0, first)
                position.pass_to(first)
    for group_id, partition, missed in event.passed:
        key = t.POSITION_KEY.pack(group_id, topic.topic_id, partition)
        before = state.tables[t.PASSED].get(key)
        state.tables[t.PASSED].put(key, (missed + (before[0] if before else 0), place.stored_at))
    state.dirty_topics.add(topic.topic_id)


def _drop_entries(state: State, topic: Topic, partition: int, first: int) -> None:
    low, high = (
        t.ENTRY_KEY.pack(topic.topic_id, partition, at) for at in (topic.firsts[partition], first)
    )
    for key, row in list(state.entries.range(low, high)):
        entry = t.Entry._make(row)
        state.entries.delete(key)
        topic.sizes[partition] -= entry.length
        log_pins.drop(state, entry.position)


DECIDERS: dict[type, Any] = {Retain: decide_retain}
APPLIERS: dict[type, Any] = {FirstsMoved: apply_firsts}
