"""The page of the audit topic: what operators did."""

from __future__ import annotations

from txmq.admin.console.page import Page, Reader, View
from txmq.admin.console.topics import time_of


async def audit(reader: Reader) -> View:
    """List what operators did, the newest first."""
    texts = {name: reader.text(name) or None for name in ("operator", "call", "about", "topic")}
    reply = await reader.ask(
        "audit.list",
        **texts,
        start=time_of(reader, "start"),
        end=time_of(reader, "end"),
        after=reader.number("after"),
        newest=True,
        limit=reader.limit,
    )
    return View("audit.html", {"reply": reply, "filtered": any(texts.values())})


PAGES = (Page("audit", "Audit", audit, "Audit", "a"),)
