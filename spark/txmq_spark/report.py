"""What a reconciliation found, for people: a table in the terminal and one HTML page
that needs nothing else.

The page loads nothing and runs nothing, and says so to the browser. Whatever comes from
messages is escaped, and what does not print is replaced: a body is data, also to
whoever looks at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from string import Template
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from txmq_spark.charts import Bar, bars, safe
from txmq_spark.manifest import Header
from txmq_spark.plan import Class, Planned
from txmq_spark.reconcile import Missing, Reconciliation

SECOND: Final = 1_000_000
AGES: Final = ((3_600, "under an hour"), (86_400, "under a day"), (7 * 86_400, "under a week"))
OLDER: Final = "a week or more"
MOST: Final = 12  # bars of a chart
LETTERS: Final = 20  # shown of each class
MISSING: Final = 100  # shown of the rows without a message
MEANINGS: Final = {
    Class.PENDING: "an undecided transaction has it in hand: run this again later",
    Class.APPLIED: "its effect is committed: replayed, it would do nothing but lift its key's fence",
    Class.NO_BUSINESS_ROW: "what it speaks of was never committed, or is gone",
    Class.SUPERSEDED: "a newer version of its key has been applied",
    Class.POISON: "it would fail again: mend the consumer or the message first",
    Class.REPLAY_CHAIN: "safe to replay, in the order of its key",
    Class.REPLAY_ALONE: "safe to replay",
}


def terminal(found: Reconciliation) -> RenderableType:
    """The summary for a terminal. Texts of strangers are shown as they are printed,
    never as markup.
    """
    header, counts = found.manifest.header, found.counts()
    table = Table(title=f"Dead letters of {header.facts.group}", title_justify="left")
    table.add_column("class")
    table.add_column("letters", justify="right")
    table.add_column("what it means")
    for cls in Class:
        table.add_row(
            Text(cls, style=STYLES[cls]),
            str(counts[cls]),
            MEANINGS[cls],
            style="" if counts[cls] else "dim",
        )
    return Group(table, *_lines(found, header))


STYLES: Final = {
    Class.PENDING: "yellow",
    Class.APPLIED: "green",
    Class.NO_BUSINESS_ROW: "magenta",
    Class.SUPERSEDED: "cyan",
    Class.POISON: "red",
    Class.REPLAY_CHAIN: "bold blue",
    Class.REPLAY_ALONE: "bold blue",
}


def _lines(found: Reconciliation, header: Header) -> Iterable[Text]:
    facts = header.facts
    tables = (
        ", ".join(facts.evidence) or "none: without a database only the letters themselves speak"
    )
    yield Text(f"Evidence: {tables}")
    total = len(found.missing) + found.unlisted
    states = Counter(row.state for row in found.missing)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield Text(
        f"Committed rows without a message: {total}" + (f" ({told})" if told else ""),
        "red" if total else "",
    )
    yield Text(f"Plan {header.digest[:12]}: {_extent(header)}", "bold")


def _extent(header: Header) -> str:
    letters, chunks = header.replays, header.chunks
    return (
        f"{letters} letter{'s' * (letters != 1)} to replay in {chunks} chunk{'s' * (chunks != 1)}"
    )


def page(found: Reconciliation) -> str:
    """The report as one HTML page."""
    header = found.manifest.header
    template = Template(resources.files(__package__).joinpath("report.html").read_text("utf-8"))
    return template.substitute(
        group=safe(header.facts.group),
        facts=_facts(header),
        charts=_charts(found),
        letters="".join(
            _class(cls, [item for item in found.planned if item.cls is cls]) for cls in Class
        ),
        missing=_missing(found.missing, found.unlisted),
    )


def _facts(header: Header) -> str:
    facts = header.facts
    ends = "; ".join(f"{topic} {', '.join(map(str, ends))}" for topic, ends in facts.ends.items())
    rows = (
        ("Plan", header.digest),
        ("Takes", _extent(header)),
        ("Of classes", ", ".join(header.filters.include)),
        ("Log", f"{facts.log_id}, published ends: {ends}"),
        (
            "Database",
            f"{facts.database} at {when(facts.snapshot_at)}" if facts.database else "none asked",
        ),
        ("Evidence", ", ".join(facts.evidence) or "none"),
    )
    return "".join(f"<dt>{name}</dt><dd>{safe(value, 2_000)}</dd>" for name, value in rows)


def _charts(found: Reconciliation) -> str:
    counts = found.counts()
    by_class = [Bar(cls, counts[cls], cls) for cls in Class]
    prints = Counter(
        f"{item.letter.error_type} {item.letter.fingerprint}".strip() for item in found.planned
    )
    by_print = [Bar(name or "(none)", count, "neutral") for name, count in _most(prints)]
    ages = Counter(_age(item.letter.dead_at, _now(found)) for item in found.planned)
    by_age = [
        Bar(name, ages[name], "neutral") for name in (*(name for _limit, name in AGES), OLDER)
    ]
    titles = (
        "Letters by class",
        "Letters by failure",
        "Letters by age, at the time of this report",
    )
    return "".join(
        bars(title, rows) for title, rows in zip(titles, (by_class, by_print, by_age), strict=True)
    )


def _most(counts: Counter[str]) -> list[tuple[str, int]]:
    """The most frequent first, equal ones by name; the rest as one."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = ordered[MOST:]
    return [
        *ordered[:MOST],
        *([(f"{len(rest)} others", sum(count for _name, count in rest))] if rest else []),
    ]


def _now(found: Reconciliation) -> int:
    """The time of the snapshot; without one, of the youngest letter: no clock has a say
    in a report of fixed facts.
    """
    return found.manifest.header.facts.snapshot_at or max(
        (item.letter.dead_at for item in found.planned), default=0
    )


def _age(dead_at: int, now: int) -> str:
    return next((name for limit, name in AGES if now - dead_at < limit * SECOND), OLDER)


def _class(cls: Class, items: Sequence[Planned]) -> str:
    if not items:
        return ""
    rows = "".join(_letter(item) for item in items[:LETTERS])
    more = f"<p>and {len(items) - LETTERS} more</p>" if len(items) > LETTERS else ""
    head = "<tr><th>letter</th><th>key</th><th>failure</th><th>died</th><th>why</th><th>chunk</th></tr>"
    title = (
        f'<h2><span class="dot {cls}"></span>{cls}: {len(items)}</h2><p>{safe(MEANINGS[cls])}</p>'
    )
    return (
        f"<section>{title}<table><thead>{head}</thead><tbody>{rows}</tbody></table>{more}</section>"
    )


def _letter(item: Planned) -> str:
    letter = item.letter
    cells = (
        f"{letter.topic}/{letter.partition}/{letter.offset}",
        letter.key or "",
        f"{letter.error_type}: {letter.error_text}" if letter.error_text else letter.error_type,
        when(letter.dead_at),
        item.reason,
        "left" if item.chunk is None else str(item.chunk),
    )
    return f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in cells)}</tr>"


def _missing(missing: Sequence[Missing], unlisted: int) -> str:
    total = len(missing) + unlisted
    if not total:
        return "<p>None: every committed row that was looked at has its message.</p>"
    rows = "".join(
        f"<tr><td>{safe(row.what)}</td><td>{safe(row.name)}</td><td>{safe(row.state)}</td><td>{when(row.at)}</td></tr>"
        for row in missing[:MISSING]
    )
    more = f"<p>and {total - MISSING} more</p>" if total > MISSING else ""
    head = "<tr><th>what</th><th>name</th><th>state</th><th>committed</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>{more}"


def when(micros: int | None) -> str:
    """A time for people."""
    return (
        ""
        if micros is None
        else f"{datetime.fromtimestamp(micros / SECOND, UTC):%Y-%m-%d %H:%M:%S} UTC"
    )
