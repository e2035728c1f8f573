"""The page of the life of messages, and of what follows from them, in all topics."""

from __future__ import annotations

from typing import Any

from txmq.admin.console.life import trace_of
from txmq.admin.console.listing import content_criteria
from txmq.admin.console.page import Page, PageRequest, View
from txmq.client.protocol.life_events import name_of, sequence_of
from txmq.client.protocol.lives import search_title

MAX_MESSAGES = 50
NO_BREAK = "\u00a0"
FIELDS = ("topic", "partition", "offset", "token", "message_id")


async def trace(request: PageRequest) -> View:
    """Show the events of messages, and of what follows from them, in the order of
    time.
    """
    wanted = _criteria(request)
    named = {name: value for name, value in wanted.items() if value is not None}
    if not named:
        return View("trace.html", {"traced": None, "steps": [], "about": ""})
    thorough = request.text("thorough") == "yes"
    found = await trace_of(request, wanted, min(request.limit, MAX_MESSAGES), thorough=thorough)
    places = {
        name_of(one): {field: one.get(field) for field in FIELDS} for one in found.trace.messages
    }
    steps: list[dict[str, Any]] = [
        {**step._asdict(), "indent": step.indent.replace(" ", NO_BREAK), **places[step.name]}
        for step in sequence_of(found.trace.messages)
    ]
    shown = {"traced": found.trace, "steps": steps, "about": search_title(named)}
    return View("trace.html", {**shown, "reached": found.reached, "cut": found.cut})


def _criteria(request: PageRequest) -> dict[str, Any]:
    """Return what the page searches for; an id is looked for alone. Raises Refused."""
    wanted = {"key": request.text("key") or None, **content_criteria(request)}
    alone = request.text("id") if set(wanted.values()) == {None} else ""
    return {**wanted, "id": alone or None}


PAGES = (Page("trace", "Trace", trace, "Trace", "k", live=False, needs="message.search"),)
