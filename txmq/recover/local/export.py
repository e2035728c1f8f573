"""Export of a local store as lines of JSON, with exact bodies.

    {"format": "txmq consumer store export", "version": 1, "store": {...}}
    {"partition": 0, "offset": 7, ..., "body": "base64"}
    {"end": 1}

The last line has the number of messages, so that a cut export is noticed.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.errors import ForeignStore, InvalidExport, UnsupportedFormat
from txmq.model.measures import counted
from txmq.model.retry import FailureReport
from txmq.recover.local.rows import identity_json, identity_of
from txmq.recover.local.values import (
    Entry,
    Place,
    Scanned,
    State,
    StoredMessage,
    entry_json,
)

if TYPE_CHECKING:
    from txmq.recover.local.values import StoreIdentity

FORMAT, VERSION = "txmq consumer store export", 1


class Export(NamedTuple):
    """An export that is being read; `messages` raises InvalidExport at a bad line."""

    identity: StoreIdentity
    messages: Iterator[Scanned]


def read_export(lines: Iterable[str]) -> Export:
    """Return the store of an export, and its messages as they are read.

    Raises InvalidExport for something else, UnsupportedFormat for a newer version.
    """
    numbered = enumerate(lines, 1)
    _, first = next(numbered, (1, ""))
    header = _parse(1, first)
    if header.get("format") != FORMAT:
        raise _invalid(1, "it does not begin with the header of an export")
    if header.get("version") != VERSION:
        raise UnsupportedFormat("export, line 1", header.get("version"), VERSION)
    try:
        identity = identity_of(header["store"])
    except (KeyError, TypeError, ForeignStore) as error:
        raise _invalid(1, f"the store's identity: {error!r}") from error
    return Export(identity, _messages(numbered, identity.owner.topic_id))


def _messages(numbered: Iterator[tuple[int, str]], topic_id: int) -> Iterator[Scanned]:
    count, number = 0, 1
    for number, line in numbered:
        fields = _parse(number, line)
        if "end" in fields:
            if fields["end"] != count:
                raise _invalid(number, f"the end of {fields['end']!r} messages, after {count}")
            if next(numbered, None) is not None:
                raise _invalid(number + 1, "a line after the end")
            return
        try:
            yield _scanned(fields, topic_id)
        except (KeyError, TypeError, ValueError) as error:
            raise _invalid(number, f"not a message: {error!r}") from error
        count += 1
    raise _invalid(number + 1, f"it was cut off after {counted(count, 'message')}")


def export_lines(identity: StoreIdentity, messages: Iterable[Scanned]) -> Iterator[str]:
    """Yield the lines of an export, without line ends."""
    store = identity_json(identity)
    yield json.dumps({"format": FORMAT, "version": VERSION, "store": store})
    count = 0
    for scanned in messages:
        yield export_line(scanned)
        count += 1
    yield json.dumps({"end": count})


def export_line(scanned: Scanned) -> str:
    """Return the line of one message."""
    fields = entry_json(scanned.entry)
    message = scanned.message
    if message is not None:
        fields |= {
            "message_id": message.message_id,
            "tag": message.tag,
            "headers": dict(message.headers),
            "born_at": message.born_at,
            "stored_at": message.stored_at,
            "body": b64encode(message.body).decode(),
        }
    return json.dumps(fields)


def _scanned(fields: dict[str, Any], topic_id: int) -> Scanned:
    place = Place(topic_id, _number(fields["partition"]), _number(fields["offset"]))
    error_type, text, fingerprint, bases = fields["failure"]
    entry = Entry(
        place,
        fields["key"],
        State[fields["state"].upper()],
        _number(fields["attempt"]),
        _number(fields["due"]),
        FailureReport(error_type, text, fingerprint, tuple(bases)),
        _number(fields["first_at"]),
        bool(fields["told"]),
        _number(fields["generation"]),
        _number(fields["epoch"]),
    )
    if "body" not in fields:
        return Scanned(entry, None)
    message = StoredMessage(
        place,
        entry.key,
        fields["tag"],
        dict(fields["headers"]),
        b64decode(fields["body"], validate=True),
        fields["message_id"],
        entry.attempt,
        fields["born_at"],
        fields["stored_at"],
        entry.epoch,
        entry.generation,
    )
    return Scanned(entry, message)


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} where a number belongs")
    return value


def _parse(number: int, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _invalid(number, f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _invalid(number, "not a JSON object")
    return fields


def _invalid(number: int, why: str) -> InvalidExport:
    return InvalidExport(
        f"line {number}: {why}",
        hint="give the whole output of `txmq recover export`",
    )
