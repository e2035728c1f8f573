"""Completion of a filter of dead letters while somebody types it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.admin.console.listing import SCANNED
from txmq.model.letter_filter import FIELDS, STATES, format_filter, unfinished

if TYPE_CHECKING:
    from txmq.admin.console.page import PageRequest
    from txmq.model.letter_filter import Unfinished

MAX_OFFERS = 50
AGES = ("1h", "1d", "7d")
# fields whose values the statistics of a group have, and the names that those go by
COUNTED = {"error": "by_error_type", "fingerprint": "by_fingerprint", "topic": "by_topic"}


async def offers(request: PageRequest) -> list[str]:
    """Return the texts to which the filter of a query may be completed."""
    written = request.text("filter")
    typed = unfinished(written, request.number("at", len(written)) or 0)
    begun = typed.begun.lower()
    fitting = [
        word
        for word in await _words(request, typed)
        if begun in word.lower() and word.lower() != begun
    ]
    head = written[: typed.start]
    return [
        head + (f"{word}:" if typed.field is None else _quoted(word))
        for word in fitting[:MAX_OFFERS]
    ]


def _quoted(value: str) -> str:
    return format_filter({"key": value}).removeprefix("key:")


async def _words(request: PageRequest, typed: Unfinished) -> list[str]:
    """Return the words that may stand where somebody types: fields, or values."""
    group = request.text("group")
    match typed.field:
        case None:
            return list(FIELDS)
        case "state":
            return [*STATES, "any"]
        case "group":
            reply = await request.ask("group.list", limit=SCANNED)
            return [one["group"] for one in reply["groups"]]
        case "age":
            return list(AGES)
        case field if group and field in COUNTED:
            select = {"states": list(STATES)}
            counted = await request.ask("dlq.stats", group=group, select=select, keys=False)
            return [str(name) for name in counted[COUNTED[field]]]
    return []
