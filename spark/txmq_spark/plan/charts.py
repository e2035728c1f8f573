"""Bar charts as inline SVG.

All texts are escaped here, because keys and errors come from untrusted messages.
Unprintable characters could turn the text around them, or hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

from txmq.model.printable import escape_unprintable

ROW, LABEL, WIDTH, COUNT = 24, 270, 640, 70  # pixels
LONGEST: Final = 34  # characters of a label, each as wide as the others: 7.2 pixels


class Bar(NamedTuple):
    """A row of a chart: its label, its count, and the CSS class of its colour."""

    label: str
    count: int  # type: ignore[assignment] # hides a method of tuples that nobody needs here
    kind: str


def escape_text(text: str, most: int = 300) -> str:
    """Return a text for HTML: one line of printable characters, at most `most` of
    them.
    """
    line = escape_unprintable(text[: most + 1])
    return escape(line if len(line) <= most else f"{line[: most - 1]}…")


def bar_chart(title: str, rows: Sequence[Bar]) -> str:
    """Return a figure of horizontal bars; the longest takes the full width."""
    largest = max((row.count for row in rows), default=0)
    drawn = "".join(_bar(row, place * ROW, largest) for place, row in enumerate(rows))
    height = max(len(rows), 1) * ROW
    empty = '<text x="0" y="16">none</text>' if not rows else ""
    size = f"0 0 {LABEL + WIDTH + COUNT} {height}"
    svg = f'<svg viewBox="{size}" role="img" aria-label="{escape_text(title)}">{drawn}{empty}</svg>'
    return f"<figure><figcaption>{escape_text(title)}</figcaption>{svg}</figure>"


def _bar(row: Bar, y: int, largest: int) -> str:
    width = max(row.count * WIDTH // largest, 2) if row.count else 0
    # the end of a label tells more: the name of an error, and its fingerprint
    line = escape_unprintable(row.label[-LONGEST - 1 :])
    text = escape(line if len(line) <= LONGEST else f"…{line[1 - LONGEST :]}")
    label = f'<text class="label" x="{LABEL - 8}" y="{y + 16}" text-anchor="end">{text}</text>'
    size = f'width="{width}" height="{ROW - 8}"'
    bar = f'<rect x="{LABEL}" y="{y + 4}" {size} rx="2" class="{escape_text(row.kind)}"/>'
    count = f'<text x="{LABEL + width + 6}" y="{y + 16}">{row.count}</text>'
    return f"<g><title>{escape_text(row.label)}: {row.count}</title>{label}{bar}{count}</g>"
