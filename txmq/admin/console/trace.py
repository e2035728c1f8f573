"""The page of the life of one key, or one message, in all topics."""

from __future__ import annotations

from typing import Any

from txmq.admin.console.life import trace_of
from txmq.admin.console.page import Page, PageRequest, View
from txmq.client.protocol.life_events import name_of

MAX_MESSAGES = 50
FIELDS = ("topic", "partition", "offset", "state", "stored_at", "message_id", "token")


async def trace(request: PageRequest) -> View:
    """Show the events of a key's messages in the order of time."""
    key, message = request.text("key"), request.text("id")
    if not key and not message:
        return View("trace.html", {"traced": None, "messages": [], "about": ""})
    limit = min(request.limit, MAX_MESSAGES)
    found = await trace_of(
        request,
        key or None,
        None if key else message,
        limit,
        thorough=request.text("thorough") == "yes",
    )
    traced = found.trace
    messages: list[dict[str, Any]] = [
        {"name": name_of(one), **{field: one.get(field) for field in FIELDS}}
        for one in traced.messages
    ]
    about = f"key {key}" if key else f"message {message}"
    shown = {"traced": traced, "messages": messages, "about": about}
    return View("trace.html", {**shown, "reached": found.reached, "cut": found.cut})


PAGES = (Page("trace", "Trace", trace, "Trace", "k", live=False, needs="message.search"),)
