"""Views of dead letters and other failed messages: answers for operators, in JSON
values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import failures
from txmq.core.consumers.authorization import find_group
from txmq.core.state import (
    attempts,
    failed_messages,
    failed_rows,
    letter_copies,
    letter_edits,
    local_stores,
    plan_letters,
)
from txmq.core.state.failed_rows import CLOSED, FailedKind, FailedMessage
from txmq.core.state.letter_cells import LetterState
from txmq.errors import BadRequest
from txmq.model.measures import counted
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State


MAX_PASSED = 10_000  # letters that a page looks at


class LetterView(NamedTuple):
    """A failed message: the location of its batch, and its other fields."""

    position: int
    length: int
    row: int
    fields: dict[str, Any]


def list_letters(
    state: State, name: str, after: int, limit: int
) -> tuple[list[LetterView], int | None]:
    """Return a page of dead letters in the order of their deaths, and the next page's
    `after`.

    Abandoned letters are included. The second value is None after the last page. A page
    may be short, or empty, where plans have put back very many letters.
    """
    group = find_group(state, name)
    page: list[tuple[MessageRef, FailedMessage]] = []
    following: int | None = None
    for passed, (number, found) in enumerate(_letters(state, group, after), 1):
        if found is not None:
            page.append(found)
        if len(page) == limit or passed == MAX_PASSED:
            following = number
            break
    return [view_of(state, group, *item) for item in page], following


def _letters(
    state: State, group: ConsumerGroup, after: int = 0
) -> Iterator[tuple[int, tuple[MessageRef, FailedMessage] | None]]:
    """Yield the numbers of letters, each with its letter if it is closed."""
    start, stop = (
        t.LETTER_KEY.pack(group.group_id, after + 1),
        t.LETTER_KEY.pack(group.group_id, t.SIGN),
    )
    rows: Any = state.letters.range(start, stop)
    for key, ref in rows:
        row = failed_messages.get(state, group, tuple(ref))
        # its topic is there, its plan has not put it back, nor is it processed and not
        # swept yet
        is_closed = (
            row is not None and row.kind in CLOSED and not state.topics_by_id[ref[0]].deleted
        )
        yield t.LETTER_KEY.unpack(key)[1], (tuple(ref), row) if is_closed and row else None


def describe_letter(
    state: State, name: str, topic: str, partition: int, offset: int, version: int | None = None
) -> LetterView:
    """Describe one dead letter, or another failed message, with its history, found by
    the place of its message.

    The location is that of one `version` of its message, by default of the newest.
    """
    group = find_group(state, name)
    ref, row = failures.find_message(state, group, topic, partition, offset)
    if ref is None or row is None:
        raise failures.unknown_letter(group, (topic, partition, offset))
    letter = view_of(state, group, ref, row)
    failed = attempts.get(state, group, ref)
    letter.fields["failures"] = failed.failures
    letter.fields["history"] = [attempt._asdict() for attempt in failed.attempts]
    versions = dict(letter_edits.versions(state, (group.group_id, *ref))) if row.edits else {}
    letter.fields["versions"] = [
        {
            "number": number,
            "at": one.at or row.stored_at,
            "by": one.by,
            "reason": one.reason,
            "reverts": one.reverts,
        }
        for number, one in versions.items()
    ]
    copied = letter_copies.copies(state, (group.group_id, *ref)) if row.copies else ()
    letter.fields["copies"] = [
        one._asdict()
        | {"topic": _name_of(state, one.topic_id), "group": _group_of(state, one.group_id)}
        for one in copied
    ]
    if version in (None, row.edits):
        return letter
    if version not in versions:
        message = f"the letter has no version {version}: it was edited {counted(row.edits, 'time')}"
        raise BadRequest(message, hint="see its versions: txmq dlq show")
    return letter._replace(
        position=versions[version].position, length=versions[version].length, row=0
    )


def _group_of(state: State, group_id: int) -> str | None:
    group = state.groups.by_id.get(group_id)
    return None if group is None else group.name


def _name_of(state: State, topic_id: int) -> str:
    topic = state.topics_by_id.get(topic_id)
    return "" if topic is None else topic.name


def view_of(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> LetterView:
    """Describe a letter of a group."""
    topic_id, partition, offset = ref
    fence = group.fence(topic_id, row.key_hash)
    plan = plan_letters.holder(state, row.plan)
    fields = {
        "group": group.name,
        "topic": state.topics_by_id[topic_id].name,
        "partition": partition,
        "offset": offset,
        "number": row.number,
        "state": _state(row),
        "attempts": row.attempt,
        "replays": row.replays,
        "deaths": row.deaths,
        "error_type": row.error_type,
        "error_text": row.error_text,
        "fingerprint": row.fingerprint,
        "consumer": row.consumer,
        "next_at": _next_at(group, ref, row),
        "held_by": _holder(state, group, ref, row),
        "first_failed_at": row.first_failed_at,
        "dead_at": row.dead_at,
        "stored_at": row.stored_at,
        "key_hash": row.key_hash,
        "parked_behind": 0 if fence is None or fence.offset != offset else fence.parked,
        "reserved_by": row.token.hex() or None,
        "reason": row.reason,
        "edits": row.edits,
        "exported_at": row.exported,
        "trial_by": row.trial_by,
        "given_by": row.given_by,
        "plan": None if plan is None else plan.name,
    }
    return LetterView(row.position, row.length, row.row, fields)


def _next_at(group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> int:
    """Return when a message has its next attempt; 0 = it does not wait for one."""
    waits = row.kind in (FailedKind.RETRY, FailedKind.LOCAL) and ref not in group.leased_rows
    return row.due if waits else 0


def _holder(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> str:
    """Return in words which consumer has a message; "" = it waits at the broker."""
    if ref in group.leased_rows:
        return f"{group.leases[group.leased_rows[ref]].member}, in hand"
    if row.kind != FailedKind.LOCAL:
        return ""
    store = group.stores[row.store]
    at = f" on {store.host}" if store.host else ""
    found = f"{store.member or 'a consumer that is gone'}{at}, local store {row.store.hex()}"
    if store.adopted:
        return f"{found}, being adopted"
    if not group.has_owner(store):
        return f"{found}, which has no owner"
    ordered = local_stores.order_of(state, group, row.store, ref) is not None
    return f"{found}, ordered to retry it now" if ordered else found


def row_state(row: FailedMessage) -> str:
    """Return the state of any failed message in words."""
    known = failed_rows.letter_state(row) not in (None, LetterState.RETRYING)
    if known or row.kind == FailedKind.LETTER:
        return _state(row)
    return "parked behind its key" if row.kind == FailedKind.PARKED else "waits for a retry"


def _state(row: FailedMessage) -> str:
    """Return the state of a failed message in a reply. A dead letter stays "dead" while
    an undecided transaction replays it.
    """
    if row.kind == FailedKind.LETTER:
        return "dead"
    state = failed_rows.letter_state(row)
    if state is None:
        return "parked" if row.kind == FailedKind.PARKED else "retrying"
    return state.name.lower()
