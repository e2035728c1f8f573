"""Retention of topics: batches that are too old, or too many bytes, are removed.

`FirstsMoved` raises the start offsets of partitions. Failed messages of a batch are
copied before it goes (`relocation`). Nothing of an undecided transaction goes: neither
its batches nor the messages that it acks. A group below the new start offset goes on
from there; table `missed` counts the messages that it has missed. The broker removes
segments below the log floor (`log_floor`).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import leases
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.topics import FirstsMoved
from txmq.core.retention.relocation import STEP_COPIES, RetainedMessage, scan_failed
from txmq.core.state import log_pins, visibility
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.positions import GroupPosition
    from txmq.core.state.state import State, Topic

STEP_BATCHES = 500  # removed by one command, so that no apply takes long


class RetentionLimits(NamedTuple):
    """The limits of age (µs) and size (bytes, of all partitions together); 0 = no
    limit.
    """

    time: int
    size: int


class ApplyRetention(NamedTuple):
    """Remove the expired batches of a topic. Those below `oldest`, the beginning of the
    log, are lost anyway.
    """

    topic_id: int
    limits: RetentionLimits
    durable: int
    oldest: int


class RetentionReply(NamedTuple):
    """The number of removed batches. The messages `to_copy` stop others from being
    removed; `more`: call again.
    """

    batches: int
    to_copy: tuple[RetainedMessage, ...]
    more: bool


def limits_of(topic: Topic, default: RetentionLimits) -> RetentionLimits:
    """Return the limits of a topic, by its settings or by the default."""
    time, size = topic.settings[:2]
    return RetentionLimits(default.time if time < 0 else time, default.size if size < 0 else size)


def decide_retain(state: State, command: ApplyRetention, now: int) -> Outcome:
    topic = state.topics_by_id[command.topic_id]
    plan = _planned(state, topic, command, now)
    firsts = tuple(sorted(plan.firsts.items()))
    event = FirstsMoved(topic.topic_id, firsts, tuple(_missed_messages(state, topic, firsts)))
    return Outcome((event,) if firsts else (), plan.reply)


def preview(state: State, command: ApplyRetention, now: int) -> RetentionReply:
    """Return the reply that the command would get, without a decision."""
    return _planned(state, state.topics_by_id[command.topic_id], command, now).reply


def _planned(state: State, topic: Topic, command: ApplyRetention, now: int) -> _RetentionPlan:
    plan = _RetentionPlan(state, topic, command, now)
    plan.run()
    return plan


class _RetentionPlan:
    """The batches of a topic to remove: the oldest first, across partitions."""

    def __init__(self, state: State, topic: Topic, command: ApplyRetention, now: int) -> None:
        self._state, self._topic, self._command = state, topic, command
        self._excess = (
            sum(topic.partition_bytes) - command.limits.size if command.limits.size else 0
        )
        self._before = state.certain(now) - command.limits.time if command.limits.time else -1
        self._barriers: dict[int, int] = {}
        self.firsts: dict[int, int] = {}
        self.to_copy: list[RetainedMessage] = []
        self.batches = 0

    @property
    def reply(self) -> RetentionReply:
        return RetentionReply(self.batches, tuple(self.to_copy), self.batches >= STEP_BATCHES)

    def run(self) -> None:
        heads = [
            head for number in range(len(self._topic.end_offsets)) for head in self._head(number)
        ]
        heapify(heads)
        while heads and self.batches < STEP_BATCHES:
            _visible_at, partition, base, entry = heappop(heads)
            if not self._is_expired(entry):
                return
            if self._may_remove(partition, base, entry):
                self.firsts[partition] = base + entry.count
                self.batches += 1
                self._excess -= entry.length
                for head in self._head(partition):
                    heappush(heads, head)

    def _head(self, partition: int) -> Iterator[tuple[int, int, int, t.BatchEntry]]:
        topic_id = self._topic.topic_id
        first = self.firsts.get(partition, self._topic.start_offsets[partition])
        row = self._state.entries.get(t.ENTRY_KEY.pack(topic_id, partition, first))
        if row is not None:
            entry = t.BatchEntry._make(row)
            yield entry.visible_at, partition, first, entry

    def _is_expired(self, entry: t.BatchEntry) -> bool:
        lost = entry.position < self._command.oldest
        return lost or self._topic.deleted or entry.stored_at < self._before or self._excess > 0

    def _may_remove(self, partition: int, base: int, entry: t.BatchEntry) -> bool:
        if entry.visible_at > self._command.durable:
            return False
        barrier = self._barriers.get(partition)
        if barrier is None:
            barrier = self._barriers[partition] = self._barrier(partition)
        if base + entry.count <= barrier:
            return True
        if not self._topic.deleted:  # its failed messages end soon
            self._add_copies(partition, base + entry.count)
        return False

    def _barrier(self, partition: int) -> int:
        """Return the first offset that has to stay.

        Its message is not visible yet, acked in an undecided transaction, to be copied,
        or possibly one that a clone in the making still has to process.
        """
        tp = TopicPartition(self._topic.topic_id, partition)
        stays = [visibility.visible_end(self._state, *tp, self._command.durable)]
        for group, position in _readers(self._state, tp):
            stays += [reserved.start for reserved in islice(position.reserved, 1)]
            stays += [row.offset for row in islice(self._rows(group, tp), 1)]
            stays += [position.floor] if group.clone_progress is not None else []
        return min(stays)

    def _add_copies(self, partition: int, end: int) -> None:
        tp = TopicPartition(self._topic.topic_id, partition)
        for group, _position in _readers(self._state, tp):
            for row in self._rows(group, tp):
                if row.offset >= end or len(self.to_copy) >= STEP_COPIES:
                    break
                self.to_copy.append(row)

    def _rows(self, group: ConsumerGroup, tp: TopicPartition) -> Iterator[RetainedMessage]:
        """Yield the failed messages that are not copied yet."""
        start = self._topic.start_offsets[tp[1]]
        for offset, row in scan_failed(self._state, group.group_id, tp, start):
            pin = log_pins.get(self._state, row.position)
            # the pin of a batch goes with the batch
            copied = pin is not None and pin.group_id != log_pins.PUBLISHED_BATCH
            if row.position >= self._command.oldest and not copied:
                yield RetainedMessage(
                    group.group_id, *tp, offset, row.position, row.length, row.row
                )


def _readers(state: State, tp: TopicPartition) -> Iterator[tuple[ConsumerGroup, GroupPosition]]:
    for group in state.groups.by_id.values():
        position = group.positions.get(tp)
        if position is not None:
            yield group, position


def _missed_messages(
    state: State, topic: Topic, firsts: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, int, int]]:
    if topic.deleted:
        return
    for partition, first in firsts:
        for group, position in _readers(state, TopicPartition(topic.topic_id, partition)):
            missed = position.unprocessed_below(first)
            if missed:
                yield group.group_id, partition, missed


def apply_firsts(state: State, event: FirstsMoved, context: RecordContext) -> None:
    topic = state.topics_by_id[event.topic_id]
    for partition, first in event.firsts:
        _drop_entries(state, topic, partition, first)
        topic.start_offsets[partition] = first
        tp = TopicPartition(topic.topic_id, partition)
        for group, position in _readers(state, tp):
            if position.floor < first:
                leases.release_range(state, group, tp, 0, first)
                position.skip_to(first)
    for group_id, partition, missed in event.passed:
        key = t.POSITION_KEY.pack(group_id, topic.topic_id, partition)
        before = state.tables[t.MISSED].get(key)
        state.tables[t.MISSED].put(key, (missed + (before[0] if before else 0), context.stored_at))
    state.dirty_topics.add(topic.topic_id)


def _drop_entries(state: State, topic: Topic, partition: int, first: int) -> None:
    low, high = (
        t.ENTRY_KEY.pack(topic.topic_id, partition, at)
        for at in (topic.start_offsets[partition], first)
    )
    for key, row in list(state.entries.range(low, high)):
        entry = t.BatchEntry._make(row)
        state.entries.delete(key)
        topic.partition_bytes[partition] -= entry.length
        log_pins.drop(state, entry.position)


DECIDERS: Deciders = {ApplyRetention: decide_retain}
APPLIERS: Appliers = {FirstsMoved: apply_firsts}
