"""Records of a log for people and programs: fields by name, tokens in hexadecimal,
topics by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from txmq.core import machine
from txmq.core.events import base
from txmq.core.events.audit import OperatorActed
from txmq.core.events.base import EVENTS
from txmq.core.events.topics import BatchesStored, BatchStored, TopicCreated
from txmq.core.events.transactions import GroupsStored, PartStored, UnpublishedBatch
from txmq.store.log.record import LOST, split_body
from txmq.store.snapshot import newest_snapshot, read_rows
from txmq.store.tables import TICKET_KEY, TOPICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from txmq.broker.data_directory.verify import LogFiles
    from txmq.store.filesystem import FileSystem
    from txmq.store.log.record import Record

assert machine, "imported because it registers all events"
SECRETS, HIDDEN = {"verifier", "secret", "digest"}, "(not shown)"  # of users
TOPIC_FIELD = "topic_id"
# events of several things: in which field, and what these are
NESTED: dict[type, tuple[str, Callable[..., object]]] = {
    BatchesStored: ("batches", BatchStored),
    PartStored: ("batches", UnpublishedBatch),
    GroupsStored: ("groups", PartStored),
}


class RecordFilter(NamedTuple):
    """A choice of records: from `start` (0 = the first) to `end`, of these kinds (by
    name), of a topic, of a token.

    Empty fields exclude nothing. A token is looked for in all fields of an event.
    """

    start: int = 0
    end: int = 0
    kinds: tuple[str, ...] = ()
    topic: str = ""
    token: bytes = b""


def kinds() -> list[str]:
    """Return the names of all kinds of records."""
    return sorted(event.__name__ for event in EVENTS.values())


def topic_names(fs: FileSystem, directory: str, log_id: UUID, files: LogFiles) -> dict[int, str]:
    """Return the names of topics by id, deleted ones included: from the newest
    snapshot, then from the log.
    """
    names: dict[int, str] = {}
    snapshot = (
        newest_snapshot(fs, directory, log_id) if fs.listdir(f"{directory}/snapshot") else None
    )
    if snapshot is not None:
        for table, key, value in read_rows(fs, snapshot):
            if table != TOPICS:
                break  # it is the first table
            names[TICKET_KEY.unpack(key)[0]] = msgpack.unpackb(value)[0]
    for record in files.scan(files.first):
        for created in _topics_created(record):
            names[created.topic_id] = created.name
    return names


def _topics_created(record: Record) -> Iterator[TopicCreated]:
    kind = EVENTS.get(record.kind)
    if kind is not TopicCreated and kind is not OperatorActed:
        return
    try:
        event: Any = base.decode(record.kind, split_body(record).head)
        parts = event.parts if kind is OperatorActed else [(record.kind, event, 0)]
        for number, fields, _length in parts:
            if EVENTS.get(number) is TopicCreated:
                yield TopicCreated(*fields)
    except (base.UnknownEvent, TypeError):  # of another version
        return


def dump(
    files: LogFiles, record_filter: RecordFilter, names: dict[int, str]
) -> Iterator[dict[str, Any]]:
    """Return the chosen records, in their order."""
    for record in files.scan(max(record_filter.start, files.first)):
        if record_filter.end and record.position >= record_filter.end:
            return
        view = _record_view(record, names)
        if _matches(view, record, record_filter):
            yield view


def _record_view(record: Record, names: dict[int, str]) -> dict[str, Any]:
    view: dict[str, Any] = {
        "position": record.position,
        "end": record.end,
        "kind": _kind(record),
        "stored_at": record.stored_at,
        "boot_epoch": record.boot_epoch,
        "durable_before": record.durable_before,
    }
    if record.kind == LOST:
        return view | {"bytes": len(record.body)}
    body = split_body(record)
    try:
        event: Any = base.decode(record.kind, body.head)
    except base.UnknownEvent:  # of another version
        return view | {"bytes": len(record.body)}
    return view | {"attached": len(body.attachment), "event": _fields(event, names)}


def _fields(event: Any, names: dict[int, str]) -> dict[str, Any]:  # noqa: ANN401  # an Event, which has no fields
    fields: dict[str, Any] = {
        name: HIDDEN if name in SECRETS else _readable(value)
        for name, value in event._asdict().items()
    }
    if TOPIC_FIELD in fields:
        fields["topic"] = names.get(event.topic_id, "")
    if isinstance(event, OperatorActed):
        fields["parts"] = [_part(kind, part, names) for kind, part, _length in event.parts]
        fields["topics"] = sorted({part["topic"] for part in fields["parts"] if "topic" in part})
    elif (several := NESTED.get(type(event))) is not None:
        name, kind = several
        fields[name] = parts = [_fields(kind(*part), names) for part in getattr(event, name)]
        fields["topics"] = sorted(
            {topic for part in parts for topic in part.get("topics", (part.get("topic"),))}
        )
    return fields


def _part(kind: int, fields: tuple[Any, ...], names: dict[int, str]) -> dict[str, Any]:
    try:
        return {"kind": _name(kind), **_fields(base.make(kind, fields), names)}
    except base.UnknownEvent:  # of another version: which of its fields are secret is not known
        return {"kind": _name(kind)}


def _kind(record: Record) -> str:
    return "Lost" if record.kind == LOST else _name(record.kind)


def _name(kind: int) -> str:
    known = EVENTS.get(kind)
    return str(kind) if known is None else known.__name__


def _matches(view: dict[str, Any], record: Record, wanted: RecordFilter) -> bool:
    fields = view.get("event", {})
    acted = fields.get("parts", ()) if view["kind"] == OperatorActed.__name__ else ()
    if wanted.kinds and {view["kind"], *(part["kind"] for part in acted)}.isdisjoint(wanted.kinds):
        return False
    if wanted.topic and wanted.topic not in (
        fields.get("topic"),
        fields.get("name"),
        *fields.get("topics", ()),
    ):
        return False
    return not wanted.token or wanted.token in bytes(split_body(record).head)


def _readable(value: object) -> Any:  # noqa: ANN401  # what JSON can hold
    match value:
        case bytes() | memoryview():
            return bytes(value).hex()
        case tuple() | list():
            return [_readable(item) for item in value]
        case dict():
            return {str(name): _readable(item) for name, item in value.items()}
    return value
