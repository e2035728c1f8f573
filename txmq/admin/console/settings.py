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
            sections[name] = _written(section)
        elif isinstance(section, list):
            for number, one in enumerate(section, 1):
                sections[f"{name} {number}"] = _written(one)
    return View("settings.html", {"sections": sections, "shown": shown})


def _written(section: dict[str, Any]) -> dict[str, str]:
    """Return settings as their file has them; a dash for none."""
    return {
        name: "–" if value is None or value == "" else _text(value)
        for name, value in section.items()
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


PAGES = (
    Page("settings", "Settings", settings, "Settings", "s", live=False, needs="broker.settings"),
)
