"""Pages of topics: the list, one topic, and its messages."""

from __future__ import annotations

import json
from base64 import b64decode
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from txmq.admin.console.bodies import CONTENT_TYPE, decode
from txmq.admin.console.listing import by_name
from txmq.admin.console.page import Page, Reader, Refused, View
from txmq.admin.numbers import is_whole_number
from txmq.model.units import MILLISECOND, SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

PARTITIONS = 100  # of one topic, on one page
MESSAGES = 25
DECODED_IN_LIST = 4_096  # bytes; of a larger body a list shows how it begins
PREVIEW = 400  # characters of a body in a list
MAX_SCANS = 8  # pages of a search that looks for a tag, or finds nothing at first
SCAN = 250 * MILLISECOND  # after which a page has what was found, and goes on behind it


async def topics(reader: Reader) -> View:
    """List the topics."""
    found = await by_name(reader, "topic.list", "topics", "name", own=bool(reader.text("own")))
    return View("topics.html", {"found": found})


async def topic(reader: Reader) -> View:
    """Show a topic: sizes, partitions, settings, schema, groups."""
    [name] = reader.names
    shown = await reader.ask("topic.show", name=name)
    first = min(reader.number("from", 0) or 0, shown["partitions"])
    last = min(first + PARTITIONS, shown["partitions"])
    rows = [
        {
            "partition": number,
            "first": shown["firsts"][number],
            "end": shown["ends"][number],
            "size": shown["partition_bytes"][number],
        }
        for number in range(first, min(last, len(shown["ends"]), len(shown["partition_bytes"])))
    ]
    messages = sum(shown["ends"]) - sum(shown["firsts"])
    return View(
        "topic.html",
        {
            "topic": shown,
            "rows": rows,
            "messages": messages,
            "following": last if last < shown["partitions"] else None,
            "schema": pretty(shown["schema"]),
        },
    )


async def messages(reader: Reader) -> View:
    """Browse messages of a topic, by place, time, key and tag."""
    [name] = reader.names
    shown = await reader.ask("topic.show", name=name)
    may_read = reader.may("message.find", topic=name, bodies=True)
    criteria: dict[str, Any] = {
        "topic": name,
        "key": reader.text("key") or None,
        "partition": reader.number("partition"),
        "offset": reader.number("offset", 0),
        "start": time_of(reader, "start"),
        "end": time_of(reader, "end"),
        "bodies": may_read.allowed,
    }
    if not may_read.allowed:
        del criteria["bodies"]
    if criteria["offset"] and criteria["partition"] is None:
        raise Refused("BadRequest", "an offset needs a partition", "name one", 400)
    tag, after = reader.text("tag"), _place(reader.text("after"))
    rows: list[dict[str, Any]] = []
    began = reader.now
    for _ in range(MAX_SCANS):
        left = MESSAGES - len(rows)
        reply = await reader.ask("message.find", **criteria, after=after, limit=left)
        rows += [row for row in reply["messages"] if not tag or row["tag"] == tag]
        after = reply["next"]
        if after is None or len(rows) >= MESSAGES or reader.now - began > SCAN:
            break
    return View(
        "messages.html",
        {
            "topic": shown,
            "rows": list(_previews(rows)),
            "may_read": may_read,
            "following": None if after is None else f"{after[0]}-{after[1]}",
        },
    )


async def message(reader: Reader) -> View:
    """Show one message, with its body and its headers."""
    name, *place = reader.names
    if not all(map(is_whole_number, place)):
        raise Refused("BadRequest", "a message's place is PARTITION/OFFSET", "", 400)
    partition, offset = map(int, place)
    may_read = reader.may("message.find", topic=name, bodies=True)
    wanted = {"topic": name, "partition": partition, "offset": offset, "limit": 1}
    bodies = {"bodies": True} if may_read.allowed else {}
    reply = await reader.ask("message.find", **wanted, **bodies)
    row = next(iter(reply["messages"]), None)
    if row is None or row["offset"] != offset:
        raise Refused(
            "NoMessage",
            f"there is no message {name}/{partition}/{offset}",
            "it may have been deleted by retention, or is not published yet",
        )
    shown = await reader.ask("topic.show", name=name)
    body, headers = row.get("body"), row["headers"]
    decoded = None
    if body is not None:
        kind = headers.get(CONTENT_TYPE, "")
        decoded = decode(b64decode(body), kind, shown["schema"], headers)
    return View("message.html", {"row": row, "decoded": decoded, "may_read": may_read})


def _previews(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield rows of a list with the beginnings of their bodies."""
    for row in rows:
        body = None if row.get("body") is None else b64decode(row["body"])
        whole = body is not None and len(body) <= DECODED_IN_LIST
        kind = row["headers"].get(CONTENT_TYPE, "") if whole else ""
        shown = None if body is None else decode(body if whole else body[:PREVIEW], kind)
        text = "" if shown is None else " ".join(shown.text[:PREVIEW].split())
        yield row | {"kind": "hidden" if shown is None else shown.kind, "preview": text}


def _place(text: str) -> tuple[int, int] | None:
    """Return the place where a search goes on."""
    if not text:
        return None
    partition, _, offset = text.partition("-")
    if not (is_whole_number(partition) and is_whole_number(offset)):
        raise Refused("BadRequest", f"invalid place {text[:64]!r}", "follow the links", 400)
    return int(partition), int(offset)


def time_of(reader: Reader, name: str) -> int | None:
    """Return a time of the query, in UTC, as microseconds; the browser's field gives
    2026-01-31T12:00.
    """
    text = reader.text(name)
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise Refused(
            "BadRequest", f"{name}: {text[:64]!r} is not a time", "use 2026-01-31T12:00", 400
        ) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()) * SECOND


def pretty(text: str) -> str:
    """Return a JSON text in lines."""
    return json.dumps(json.loads(text), indent=2, ensure_ascii=False) if text else ""


PAGES = (
    Page("topics", "Topics", topics, "Topics", "t"),
    Page("topics/*", "Topic", topic),
    Page("topics/*/messages", "Messages", messages, live=False),
    Page("topics/*/*/*", "Message", message, live=False),
)
