"""Rows of table `failed`, one for each failed message.

The key is the message's place (group, topic, partition, offset), which stays the same
through retry, dead letter and replay. A row points at the stored batch; nothing is
copied.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state.letter_cells import Letter, LetterState

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import MessageRef
    from txmq.store import tables as t


class FailedKind(IntEnum):
    """State of a failed message; the numbers are on disk."""

    RETRY = 1  # waits for its next delivery, or is leased
    PARKED = 2  # waits behind the fence of its key
    LETTER = 3  # a dead letter
    ABANDONED = 4  # a dead letter that an operator has closed
    LOCAL = 5  # a consumer has it in its local store, and retries it there


DELIVERABLE = (FailedKind.RETRY, FailedKind.PARKED, FailedKind.LOCAL)
CLOSED = (FailedKind.LETTER, FailedKind.ABANDONED)


class FailedMessage(NamedTuple):
    """A row of table `failed`.

    `attempt` is the number of counted deliveries since the last replay, `deaths` the
    number of consumers that were lost with the message (`core/consumers/poison.py`).
    `position`, `length` and `row` point at the message; `visible_at` and `stored_at`
    are those of its batch. `token` is the undecided transaction that acks or replays
    it. `number` is its number among the group's dead letters. `store` is the id of the
    consumer's store that has it, `plan` that of the replay plan that it belongs to
    until its outcome. `edits` is the number of times that its letter was edited: then
    `position` is that of another batch than the published one. `copies` is the number
    of its copies in other topics. `exported` is the time of the export that has this
    death of this version. `trial_by` is the member that alone gets the message, for one
    delivery. `given_by` is the group whose dead letter it is, and by which an operator
    gave it to this one. `accepted`: a handler had it, or it is or was a dead letter, so
    no member's filter may pass it over. What was only parked is not.
    """

    kind: int
    attempt: int
    due: int
    key_hash: int | None
    position: int
    length: int
    row: int
    visible_at: int
    stored_at: int
    consumer: str = ""
    error_type: str = ""
    error_text: str = ""
    fingerprint: str = ""
    first_failed_at: int = 0
    dead_at: int = 0
    number: int = 0
    replays: int = 0
    deaths: int = 0
    token: bytes = b""
    reason: str = ""
    store: bytes = b""
    plan: int = 0
    edits: int = 0
    copies: int = 0
    exported: int = 0
    trial_by: str = ""
    given_by: str = ""
    accepted: bool = False

    @property
    def died_at(self) -> int:
        """Time of its death; of what has not died, that of its first failure."""
        return self.dead_at or self.first_failed_at


class Move(NamedTuple):
    """Part of an event: the new row of a message, wherever the message was before."""

    topic_id: int
    partition: int
    offset: int
    row: FailedMessage


def decode_move(move: Any) -> Move:  # noqa: ANN401  # tuples come back from the log without types
    """Return a `Move` of an event from the log."""
    topic_id, partition, offset, row = move
    return Move(topic_id, partition, offset, FailedMessage(*row))


def new_row(
    entry: t.BatchEntry, row: int, key_hash: int | None, *, attempt: int, deaths: int = 0
) -> FailedMessage:
    """Return the row of a message of a published batch. The caller sets its kind."""
    return FailedMessage(
        FailedKind.RETRY,
        attempt,
        0,
        key_hash,
        entry.position,
        entry.length,
        row,
        entry.visible_at,
        entry.stored_at,
        deaths=deaths,
    )


def given_row(
    letter: FailedMessage, position: int, length: int, row: int, group: str
) -> FailedMessage:
    """Return the row of another group that gets a dead letter of this `group`."""
    return FailedMessage(
        FailedKind.RETRY,
        0,
        0,
        letter.key_hash,
        position,
        length,
        row,
        letter.visible_at,
        letter.stored_at,
        given_by=group,
        accepted=True,
    )


def replayed_row(row: FailedMessage, **changes: Any) -> FailedMessage:  # noqa: ANN401  # fields
    """Return the row of a dead letter that is replayed.

    Attempts and consumer deaths count from zero again; replays go on counting. A plan
    that has ended without it has nothing to do with it any more.
    """
    fields: dict[str, Any] = {"attempt": 0, "deaths": 0, "token": b"", "plan": 0, "reason": ""}
    return row._replace(**(fields | changes), replays=row.replays + 1)


def abandoned_row(row: FailedMessage, reason: str) -> FailedMessage:
    """Return the row of a letter that its plan has abandoned."""
    return row._replace(kind=FailedKind.ABANDONED, plan=0, reason=reason)


def letter_state(row: FailedMessage) -> LetterState | None:
    """Return the state of a dead letter, or of a message that is retried after a
    failure; None = it was postponed, or waits behind another one of its key.
    """
    if row.kind == FailedKind.ABANDONED:
        return LetterState.ABANDONED
    if row.kind == FailedKind.LETTER and not row.token:
        return LetterState.OPEN
    if row.kind == FailedKind.LOCAL:
        return LetterState.LOCAL
    if row.number:
        return LetterState.REPLAYING
    failed = row.kind == FailedKind.RETRY and row.first_failed_at
    return LetterState.RETRYING if failed else None


def letter_of(ref: MessageRef, row: FailedMessage) -> Letter | None:
    """Return what the index of letters knows of a message; None = it is no letter."""
    state = letter_state(row)
    return (
        None
        if state is None
        else Letter(
            state,
            *ref,
            row.died_at,
            row.number,
            row.key_hash,
            row.error_type,
            row.fingerprint,
            row.replays,
        )
    )
