"""Pages of topics: the list, one topic, and its messages."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import TYPE_CHECKING, Any

from txmq.admin.addresses import is_whole_number
from txmq.admin.console.bodies import decode, decode_message
from txmq.admin.console.listing import MAX_SCANS, SCAN, by_name, content_criteria
from txmq.admin.console.page import Page, PageRequest, Refused, View
from txmq.admin.console.words import in_words
from txmq.model.schemas.bodies import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

PARTITIONS = 100  # of one topic, on one page
MESSAGES = 25
DECODED_IN_LIST = 4_096  # bytes; of a larger body a list shows how it begins
PREVIEW = 400  # characters of a body in a list


async def topics(request: PageRequest) -> View:
    """List the topics."""
    found = await by_name(request, "topic.list", "topics", "name", own=bool(request.text("own")))
    return View("topics.html", {"found": found})


async def topic(request: PageRequest) -> View:
    """Show a topic: sizes, partitions, settings, schema, groups."""
    [name] = request.names
    shown = await request.ask("topic.show", name=name)
    first = min(request.number("from", 0) or 0, shown["partitions"])
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
            "schema": _pretty(shown["schema"]),
            "now": {key: in_words(value, key) for key, value in shown["settings"].items()},
        },
    )


async def messages(request: PageRequest) -> View:
    """Browse messages of a topic, by place, time, key, tag, body and header."""
    [name] = request.names
    shown = await request.ask("topic.show", name=name)
    may_read = request.may("message.find", topic=name, bodies=True)
    criteria: dict[str, Any] = {
        "topic": name,
        "key": request.text("key") or None,
        **content_criteria(request),
        "partition": request.number("partition"),
        "offset": request.number("offset", 0),
        "start": request.time("start"),
        "end": request.time("end"),
        "bodies": may_read.allowed,
    }
    if not may_read.allowed:
        del criteria["bodies"]
    if criteria["offset"] and criteria["partition"] is None:
        raise Refused("BadRequest", "an offset needs a partition", "name one", 400)
    tag, after = request.text("tag"), _cursor(request.text("after"))
    rows: list[dict[str, Any]] = []
    began = request.now
    for _ in range(MAX_SCANS):
        left = MESSAGES - len(rows)
        reply = await request.ask("message.find", **criteria, after=after, limit=left)
        rows += [row for row in reply["messages"] if not tag or row["tag"] == tag]
        after = reply["next"]
        if after is None or len(rows) >= MESSAGES or request.now - began > SCAN:
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


async def message(request: PageRequest) -> View:
    """Show one message, with its body and its headers."""
    name, *place = request.names
    if not all(map(is_whole_number, place)):
        raise Refused("BadRequest", "a message's place is PARTITION/OFFSET", "", 400)
    partition, offset = map(int, place)
    may_read = request.may("message.find", topic=name, bodies=True)
    wanted = {"topic": name, "partition": partition, "offset": offset, "limit": 1}
    bodies = {"bodies": True} if may_read.allowed else {}
    reply = await request.ask("message.find", **wanted, **bodies)
    row = next(iter(reply["messages"]), None)
    if row is None or row["offset"] != offset:
        raise Refused(
            "NoMessage",
            f"there is no message {name}/{partition}/{offset}",
            "it may have been deleted by retention, or is not published yet",
        )
    shown = await request.ask("topic.show", name=name)
    decoded = decode_message(row, shown["schema"])
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


def _cursor(text: str) -> tuple[int, int] | None:
    """Return the partition and offset where a search goes on."""
    if not text:
        return None
    partition, _, offset = text.partition("-")
    if not (is_whole_number(partition) and is_whole_number(offset)):
        raise Refused("BadRequest", f"invalid place {text[:64]!r}", "follow the links", 400)
    return int(partition), int(offset)


def _pretty(text: str) -> str:
    """Return a JSON text in lines."""
    return json.dumps(json.loads(text), indent=2, ensure_ascii=False) if text else ""


PAGES = (
    Page("topics", "Topics", topics, "Topics", "t", needs="topic.list"),
    Page("topics/*", "Topic", topic),
    Page("topics/*/messages", "Messages", messages, live=False),
    Page("topics/*/*/*", "Message", message, live=False),
)
