"""The page of the audit topic: what operators did."""

from __future__ import annotations

from typing import Any

from txmq.admin.console.actions import ACTIONS
from txmq.admin.console.page import Page, PageRequest, View
from txmq.admin.console.words import in_words

COUNTS = ("done", "refused")  # of a result


async def audit(request: PageRequest) -> View:
    """List what operators did, the newest first."""
    texts = {name: request.text(name) or None for name in ("operator", "call", "about", "topic")}
    is_filtered = any(texts.values()) or bool(request.text("start") or request.text("end"))
    reply = await request.ask(
        "audit.list",
        **texts,
        start=request.time("start"),
        end=request.time("end"),
        after=request.number("after"),
        newest=True,
        limit=request.limit,
    )
    entries = [one if "damaged" in one else _in_words(one) for one in reply["entries"]]
    titles = {call: action.title for call, action in ACTIONS.items()}
    shown = {"reply": reply | {"entries": entries}, "filtered": is_filtered, "titles": titles}
    return View("audit.html", shown)


def _in_words(entry: dict[str, Any]) -> dict[str, Any]:
    """Add the arguments of an entry in words, without what its other fields say."""
    about = entry["about"].partition(":")[2]
    told = {name: value for name, value in entry["arguments"].items() if value != about}
    result = {name: entry["result"][name] for name in COUNTS if name in entry.get("result", ())}
    return entry | {"words": in_words(told), "result": result}


PAGES = (Page("audit", "Audit", audit, "Audit", "a", needs="audit.list"),)
