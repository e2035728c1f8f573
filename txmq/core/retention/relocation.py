"""Relocation of failed messages whose batch expires: retrying ones, parked ones, dead
letters.

    CopyMessages ─► MessagesCopied ─► durable ─► RepointMessages ─► RowsRepointed

A copy has a log pin: its position is needed as long as the message's row points at it.
So has each version of an edited message, and is copied again in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.topics import MessagesCopied, RowsRepointed
from txmq.core.state import failed_changes, failed_messages, letter_edits, log_pins
from txmq.core.state.failed_rows import FailedMessage
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State
    from txmq.model.topic_partition import TopicPartition

STEP_COPIES = 64  # messages copied by one command


class RetainedMessage(NamedTuple):
    """A failed message whose batch or copy has to go, and its position."""

    group_id: int
    topic_id: int
    partition: int
    offset: int
    position: int
    length: int
    row: int


class CopyMessages(NamedTuple):
    """Store copies, each a batch of one row. Applying the event gives their
    positions.
    """

    batches: tuple[bytes, ...]


class RepointMessages(NamedTuple):
    """Point rows at their durable copies: (message, position, length). `stale` are
    positions of log pins to remove.
    """

    rows: tuple[tuple[RetainedMessage, int, int], ...]
    stale: tuple[int, ...] = ()


def scan_failed(
    state: State, group_id: int, tp: TopicPartition, start: int
) -> Iterator[tuple[int, FailedMessage]]:
    """Yield a group's failed messages of a partition from offset `start` on."""
    low, high = (t.FAILED_KEY.pack(group_id, *tp, offset) for offset in (start, t.SIGN))
    rows: Any = state.tables[t.FAILED].range(low, high)
    for key, row in rows:
        yield t.FAILED_KEY.unpack(key)[3], FailedMessage(*row)


def decide_copy(_state: State, command: CopyMessages, _now: int) -> Outcome:
    return Outcome(
        (MessagesCopied(tuple(map(len, command.batches))),), None, b"".join(command.batches)
    )


def apply_copied(state: State, event: MessagesCopied, context: RecordContext) -> None:
    """Change nothing: the copies count once `RowsRepointed` follows."""


def decide_repoint(state: State, command: RepointMessages, _now: int) -> Outcome:
    """Repoint the rows that were not acked, replayed or copied meanwhile."""
    rows = tuple(
        (*message[:4], position, length)
        for message, position, length in command.rows
        if _position(state, message[:4]) == message.position
    )
    versions = tuple(
        (*message[:5], position, length)
        for message, position, length in command.rows
        if letter_edits.at_position(state, message[:4], message.position)
    )
    gone = tuple(
        pin.position
        for pin in (log_pins.get(state, at) for at in command.stale)
        if pin and is_stale_pin(state, pin)
    )
    return Outcome((RowsRepointed(rows, gone, versions),) if rows or gone or versions else ())


def _position(state: State, key: tuple[int, int, int, int]) -> int | None:
    row = failed_messages.stored(state, key[0], key[1:])
    return None if row is None else row.position


def is_stale_pin(state: State, pin: log_pins.LogPin) -> bool:
    """Return whether the message of a pin is gone, or has neither its row nor a version
    there by now.

    Pins of batches are removed with their batches.
    """
    return (
        pin.group_id != log_pins.PUBLISHED_BATCH
        and _position(state, pin[1:]) != pin.position
        and letter_edits.at_position(state, pin[1:], pin.position) is None
    )


def message_of_pin(state: State, pin: log_pins.LogPin) -> RetainedMessage | None:
    """Return the message whose copy or version is pinned, so that it can be copied
    again.
    """
    found = failed_messages.stored(state, pin.group_id, pin[2:])
    if pin.group_id == log_pins.PUBLISHED_BATCH or found is None:
        return None
    if found.position != pin.position:
        version = letter_edits.at_position(state, pin[1:], pin.position)
        assert version is not None, "the pin is not stale"
        return RetainedMessage(*pin[1:], version.position, version.length, 0)
    return RetainedMessage(*pin[1:], found.position, found.length, found.row)


def apply_repointed(state: State, event: RowsRepointed, _context: RecordContext) -> None:
    # Only positions change: the indexes of the rows stay as they are.
    for group_id, topic_id, partition, offset, former, position, length in event.versions:
        log_pins.drop(state, former)
        at = (group_id, topic_id, partition, offset)
        letter_edits.repoint(state, at, former, position, length)
    for group_id, topic_id, partition, offset, position, length in event.rows:
        ref = (topic_id, partition, offset)
        row = failed_messages.stored(state, group_id, ref)
        assert row is not None, "the decision has found it"
        _drop_own_pin(state, row.position)
        moved = row._replace(position=position, length=length, row=0)
        failed_changes.change_fields(state, group_id, ref, moved)
        log_pins.put(state, position, group_id, *ref)
    for position in event.unpinned:
        log_pins.drop(state, position)


def _drop_own_pin(state: State, position: int) -> None:
    """Apply: remove the pin of a copy, not that of a published batch."""
    pin = log_pins.get(state, position)
    if pin is not None and pin.group_id != log_pins.PUBLISHED_BATCH:
        log_pins.drop(state, position)


DECIDERS: Deciders = {CopyMessages: decide_copy, RepointMessages: decide_repoint}
APPLIERS: Appliers = {MessagesCopied: apply_copied, RowsRepointed: apply_repointed}
