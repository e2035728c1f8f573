"""The life of messages as one HTML page: a time line and a table.

The page is one file without scripts. It asks for nothing from elsewhere, and its policy
forbids it. All text is escaped, control characters included.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template
from typing import Final

from txmq.cli.output import format_time
from txmq.client.protocol.life_events import LifeEvent
from txmq.model.printable import escape_unprintable

MAX_LANES = 200  # messages that have a line of their own in the picture
LANE, LEFT, WIDTH = 26, 260, 1_000  # pixels of the picture: a line's height, its label, its time
DANGER = {"failed", "dead letter", "rolled back", "key fenced"}

PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1280px; margin: 2rem auto; \
padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; \
fill: CanvasText; }
line { stroke: #8886; } circle { fill: #2456c4; } circle.danger { fill: #c23b3b; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; \
border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.danger td:nth-child(3) { color: #c23b3b; font-weight: 600; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$summary</p>
$picture
<table>
<thead><tr><th>time</th><th>message</th><th>what</th><th>who</th><th></th></tr></thead>
<tbody>
$rows
</tbody>
</table>
</body>
</html>
""")


def page(title: str, summary: str, events: Sequence[LifeEvent]) -> str:
    """Return the page of these events, which are in the order of time."""
    return PAGE.substitute(
        title=_text(title),
        summary=_text(summary),
        picture=_picture(events),
        rows="\n".join(map(_row, events)),
    )


def _text(value: str) -> str:
    """Return a text of strangers for HTML, with its unprintable characters escaped."""
    return escape(escape_unprintable(value))


def _class(event: LifeEvent) -> str:
    return ' class="danger"' if event.what in DANGER else ""


def _row(event: LifeEvent) -> str:
    time = "" if event.at is None else format_time(event.at)
    cells = (time, event.message, event.what, event.who, event.text)
    return f"<tr{_class(event)}>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"


def _picture(events: Sequence[LifeEvent]) -> str:
    """Return a line for each message, with a point for each event that has a time."""
    timed = [(event.at, event) for event in events if event.at is not None]
    if not timed:
        return ""
    lanes = list(dict.fromkeys(event.message for _at, event in timed))[:MAX_LANES]
    first, last = timed[0][0], timed[-1][0]
    height = LANE * (len(lanes) + 1)
    parts = [f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {height}" role="img">']
    for number, lane in enumerate(lanes):
        y = LANE * number + LANE // 2
        parts.append(f'<text x="0" y="{y + 4}">{_text(lane[:40])}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
    for at, event in timed:
        if event.message in lanes:
            x = LEFT + (at - first) * WIDTH // max(1, last - first)
            y = LANE * lanes.index(event.message) + LANE // 2
            title = f"{format_time(at)} {event.what} {event.who}"
            parts.append(
                f'<circle{_class(event)} cx="{x}" cy="{y}" r="6">'
                f"<title>{_text(title)}</title></circle>"
            )
    end = f'text-anchor="end" x="{LEFT + WIDTH}"'
    parts.append(f'<text x="{LEFT}" y="{height - 8}">{format_time(first)}</text>')
    parts.append(f'<text {end} y="{height - 8}">{format_time(last)}</text></svg>')
    return "\n".join(parts)
