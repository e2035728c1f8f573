"""The page of the audit topic: what operators did."""

from __future__ import annotations

from txmq.admin.console.page import Page, PageRequest, View


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
    return View("audit.html", {"reply": reply, "filtered": is_filtered})


PAGES = (Page("audit", "Audit", audit, "Audit", "a"),)
