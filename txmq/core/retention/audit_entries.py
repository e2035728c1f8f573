"""Relocation of messages of the audit topic, which outlive the segments around them.

    CopyMessages ─► MessagesCopied ─► durable ─► MoveEntries ─► AuditMoved

Topics share the log, so that a few messages that are kept for a year would keep all of
it. Each message of the audit topic has a log pin. One that holds a segment alone is
copied, and its entry points at the copy; its offset and its time stay. So do failed
messages of groups that read the topic: their rows point at the same batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.audit import AuditMoved
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes, failed_messages, log_pins
from txmq.model.own_topics import AUDIT
from txmq.model.topic_partition import TopicPartition
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.log_pins import LogPin
    from txmq.core.state.state import State


class AuditEntryAt(NamedTuple):
    """A message of the audit topic that has to go elsewhere: its pin, and the length of
    its batch.
    """

    pin: LogPin
    length: int


class MoveEntries(NamedTuple):
    """Point entries at their durable copies: (pin, position of the copy)."""

    moved: tuple[tuple[LogPin, int], ...]


def entry_of_pin(state: State, pin: LogPin) -> AuditEntryAt | None:
    """Return the message of the audit topic that a pin stands for; None = it stands for
    something else.
    """
    topic = state.topics.get(AUDIT)
    if topic is None or (pin.group_id, pin.topic_id) != (
        log_pins.PUBLISHED_BATCH,
        topic.topic_id,
    ):
        return None
    entry = _entry(state, pin)
    return None if entry is None else AuditEntryAt(pin, entry.length)


def _entry(state: State, pin: LogPin) -> t.BatchEntry | None:
    """Return the entry of a pin, if it is still there."""
    row: Any = state.entries.get(t.ENTRY_KEY.pack(pin.topic_id, pin.partition, pin.offset))
    entry = None if row is None else t.BatchEntry._make(row)
    return entry if entry is not None and entry.position == pin.position else None


def decide_move(state: State, command: MoveEntries, _now: int) -> Outcome:
    """Move the entries that retention has not removed meanwhile."""
    moved = tuple(
        (pin.offset, pin.position, to)
        for pin, to in command.moved
        if _entry(state, pin) is not None
    )
    topic_id = command.moved[0][0].topic_id
    return Outcome((AuditMoved(topic_id, moved),) if moved else ())


def apply_moved(state: State, event: AuditMoved, _context: RecordContext) -> None:
    tp = TopicPartition(event.topic_id, 0)
    readers = [group for group in state.groups.by_id.values() if tp in group.positions]
    for offset, before, position in event.messages:
        key = t.ENTRY_KEY.pack(*tp, offset)
        row: Any = state.entries.get(key)
        assert row is not None, "the decision has found it"
        state.entries.put(key, t.BatchEntry._make(row)._replace(position=position))
        log_pins.drop(state, before)
        log_pins.put(state, position, log_pins.PUBLISHED_BATCH, *tp, offset)
        for group in readers:
            ref = (*tp, offset)
            failed = failed_messages.stored(state, group.group_id, ref)
            if failed is not None and failed.position == before:
                moved = failed._replace(position=position)
                failed_changes.change_fields(state, group.group_id, ref, moved)


DECIDERS: Deciders = {MoveEntries: decide_move}
APPLIERS: Appliers = {AuditMoved: apply_moved}
