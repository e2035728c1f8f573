"""Redrives of dead letters to another group, which gets the messages themselves.

The other group's row points at the batch in the topic, or at a copy where the topic has
the message no more, or as it was published. The letter, its note and the new row change
in one record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures, key_fences
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.base import LogSpan
from txmq.core.events.letters import LettersGiven
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes, failed_messages, failed_rows, letter_copies, log_pins
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.letter_copies import LetterCopy
from txmq.core.topics import topics
from txmq.errors import BadRequest
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State


class GivenLetter(NamedTuple):
    """A letter as it was when it was read. `span` is its durable copy; None = it is in
    its topic as it is.
    """

    letter: TopicOffset
    number: int
    edits: int
    span: LogSpan | None = None


class GiveLetters(NamedTuple):
    """Deliver open letters of a group to another one, too.

    `abandon`: the letters end in the same record. `again`: also those that this group
    was given before.
    """

    group: str
    to: str
    letters: tuple[GivenLetter, ...]
    abandon: bool
    again: bool
    by: str
    reason: str


class GivenReply(NamedTuple):
    """Places of letters with partition and offset of what the group gets, and the
    refused letters with the reason.
    """

    done: tuple[tuple[str, int, int, int, int], ...]
    refused: tuple[tuple[str, int, int, str], ...]


def find_groups(state: State, name: str, to: str) -> tuple[ConsumerGroup, ConsumerGroup]:
    """Return the group with the letters, and the one that is to get them."""
    group, other = find_group(state, name), find_group(state, to)
    if group is other:
        message = f"group {name!r} has these letters already"
        raise BadRequest(message, hint="replay them: txmq dlq replay")
    if other.parent or other.settings.mode == "broadcast":
        message = f"{to!r} is a broadcast group"
        raise BadRequest(message, hint="name a group whose members share messages")
    return group, other


def in_topic(state: State, ref: MessageRef, row: FailedMessage) -> bool:
    """Return True if a letter is in its topic as it is."""
    found = topics.entry_at(state, *ref)
    return any((entry.position, ref[2] - base) == (row.position, row.row) for base, entry in found)


def decide_give(state: State, command: GiveLetters, now: int) -> Outcome:
    group, other = find_groups(state, command.group, command.to)
    given: list[tuple[MessageRef, FailedMessage, GivenLetter]] = []
    refused: list[tuple[str, int, int, str]] = []
    for one in command.letters:
        ref, row = failures.find_message(state, group, *one.letter)
        why = failures.closed_reason(row)
        if ref is not None and row is not None and not why:
            why = _refusal(state, (group, other), ref, row, one, command)
            if not why:
                given.append((ref, row, one))
        if why:
            refused.append((*one.letter, why))
    given.sort(key=lambda item: (item[1].visible_at, item[0]))
    theirs, ours = FailureChanges(state, other, now), FailureChanges(state, group, now)
    done: list[tuple[MessageRef, GivenLetter]] = []
    for ref, row, one in given:
        head = theirs.dead_head(ref, row.key_hash)
        if head is not None:
            refused.append((*one.letter, f"{failures.behind(state, head)} in {other.name}"))
            continue
        theirs.retry(ref, _new_row(row, one, group), now)
        if command.abandon:
            noted = row._replace(copies=row.copies + 1)
            ours.abandon(ref, noted, failures.cut_reason(command.reason))
        done.append((ref, one))
    reply = GivenReply(
        tuple((*one.letter, *ref[1:]) for ref, one in done),
        tuple(refused),
    )
    if not done:
        return Outcome(reply=reply)
    event = LettersGiven(
        group.group_id,
        other.group_id,
        tuple((*ref, one.span is not None) for ref, one in done),
        theirs.fields(),
        ours.fields(),
        command.by,
        failures.cut_reason(command.reason),
    )
    return Outcome((event,), reply)


def _refusal(
    state: State,
    groups: tuple[ConsumerGroup, ConsumerGroup],
    ref: MessageRef,
    row: FailedMessage,
    one: GivenLetter,
    command: GiveLetters,
) -> str:
    """Return why the other group does not get a letter; "" = it does."""
    group, other = groups
    if held := failures.held_reason(state, row):
        return held
    if (row.number, row.edits) != (one.number, one.edits):
        return failures.CHANGED_SINCE
    if one.span is None and not in_topic(state, ref, row):
        return "its topic has it no more: try again"
    at = (group.group_id, *ref)
    if not command.again and letter_copies.was_given(state, at, row.number, other.group_id):
        return f"group {other.name} was given it already"
    return _place_in(state, other, ref)


def _place_in(state: State, other: ConsumerGroup, ref: MessageRef) -> str:
    """Return why the other group is not given a message that it still has; "" = it has
    processed or skipped it.
    """
    position = other.positions.get(TopicPartition(ref[0], ref[1]))
    if position is None:
        return f"group {other.name} does not read its partition"
    row = failed_messages.get(state, other, ref)
    if row is not None:
        kind = FailedKind(row.kind).name.lower()
        return f"group {other.name} has it as a failed message: {kind}"
    start, end = ref[2], ref[2] + 1
    ways = (position.leased, position.redeliver, position.reserved)
    if start >= position.cursor or any(True for way in ways for _ in way.overlap(start, end)):
        return f"group {other.name} gets it anyway: it has not processed it yet"
    return ""


def _new_row(row: FailedMessage, one: GivenLetter, group: ConsumerGroup) -> FailedMessage:
    """Return the row of the other group, in which nothing has failed so far."""
    position, length, at = (row.position, row.length, row.row)
    if one.span is not None:
        position, length, at = (*one.span, 0)
    return failed_rows.given_row(row, position, length, at, group.name)


def apply_given(state: State, event: LettersGiven, context: RecordContext) -> None:
    group, other = state.groups.by_id[event.group_id], state.groups.by_id[event.to]
    for topic_id, partition, offset, _is_copy in event.letters:
        ref = (topic_id, partition, offset)
        row = failed_messages.get(state, group, ref)
        assert row is not None, "the decision has found it"
        at = (group.group_id, *ref)
        copied = LetterCopy(
            row.number, topic_id, partition, offset, context.stored_at, event.by, event.reason,
            other.group_id,
        )  # fmt: skip
        letter_copies.add(state, at, row.copies, copied)
        noted = row._replace(copies=row.copies + 1)  # which no index has
        failed_changes.change_fields(state, group.group_id, ref, noted)
    key_fences.apply_changes(state, other, *event.theirs, context.stored_at)
    for topic_id, partition, offset, is_copy in event.letters:
        ref = (topic_id, partition, offset)
        row = failed_messages.get(state, other, ref)
        if is_copy and row is not None:
            log_pins.put(state, row.position, other.group_id, *ref)
    key_fences.apply_changes(state, group, *event.ours, context.stored_at)


DECIDERS: Deciders = {GiveLetters: decide_give}
APPLIERS: Appliers = {LettersGiven: apply_given}
