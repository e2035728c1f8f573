"""Records of a log as people and programs read them: fields by name, tokens in
hexadecimal, topics by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from txmq.core import machine
from txmq.core.events import base
from txmq.core.events.base import EVENTS, BatchesStored, BatchStored, TopicCreated
from txmq.core.events.transactions import GroupsStored, PartStored, StoredBatch
from txmq.store.record import LOST, split_body
from txmq.store.snapshot import newest_snapshot, read_rows
from txmq.store.tables import TICKET_KEY, TOPICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from txmq.broker.data_directory.verify import LogFiles
    from txmq.store.fs import FileSystem
    from txmq.store.record import Record

assert machine, "imported, so that all events are known"
TOPIC_FIELD = "topic_id"
SEVERAL: dict[
    type, tuple[str, Callable[..., object]]
] = {  # events of several things: in which field, and what these are
    BatchesStored: ("batches", BatchStored),
    PartStored: ("batches", StoredBatch),
    GroupsStored: ("groups", PartStored),
}


class Wanted(NamedTuple):
    """Which records: from `start` (0 = the first) to `end`, of these kinds (by name),
    of a topic, of a token.

    What is empty leaves nothing out. A token is looked for in whatever an event holds.
    """

    start: int = 0
    end: int = 0
    kinds: tuple[str, ...] = ()
    topic: str = ""
    token: bytes = b""


def kinds() -> list[str]:
    """The names of all kinds of records."""
    return sorted(event.__name__ for event in EVENTS.values())


def topic_names(fs: FileSystem, directory: str, log_id: UUID, files: LogFiles) -> dict[int, str]:
    """By id, those of deleted topics too: as the newest snapshot has them, then as the
    log tells.
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
        if record.kind in EVENTS and EVENTS[record.kind] is TopicCreated:
            event: Any = base.decode(record.kind, split_body(record).head)
            names[event.topic_id] = event.name
    return names


def dump(files: LogFiles, wanted: Wanted, names: dict[int, str]) -> Iterator[dict[str, Any]]:
    """The records that are wanted, in their order."""
    for record in files.scan(max(wanted.start, files.first)):
        if wanted.end and record.position >= wanted.end:
            return
        told = _told(record, names)
        if _is_wanted(told, record, wanted):
            yield told


def _told(record: Record, names: dict[int, str]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "position": record.position,
        "end": record.end,
        "kind": _kind(record),
        "stored_at": record.stored_at,
        "boot_epoch": record.boot_epoch,
        "durable_before": record.durable_before,
    }
    if record.kind not in EVENTS:
        return told | {"bytes": len(record.body)}
    body = split_body(record)
    event: Any = base.decode(record.kind, body.head)
    return told | {"attached": len(body.attachment), "event": _fields(event, names)}


def _fields(event: Any, names: dict[int, str]) -> dict[str, Any]:  # an Event, which has no fields
    fields = {name: _readable(value) for name, value in event._asdict().items()}
    if TOPIC_FIELD in fields:
        fields["topic"] = names.get(event.topic_id, "")
    if (several := SEVERAL.get(type(event))) is not None:
        name, kind = several
        fields[name] = parts = [_fields(kind(*part), names) for part in getattr(event, name)]
        fields["topics"] = sorted(
            {topic for part in parts for topic in part.get("topics", (part.get("topic"),))}
        )
    return fields


def _kind(record: Record) -> str:
    if record.kind == LOST:
        return "Lost"
    known = EVENTS.get(record.kind)
    return str(record.kind) if known is None else known.__name__


def _is_wanted(told: dict[str, Any], record: Record, wanted: Wanted) -> bool:
    if wanted.kinds and told["kind"] not in wanted.kinds:
        return False
    fields = told.get("event", {})
    if wanted.topic and wanted.topic not in (
        fields.get("topic"),
        fields.get("name"),
        *fields.get("topics", ()),
    ):
        return False
    return not wanted.token or wanted.token in bytes(split_body(record).head)


def _readable(value: object) -> Any:  # what JSON can hold
    match value:
        case bytes() | memoryview():
            return bytes(value).hex()
        case tuple() | list():
            return [_readable(item) for item in value]
        case dict():
            return {str(name): _readable(item) for name, item in value.items()}
    return value
