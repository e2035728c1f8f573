"""The first page: the state of the broker, and what needs an operator."""

from __future__ import annotations

from txmq.admin.console.page import Page, Reader, View


async def overview(reader: Reader) -> View:
    """Show the broker's numbers."""
    return View("overview.html", {"shown": await reader.ask("broker.show")})


PAGES = (Page("", "Overview", overview, "Overview", "o"),)
