"""The audit topic: a message for each change that an operator made.

The change and its message are one record, so that neither can be without the other. A
command that changes nothing, or is refused, leaves no message, but for those that are
`Noted`.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import encode_one
from txmq.core.events.audit import AuditStored, OperatorActed
from txmq.core.events.base import KINDS
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.topics import TopicAltered, TopicCreated
from txmq.core.state import log_pins
from txmq.core.state.state import FIRST_OWN_ID, TopicSettings
from txmq.core.topics import lost_batches
from txmq.errors import RequestRejected
from txmq.model import limits
from txmq.model.message import Message
from txmq.model.own_topics import AUDIT
from txmq.model.units import DAY
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import Event, RecordContext
    from txmq.core.state.state import State

AUDIT_TOPIC_ID = FIRST_OWN_ID
RETENTION = 365 * DAY
SETTINGS = TopicSettings(retention_us=RETENTION, retention_bytes=0, flush="sync", writable=False)
MAX_PLACES = 1_000  # messages that are named in an entry
MAX_BODY = 128 << 10  # bytes of an entry; what it has no room for is left out, and said
MAX_TEXT = 16 << 10  # bytes of JSON of a reason, where an entry is too large
PRODUCER = b"txmqaudt"  # of message ids, with the time when the topic was made


class AuditEntry(NamedTuple):
    """Call of an operator, and why it was made. `about` is the key of the message.

    `arguments` are those of the call, without contents of messages. `via` is "console"
    for calls of that.
    """

    operator: str
    call: str
    about: str
    reason: str
    arguments: dict[str, Any]
    via: str = ""


class Audited(NamedTuple):
    """A command of an operator. Its changes are recorded with a message of the audit
    topic.
    """

    command: Any
    entry: AuditEntry


class Noted(NamedTuple):
    """A command that changes nothing of the state, and leaves its message all the same:
    what an operator has the process do.
    """


def topic_events(state: State) -> tuple[Event, ...]:
    """Return the events that make the audit topic, if there is none."""
    topic = state.topics.get(AUDIT)
    if topic is not None:
        return ()
    return (
        TopicCreated(AUDIT_TOPIC_ID, AUDIT, partitions=1, epoch=1),
        TopicAltered(AUDIT_TOPIC_ID, SETTINGS),
    )


def decide_audited(state: State, audited: Audited, now: int, deciders: Deciders) -> Outcome:
    """Decide a command, and add the audit message to what it changes."""
    command = audited.command
    is_noted = isinstance(command, Noted)
    made = Outcome() if is_noted else deciders[type(command)](state, command, now)
    if not (made.events or is_noted):
        return made
    before = topic_events(state)
    topic = state.topics.get(AUDIT)
    topic_id, offset = (
        (AUDIT_TOPIC_ID, 0) if topic is None else (topic.topic_id, topic.end_offsets[0])
    )
    batch = _batch(audited.entry, made.reply, offset, now if topic is None else topic.made_at, now)
    parts: list[tuple[int, tuple[Any, ...], int]] = []
    attached = len(made.attachment)
    for one in made.events:
        parts.append((KINDS[type(one)], tuple(one), attached))
        attached = 0
    parts += [(KINDS[type(one)], tuple(one), 0) for one in before]
    stored = AuditStored(topic_id, offset, len(batch))
    parts.append((KINDS[AuditStored], tuple(stored), len(batch)))
    return made._replace(
        events=(OperatorActed(tuple(parts)),), attachment=made.attachment + batch, early=False
    )


def _batch(entry: AuditEntry, reply: object, offset: int, made_at: int, now: int) -> bytes:
    body: dict[str, Any] = {
        "at": now,
        "operator": entry.operator,
        "call": entry.call,
        "about": entry.about,
        "reason": entry.reason,
        "arguments": entry.arguments,
        "result": numbers_of(reply),
    }
    if entry.via:
        body["via"] = entry.via
    data = _fitting(body, _places(reply))
    key = entry.about.encode(errors="replace")[: limits.KEY].decode(errors="ignore")
    return encode_one(
        Message(data, key),
        producer_id=PRODUCER + made_at.to_bytes(8, "big"),
        epoch=0,
        sequence=offset,
        born_at=now,
    )


def _fitting(body: dict[str, Any], places: list[Any]) -> bytes:
    """Return an entry as JSON with the places of messages, as far as there is room.

    First the arguments are left out, then the end of the reason, then places; an entry
    says so.
    """
    if len(json.dumps(body)) > MAX_BODY:
        body = body | {"arguments": {"left_out": "they are too large"}}
    if len(json.dumps(body)) > MAX_BODY:
        body = body | {"reason": _cut(body["reason"]), "reason_cut": True}
    if places:
        room = MAX_BODY - len(json.dumps(body | {"messages": [], "messages_left_out": len(places)}))
        shown = list(_that_fit(places[:MAX_PLACES], room))
        body = body | {"messages": shown}
        if len(shown) < len(places):
            body["messages_left_out"] = len(places) - len(shown)
    return json.dumps(body).encode()


def _cut(text: str) -> str:
    """Return the beginning of a text: escaped, a character has up to 12 bytes."""
    return text[: MAX_TEXT // 12]


def _that_fit(places: list[Any], room: int) -> Iterator[Any]:
    for place in places:
        room -= len(json.dumps(place)) + 2  # and what is between two
        if room < 0:
            return
        yield place


def numbers_of(reply: object) -> dict[str, Any]:
    """Return a reply in numbers and words: of lists their length, of nested values
    nothing. A refusal that was recorded, such as a conflict, is named.
    """
    if isinstance(reply, RequestRejected):
        return {"refused": type(reply).__name__}
    fields = reply._asdict() if isinstance(reply, tuple) and hasattr(reply, "_asdict") else {}
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Enum):
            found[name] = value.name
        elif isinstance(value, bool | int):
            found[name] = value
        elif isinstance(value, tuple | list) and not hasattr(value, "_asdict"):
            found[name] = len(value)
    return found


def _places(reply: object) -> list[Any]:
    """Return the places of the messages that a reply says were changed."""
    done = getattr(reply, "done", ())
    return list(done) if isinstance(done, tuple | list) else []


def apply_stored(state: State, event: AuditStored, context: RecordContext) -> None:
    topic = state.topics_by_id[event.topic_id]
    lost_batches.move_end(state, topic, 0, event.base_offset, 1, context)
    topic.partition_bytes[0] += event.length
    topic.published_bytes += event.length
    state.dirty_topics.add(event.topic_id)
    state.topics_with_new_entries.add(event.topic_id)
    state.entries.put(
        t.ENTRY_KEY.pack(event.topic_id, 0, event.base_offset),
        t.BatchEntry(
            context.attachment_position, event.length, 1, context.stored_at, 0, context.end
        ),
    )
    # it outlives the segments around it
    log_pins.put(
        state,
        context.attachment_position,
        log_pins.PUBLISHED_BATCH,
        event.topic_id,
        0,
        event.base_offset,
    )


APPLIERS: Appliers = {AuditStored: apply_stored}
