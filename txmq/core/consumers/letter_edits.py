"""Edits of failed messages: another version of the message, for its group alone.

    CopyMessages ─► MessagesCopied ─► durable ─► EditLetter ─► LetterEdited

The versions are stored first, as retention stores copies of messages, so that no row
ever points at a batch that is not on disk. What was published stays as it is. What a
consumer's store has is taken back from it: the broker retries the new version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures, retries
from txmq.core.consumers.authorization import find_group
from txmq.core.events.letters import LetterEdited
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import (
    failed_changes,
    failed_messages,
    failed_rows,
    letter_edits,
    local_stores,
    log_pins,
)
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.letter_edits import LetterVersion
from txmq.errors import BadRequest, Conflict

if TYPE_CHECKING:
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import LogSpan, RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State

MAX_EDITS = 100  # of one letter: each is kept
MAX_REASON_BYTES = 1_024


class EditLetter(NamedTuple):
    """Point an open letter, or a message that waits for its next attempt, at a durable
    version of its message.

    `expected` is the number of edits that the caller knows of. `version` None = the
    original again. The first edit has the copy of what was published as `original`.
    """

    group: str
    letter: TopicOffset
    expected: int
    version: LogSpan | None
    original: LogSpan | None
    by: str
    reason: str


class EditReply(NamedTuple):
    """The number of the version that the letter has now."""

    edits: int


class OpenLetter(NamedTuple):
    """A letter, or a message that is retried, that may be edited."""

    group: ConsumerGroup
    ref: MessageRef
    row: FailedMessage


def find_open(state: State, name: str, letter: TopicOffset, expected: int) -> OpenLetter:
    """Return the letter that an edit concerns, if it can be edited."""
    group = find_group(state, name)
    ref, row = failures.find_message(state, group, *letter)
    if ref is None or row is None:
        raise failures.unknown_letter(group, letter)
    place = "{}/{}/{}".format(*letter)
    if reason := _refusal(state, group, ref, row):
        raise Conflict(
            f"message {place} of {name!r} cannot be edited: {reason}",
            hint="an open letter, or a message that waits for a retry, in no unfinished plan can "
            "be: txmq dlq show",
        )
    if row.edits != expected:
        raise Conflict(
            f"message {place} of {name!r} was edited meanwhile: {row.edits} edits, not {expected}",
            hint="look at it again (txmq dlq show), then edit it",
            detail={"edits": row.edits},
        )
    return OpenLetter(group, ref, row)


def _refusal(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> str:
    if row.kind in failed_rows.CLOSED:
        reason = failures.closed_reason(row)
    else:
        reason = retries.waiting_refusal(state, group, ref, row)
    return reason or failures.held_reason(state, row)


def refuse_edit(state: State, found: OpenLetter, *, reverts: bool) -> None:
    """Refuse an edit where there can be no further version."""
    edits = found.row.edits
    newest = letter_edits.version(state, (found.group.group_id, *found.ref), edits)
    if reverts and (newest is None or newest.reverts):
        done = "it was never edited" if newest is None else "it is what was published again"
        raise BadRequest(done, hint="there is nothing to revert: txmq dlq show")
    if edits >= MAX_EDITS:
        raise BadRequest(
            f"it has {edits} edits, the maximum",
            hint="send its message anew (txmq dlq redrive), and abandon the letter",
        )


def decide_edit(state: State, command: EditLetter, _now: int) -> Outcome:
    found = find_open(state, command.group, command.letter, command.expected)
    reverts = command.version is None
    refuse_edit(state, found, reverts=reverts)
    group, ref, row = found
    assert row.edits or command.original is not None, "the first edit keeps the original"
    span = command.version
    if span is None:
        original = letter_edits.version(state, (group.group_id, *ref), letter_edits.ORIGINAL)
        assert original is not None, "an edited letter has it"
        span = original.position, original.length
    kept = () if row.edits or command.original is None else command.original
    reason = failures.cut_reason(command.reason)[:MAX_REASON_BYTES]
    event = LetterEdited(group.group_id, *ref, *span, kept, command.by, reason, reverts)
    return Outcome((event,), EditReply(row.edits + 1))


def apply_edited(state: State, event: LetterEdited, context: RecordContext) -> None:
    at = (event.group_id, event.topic_id, event.partition, event.offset)
    group = state.groups.by_id[event.group_id]
    row = failed_messages.get(state, group, at[1:])
    assert row is not None, "the decision has found it"
    if event.original:
        pin = log_pins.get(state, row.position)
        if pin is not None and pin.group_id != log_pins.PUBLISHED_BATCH:
            log_pins.drop(state, row.position)  # of the copy that retention made
        letter_edits.put(state, at, letter_edits.ORIGINAL, LetterVersion(*event.original))
    if row.kind == FailedKind.LETTER and row.exported:  # an export has another version
        group.exported_letters -= 1
        state.groups.dirty_groups.add(group.group_id)
    number, span = row.edits + 1, (event.position, event.length)
    letter_edits.put(
        state,
        at,
        number,
        LetterVersion(*span, context.stored_at, event.by, event.reason, event.reverts),
    )
    edited = row._replace(
        position=event.position, length=event.length, row=0, edits=number, exported=0
    )
    if row.kind == FailedKind.LETTER:
        # Only the position changes: the indexes of the row stay as they are.
        failed_changes.change_fields(state, group.group_id, at[1:], edited)
        return
    failed_changes.drop(state, group, at[1:])
    failed_changes.put(state, group, at[1:], edited._replace(kind=FailedKind.RETRY, store=b""))
    if row.kind == FailedKind.LOCAL:
        local_stores.take_back(state, group, at[1:], row.store)


DECIDERS: Deciders = {EditLetter: decide_edit}
APPLIERS: Appliers = {LetterEdited: apply_edited}
