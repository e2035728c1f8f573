"""Notes of operators on fingerprints of dead letters, and selections by name.

A note belongs to a group and a fingerprint, and goes with the group. A selection
belongs to no group. Its text is JSON that the broker has checked; the core keeps it.
Where there are users, only its author and admins replace or remove it: others act on
letters by its name, and rely on what it selects.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers.authorization import find_group
from txmq.core.events.consumers import FingerprintNoted, SelectionSaved
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.errors import BadRequest, NotPermitted
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.state import State

MAX_NOTES = 1_000  # of one group
MAX_SELECTIONS = 1_000
MAX_NAME_BYTES = 256  # of a fingerprint, as in rows of failed messages


class NoteFingerprint(NamedTuple):
    """Keep a note on a fingerprint; "" removes it."""

    group: str
    fingerprint: str
    text: str
    by: str = ""


class SaveSelection(NamedTuple):
    """Keep a selection by its name; "" removes it. `user` is who asks, "" where there
    are no users.
    """

    name: str
    text: str
    by: str = ""
    user: str = ""


class Note(NamedTuple):
    """A row of tables `letter_notes` and `selections`: a text and its author."""

    text: str
    by: str
    at: int

    @property
    def author(self) -> str:
        """Author of the note: `by` has the reason as well."""
        return self.by.partition(":")[0]


def decide_note(state: State, command: NoteFingerprint, _now: int) -> Outcome:
    group = find_group(state, command.group)
    if len(command.fingerprint.encode()) > MAX_NAME_BYTES:
        message = f"a fingerprint has at most {MAX_NAME_BYTES} bytes"
        raise BadRequest(message, hint="see the fingerprints: txmq dlq stats")
    key = _note_key(group, command.fingerprint)
    if not command.text and state.tables[t.LETTER_NOTES].get(key) is None:
        message = f"group {group.name!r} has no note on fingerprint {command.fingerprint!r}"
        raise BadRequest(message, hint="see the notes: txmq dlq stats")
    if command.text and state.tables[t.LETTER_NOTES].get(key) is None:
        full = sum(1 for _ in islice(notes_of(state, group), MAX_NOTES)) == MAX_NOTES
        if full:
            message = f"group {group.name!r} has {MAX_NOTES} notes already"
            raise BadRequest(message, hint="remove old ones: txmq dlq note --delete")
    return Outcome(
        (FingerprintNoted(group.group_id, command.fingerprint, command.text, command.by),)
    )


def apply_noted(state: State, event: FingerprintNoted, context: RecordContext) -> None:
    key = t.GROUP_KEY.pack(event.group_id) + event.fingerprint.encode()
    if event.text:
        note = Note(event.text, event.by, context.stored_at)
        state.tables[t.LETTER_NOTES].put(key, tuple(note))
    else:
        state.tables[t.LETTER_NOTES].delete(key)


def notes_of(state: State, group: ConsumerGroup) -> Iterator[tuple[str, Note]]:
    """Yield the notes of a group by fingerprint."""
    start, stop = (t.GROUP_KEY.pack(at) for at in (group.group_id, group.group_id + 1))
    rows: Any = state.tables[t.LETTER_NOTES].range(start, stop)
    for key, row in rows:
        yield key[len(start) :].decode(), Note(*row)


def text_of(state: State, group: ConsumerGroup, fingerprint: str) -> str:
    """Return the note on a fingerprint; "" = there is none."""
    row: Any = state.tables[t.LETTER_NOTES].get(_note_key(group, fingerprint))
    return "" if row is None else Note(*row).text


def forget_notes(state: State, group: ConsumerGroup) -> None:
    """Apply: the group is deleted."""
    for fingerprint, _note in list(notes_of(state, group)):
        state.tables[t.LETTER_NOTES].delete(_note_key(group, fingerprint))


def _note_key(group: ConsumerGroup, fingerprint: str) -> bytes:
    return t.GROUP_KEY.pack(group.group_id) + fingerprint.encode()


def decide_save(state: State, command: SaveSelection, _now: int) -> Outcome:
    known = selection_of(state, command.name)
    if known is None and not command.text:
        raise BadRequest(f"there is no selection {command.name!r}", hint="see txmq dlq select list")
    if known is not None and not state.users.may_act_for(command.user, known.author):
        raise NotPermitted(
            f"selection {command.name!r} is of user {known.author!r}",
            hint="save yours under another name, or ask this user or an admin",
        )
    full = sum(1 for _ in islice(selections(state), MAX_SELECTIONS)) == MAX_SELECTIONS
    if known is None and full:
        message = f"there are {MAX_SELECTIONS} selections already"
        raise BadRequest(message, hint="delete old ones: txmq dlq select delete")
    return Outcome((SelectionSaved(command.name, command.text, command.by),))


def apply_saved(state: State, event: SelectionSaved, context: RecordContext) -> None:
    key = event.name.encode()
    if event.text:
        note = Note(event.text, event.by, context.stored_at)
        state.tables[t.SELECTIONS].put(key, tuple(note))
    else:
        state.tables[t.SELECTIONS].delete(key)


def selections(state: State) -> Iterator[tuple[str, Note]]:
    """Yield the saved selections by name."""
    rows: Any = state.tables[t.SELECTIONS].range(b"")
    for key, row in rows:
        yield key.decode(), Note(*row)


def selection_of(state: State, name: str) -> Note | None:
    """Return a saved selection."""
    row: Any = state.tables[t.SELECTIONS].get(name.encode())
    return None if row is None else Note(*row)


DECIDERS: Deciders = {NoteFingerprint: decide_note, SaveSelection: decide_save}
APPLIERS: Appliers = {FingerprintNoted: apply_noted, SelectionSaved: apply_saved}
