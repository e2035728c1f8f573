"""Reports of a reconciliation: a table for the terminal, and a self-contained HTML
page.

The page loads no resource and runs no script, and its policy tells the browser so.
Texts from messages are escaped, and unprintable characters are replaced.
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

from txmq.model.units import DAY, HOUR, SECOND
from txmq_spark.charts import Bar, bar_chart, escape_text
from txmq_spark.plan import LetterClass, PlannedLetter
from txmq_spark.plan_file import PlanHeader
from txmq_spark.reconcile import MissingMessage, Reconciliation

AGES: Final = ((HOUR, "under an hour"), (DAY, "under a day"), (7 * DAY, "under a week"))
OLDER: Final = "a week or more"
CHART_BARS: Final = 12  # the other bars are summed up
LISTED_LETTERS: Final = 20  # shown of each class
LISTED_MISSING: Final = 100  # shown of the rows without a message
MEANINGS: Final = {
    LetterClass.PENDING: "an undecided transaction acks or replays it: reconcile again later",
    LetterClass.APPLIED: "its effect is committed: a replay would only lift the fence of its key",
    LetterClass.NO_BUSINESS_ROW: "the row that it is about was never committed, or is gone",
    LetterClass.SUPERSEDED: "a newer version of its key has been applied",
    LetterClass.POISON: "it would fail again: fix the consumer or the message first",
    LetterClass.REPLAY_CHAIN: "safe to replay, in the order of its key",
    LetterClass.REPLAY_ALONE: "safe to replay",
}


def terminal_summary(found: Reconciliation) -> RenderableType:
    """Return the summary for a terminal.

    Texts from messages are printed as they are, never as markup.
    """
    header, counts = found.manifest.header, found.counts()
    table = Table(title=f"Dead letters of {header.facts.group}", title_justify="left")
    table.add_column("class")
    table.add_column("letters", justify="right")
    table.add_column("what it means")
    for cls in LetterClass:
        table.add_row(
            Text(cls, style=STYLES[cls]),
            str(counts[cls]),
            MEANINGS[cls],
            style="" if counts[cls] else "dim",
        )
    return Group(table, *_lines(found, header))


STYLES: Final = {
    LetterClass.PENDING: "yellow",
    LetterClass.APPLIED: "green",
    LetterClass.NO_BUSINESS_ROW: "magenta",
    LetterClass.SUPERSEDED: "cyan",
    LetterClass.POISON: "red",
    LetterClass.REPLAY_CHAIN: "bold blue",
    LetterClass.REPLAY_ALONE: "bold blue",
}


def _lines(found: Reconciliation, header: PlanHeader) -> Iterable[Text]:
    facts = header.facts
    tables = ", ".join(facts.evidence) or "none (no database was read)"
    yield Text(f"Evidence: {tables}")
    total = len(found.missing) + found.unlisted
    states = Counter(row.state for row in found.missing)
    by_state = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield Text(
        f"Committed rows without a message: {total}" + (f" ({by_state})" if by_state else ""),
        "red" if total else "",
    )
    yield Text(f"Plan {header.digest[:12]}: {_extent(header)}", "bold")


def _extent(header: PlanHeader) -> str:
    letters, chunks = header.replays, header.chunks
    return (
        f"{letters} letter{'s' * (letters != 1)} to replay in {chunks} chunk{'s' * (chunks != 1)}"
    )


def html_page(found: Reconciliation) -> str:
    """Return the report as one HTML page."""
    header = found.manifest.header
    template = Template(resources.files(__package__).joinpath("report.html").read_text("utf-8"))
    return template.substitute(
        group=escape_text(header.facts.group),
        facts=_facts(header),
        charts=_charts(found),
        letters="".join(
            _class(cls, [item for item in found.planned if item.cls is cls]) for cls in LetterClass
        ),
        missing=_missing(found.missing, found.unlisted),
    )


def _facts(header: PlanHeader) -> str:
    facts = header.facts
    ends = "; ".join(f"{topic} {', '.join(map(str, ends))}" for topic, ends in facts.ends.items())
    rows = (
        ("Plan", header.digest),
        ("Takes", _extent(header)),
        ("Of classes", ", ".join(header.filters.include)),
        ("Log", f"{facts.log_id}, published ends: {ends}"),
        (
            "Database",
            f"{facts.database} at {format_time(facts.snapshot_at)}" if facts.database else "none",
        ),
        ("Evidence", ", ".join(facts.evidence) or "none"),
    )
    return "".join(f"<dt>{name}</dt><dd>{escape_text(value, 2_000)}</dd>" for name, value in rows)


def _charts(found: Reconciliation) -> str:
    counts = found.counts()
    by_class = [Bar(cls, counts[cls], cls) for cls in LetterClass]
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
        bar_chart(title, rows)
        for title, rows in zip(titles, (by_class, by_print, by_age), strict=True)
    )


def _most(counts: Counter[str]) -> list[tuple[str, int]]:
    """Return the largest counts, equal ones by name, and the sum of the rest."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = ordered[CHART_BARS:]
    return [
        *ordered[:CHART_BARS],
        *([(f"{len(rest)} others", sum(count for _name, count in rest))] if rest else []),
    ]


def _now(found: Reconciliation) -> int:
    """Return the time of the snapshot, or the time of the youngest letter.

    The report is a function of the findings, so no clock is read.
    """
    return found.manifest.header.facts.snapshot_at or max(
        (item.letter.dead_at for item in found.planned), default=0
    )


def _age(dead_at: int, now: int) -> str:
    return next((name for limit, name in AGES if now - dead_at < limit), OLDER)


def _class(cls: LetterClass, items: Sequence[PlannedLetter]) -> str:
    if not items:
        return ""
    rows = "".join(_letter(item) for item in items[:LISTED_LETTERS])
    more = f"<p>and {len(items) - LISTED_LETTERS} more</p>" if len(items) > LISTED_LETTERS else ""
    head = _row("th", "letter", "key", "failure", "died", "why", "chunk")
    meaning = escape_text(MEANINGS[cls])
    title = f'<h2><span class="dot {cls}"></span>{cls}: {len(items)}</h2><p>{meaning}</p>'
    return (
        f"<section>{title}<table><thead>{head}</thead><tbody>{rows}</tbody></table>{more}</section>"
    )


def _letter(item: PlannedLetter) -> str:
    letter = item.letter
    cells = (
        f"{letter.topic}/{letter.partition}/{letter.offset}",
        letter.key or "",
        f"{letter.error_type}: {letter.error_text}" if letter.error_text else letter.error_type,
        format_time(letter.dead_at),
        item.reason,
        "left" if item.chunk is None else str(item.chunk),
    )
    return _row("td", *cells)


def _row(tag: str, *cells: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _missing(missing: Sequence[MissingMessage], unlisted: int) -> str:
    total = len(missing) + unlisted
    if not total:
        return "<p>None: every committed row that was read has its message.</p>"
    rows = "".join(
        _row("td", row.what, row.name, row.state, format_time(row.at))
        for row in missing[:LISTED_MISSING]
    )
    more = f"<p>and {total - LISTED_MISSING} more</p>" if total > LISTED_MISSING else ""
    head = _row("th", "what", "name", "state", "committed")
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>{more}"


def format_time(micros: int | None) -> str:
    """Return a time as text, in UTC."""
    return (
        ""
        if micros is None
        else f"{datetime.fromtimestamp(micros / SECOND, UTC):%Y-%m-%d %H:%M:%S} UTC"
    )
