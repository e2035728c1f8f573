"""Bars as inline SVG. Every text that goes in is escaped here: keys and errors come
from strangers.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

ROW, LABEL, WIDTH, COUNT = 24, 230, 640, 70  # pixels
LONGEST: Final = 34  # characters of a label
# What does not print could turn the text around it, or hide it.
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Bar(NamedTuple):
    """One row: what, how many, and the class of its colour."""

    label: str
    count: int  # type: ignore[assignment] # hides a method of tuples that nobody calls on a bar
    kind: str


def safe(text: str, most: int = 300) -> str:
    """Any text as HTML shows it: one line, visible characters, at most so many."""
    line = "".join(
        character if character.isprintable() else REPLACEMENT for character in text[: most + 1]
    )
    return escape(line if len(line) <= most else f"{line[: most - 1]}…")


def bars(title: str, rows: Sequence[Bar]) -> str:
    """A figure of horizontal bars, the longest as wide as there is room."""
    largest = max((row.count for row in rows), default=0)
    drawn = "".join(_bar(row, place * ROW, largest) for place, row in enumerate(rows))
    height = max(len(rows), 1) * ROW
    empty = '<text x="0" y="16">none</text>' if not rows else ""
    size = f"0 0 {LABEL + WIDTH + COUNT} {height}"
    svg = f'<svg viewBox="{size}" role="img" aria-label="{safe(title)}">{drawn}{empty}</svg>'
    return f"<figure><figcaption>{safe(title)}</figcaption>{svg}</figure>"


def _bar(row: Bar, y: int, largest: int) -> str:
    width = max(row.count * WIDTH // largest, 2) if row.count else 0
    label = (
        f'<text x="{LABEL - 8}" y="{y + 16}" text-anchor="end">{safe(row.label, LONGEST)}</text>'
    )
    bar = f'<rect x="{LABEL}" y="{y + 4}" width="{width}" height="{ROW - 8}" rx="2" class="{safe(row.kind)}"/>'
    count = f'<text x="{LABEL + width + 6}" y="{y + 16}">{row.count}</text>'
    return f"<g><title>{safe(row.label)}: {row.count}</title>{label}{bar}{count}</g>"
