"""Redrives: copies of dead letters in a topic, each once.

The copies, their notes and the end of abandoned letters are one record, as all changes
of an operator are (`audit`). A copy is a new message: it has an id of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import key_hashes, read_header, with_producer
from txmq.core.consumers import failures, key_fences
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.letters import LettersRedriven
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes, failed_messages, letter_copies
from txmq.core.state.letter_copies import LetterCopy
from txmq.core.topics import key_order, sends, topics
from txmq.core.topics.sends import StoreBatch, StoreBatches
from txmq.errors import RequestRejected
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.letter_edits import FailedRef
    from txmq.core.state.state import State


class WantedCopy(NamedTuple):
    """A copy to publish in a partition, of a letter as it was when it was read."""

    letter: TopicOffset
    number: int
    edits: int
    partition: int
    batch: bytes


class RedriveLetters(NamedTuple):
    """Publish copies of open letters in the topic `to`, under an unused `producer`.

    `epoch` is the shape of the topic that the partitions are of.
    `abandon`: the letters end in the same record. `again`: also those that this topic
    has a copy of.
    """

    group: str
    to: str
    epoch: int
    copies: tuple[WantedCopy, ...]
    producer: bytes
    abandon: bool
    again: bool
    by: str
    reason: str


class RedriveReply(NamedTuple):
    """Places of letters with partition and offset of their copies, and the refused
    letters with the reason.
    """

    done: tuple[tuple[str, int, int, int, int], ...]
    refused: tuple[tuple[str, int, int, str], ...]


class _Found(NamedTuple):
    ref: MessageRef
    row: FailedMessage
    copy: WantedCopy


def decide_redrive(state: State, command: RedriveLetters, now: int) -> Outcome:
    group = find_group(state, command.group)
    to = topics.find_topic(state, command.to, 0, command.epoch)
    found: list[_Found] = []
    refused: list[tuple[str, int, int, str]] = []
    for copy in command.copies:
        ref, row = failures.find_message(state, group, *copy.letter)
        if reason := _refusal(state, group, ref, row, copy, command):
            refused.append((*copy.letter, reason))
        elif ref is not None and row is not None:
            found.append(_Found(ref, row, copy))
    if not found:
        return Outcome(reply=RedriveReply((), tuple(refused)))
    found.sort(key=lambda one: (one.row.visible_at, one.ref))
    stored = sends.decide_store_batches(state, _sends(command, found), now)
    changes = FailureChanges(state, group, now)
    if command.abandon:
        for ref, row, _copy in found:
            noted = row._replace(copies=row.copies + 1)
            changes.abandon(ref, noted, failures.cut_reason(command.reason))
    receipts: Any = stored.reply  # as all of them were checked, no refusals
    places = [
        (one.copy.partition, receipt.offset) for one, receipt in zip(found, receipts, strict=True)
    ]
    copies = tuple((*one.ref, *place) for one, place in zip(found, places, strict=True))
    moved = changes.fields()
    event = LettersRedriven(
        group.group_id, to.topic_id, copies, *moved, command.by, failures.cut_reason(command.reason)
    )
    done = tuple((*one.copy.letter, *place) for one, place in zip(found, places, strict=True))
    reply = RedriveReply(done, tuple(refused))
    return Outcome((*stored.events, event), reply, stored.attachment)


def _refusal(
    state: State,
    group: ConsumerGroup,
    ref: MessageRef | None,
    row: FailedMessage | None,
    copy: WantedCopy,
    command: RedriveLetters,
) -> str:
    """Return why a letter gets no copy; "" = it gets one."""
    if ref is None or row is None or failures.closed_reason(row):
        return failures.closed_reason(row)
    if (row.number, row.edits) != (copy.number, copy.edits):
        return failures.CHANGED_SINCE
    return failures.held_reason(state, row) or _refusal_of_copy(
        state, (group.group_id, *ref), row.number, copy, command
    )


def _refusal_of_copy(
    state: State, at: FailedRef, number: int, copy: WantedCopy, command: RedriveLetters
) -> str:
    header = read_header(copy.batch)
    try:
        topic = topics.find_writable(state, command.to, copy.partition, 0, header, copy.batch)
    except RequestRejected as refused:
        return refused.message
    if not command.again:
        before = letter_copies.copy_of(state, at, number, topic.topic_id)
        if before is not None:
            return f"it has a copy already: {topic.name}/{before.partition}/{before.offset}"
    hashes = sends.distinct_hashes(key_hashes(copy.batch))
    if state.held_keys[TopicPartition(topic.topic_id, copy.partition)] and key_order.any_held(
        state, topic.topic_id, copy.partition, hashes
    ):
        return "an undecided transaction holds its key: try again later"
    return ""


def _sends(command: RedriveLetters, found: list[_Found]) -> StoreBatches:
    """Return the batches as sends of one producer."""
    batches = [
        with_producer(one.copy.batch, command.producer, sequence)
        for sequence, one in enumerate(found)
    ]
    return StoreBatches(
        tuple(
            StoreBatch(command.to, 0, one.copy.partition, batch, read_header(batch))
            for one, batch in zip(found, batches, strict=True)
        )
    )


def apply_redriven(state: State, event: LettersRedriven, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    for topic_id, partition, offset, to_partition, to_offset in event.copies:
        ref = (topic_id, partition, offset)
        row = failed_messages.get(state, group, ref)
        assert row is not None, "the decision has found it"
        at = (group.group_id, *ref)
        copied = LetterCopy(
            row.number, event.to, to_partition, to_offset, context.stored_at, event.by, event.reason
        )
        letter_copies.add(state, at, row.copies, copied)
        noted = row._replace(copies=row.copies + 1)  # which no index has
        failed_changes.change_fields(state, group.group_id, ref, noted)
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)


DECIDERS: Deciders = {RedriveLetters: decide_redrive}
APPLIERS: Appliers = {LettersRedriven: apply_redriven}
