"""The page of the broker's settings."""

from __future__ import annotations

from typing import Any

from txmq.admin.console.page import Page, PageRequest, View


async def settings(request: PageRequest) -> View:
    """Show the settings file as the broker uses it, secrets left out."""
    reply = await request.ask("broker.settings")
    shown = await request.ask("broker.show")
    sections: dict[str, dict[str, Any]] = {}
    for name, section in reply["settings"].items():
        if isinstance(section, dict):
            sections[name] = section
        elif isinstance(section, list):
            for number, one in enumerate(section, 1):
                sections[f"{name} {number}"] = one
    return View("settings.html", {"sections": sections, "shown": shown})


PAGES = (Page("settings", "Settings", settings, "Settings", "s", live=False),)
