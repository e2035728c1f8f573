"""Reports of a reconciliation: a table for the terminal, and a self-contained HTML
page.

The page loads no resource and runs no script, and its policy tells the browser so.
Texts from messages are escaped, unprintable characters included. The page is a function
of the findings, so no clock is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from string import Template
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from txmq.model.measures import counted
from txmq.model.units import SECOND
from txmq_spark.plan.charts import Bar, bar_chart, escape_text
from txmq_spark.plan.directory import PlanMade, PlanManifest
from txmq_spark.plan.rules import LetterClass
from txmq_spark.plan.summary import AGES, OLDER, MissingMessage, PlanSummary

TOP_KEYS: Final = 20  # shown
MEANINGS: Final = {
    LetterClass.PENDING: "an undecided transaction acks or replays it: reconcile again later",
    LetterClass.APPLIED: "its effect is committed: a replay would only lift the fence of its key",
    LetterClass.NO_BUSINESS_ROW: "the row that it is about was never committed, or is gone",
    LetterClass.SUPERSEDED: "a newer version of its key is in the tables, or has been applied",
    LetterClass.POISON: "it would fail again: fix the consumer or the message first",
    LetterClass.REPLAY_CHAIN: "safe to replay, in the order of its key",
    LetterClass.REPLAY_ALONE: "safe to replay",
}
STYLES: Final = {
    LetterClass.PENDING: "yellow",
    LetterClass.APPLIED: "green",
    LetterClass.NO_BUSINESS_ROW: "magenta",
    LetterClass.SUPERSEDED: "cyan",
    LetterClass.POISON: "red",
    LetterClass.REPLAY_CHAIN: "bold blue",
    LetterClass.REPLAY_ALONE: "bold blue",
}
MISSING_MEANINGS: Final = {
    ("transaction", "missing"): "committed, and the broker has never seen the transaction:"
    " its messages are lost, send them again",
    ("transaction", "pending"): "committed, and its messages are not visible yet",
    ("transaction", "rolled back"): "committed, and the broker decided against it:"
    " its messages are lost, send them again",
    ("transaction", "forgotten"): "committed too long ago for the broker to know it",
    ("key", "missing"): "a business row whose key no message has",
    ("key", "removed?"): "a business row whose key no message has; retention has removed some",
    ("row", "missing"): "messages about a row that is gone, or never was",
}


def terminal_summary(manifest: PlanManifest, summary: PlanSummary) -> RenderableType:
    """Return the summary for a terminal.

    Texts from messages are printed as they are, never as markup.
    """
    groups = ", ".join(manifest.facts.groups)
    table = Table(title=f"Dead letters of {groups}", title_justify="left")
    table.add_column("class")
    table.add_column("letters", justify="right")
    table.add_column("what it means")
    for cls in LetterClass:
        count = summary.of_class(cls)
        table.add_row(
            Text(cls, style=STYLES[cls]), str(count), MEANINGS[cls], style="" if count else "dim"
        )
    return Group(table, *_lines(manifest, summary))


def _lines(manifest: PlanManifest, summary: PlanSummary) -> Iterable[Text]:
    tables = ", ".join(manifest.facts.evidence) or "none (no database was read)"
    yield Text(f"Evidence: {tables}")
    total = sum(summary.missing.values())
    by_state = ", ".join(
        f"{count} {what} {state}" for (what, state), count in summary.missing.items()
    )
    yield Text(
        f"Rows without messages, and messages without rows: {total}"
        + (f" ({by_state})" if by_state else ""),
        "red" if total else "",
    )
    yield Text(f"Plan {manifest.digest[:12]}: {_extent(manifest)}", "bold")


def _extent(manifest: PlanManifest) -> str:
    letters = sum(manifest.replays.values())
    return f"{counted(letters, 'letter')} to replay"


def html_page(
    manifest: PlanManifest, made: PlanMade, summary: PlanSummary, path: str = "PLAN"
) -> str:
    """Return the report as one HTML page; `path` is that of the plan's directory."""
    template = Template(resources.files(__package__).joinpath("report.html").read_text("utf-8"))
    samples: dict[str, list[Mapping[str, Any]]] = {cls: [] for cls in LetterClass}
    for row in summary.samples:
        samples[row["class"]].append(row)
    return template.substitute(
        group=escape_text(", ".join(manifest.facts.groups), 2_000),
        headline=_headline(manifest, summary),
        steps=_steps(manifest, summary, path),
        facts=_facts(manifest, made),
        groups=_groups(manifest),
        charts=_charts(summary),
        keys=_keys(summary),
        letters="".join(_class(cls, summary.of_class(cls), samples[cls]) for cls in LetterClass),
        missing=_missing(summary),
    )


def _headline(manifest: PlanManifest, summary: PlanSummary) -> str:
    """Return the few numbers that a reader wants first."""
    replays = sum(manifest.replays.values())
    lost = sum(
        count
        for (what, state), count in summary.missing.items()
        if what == "transaction" and state in ("missing", "rolled back")
    )
    numbers = [
        ("dead letters", summary.letters, ""),
        ("safe to replay", replays, "replay_chain"),
        ("would fail again", summary.of_class(LetterClass.POISON), "poison"),
        ("committed, never sent", lost, "poison" if lost else ""),
    ]
    return "".join(
        f'<div class="number"><b>{count:,}</b><span class="bar {kind}"></span>{name}</div>'
        for name, count, kind in numbers
    )


def _steps(manifest: PlanManifest, summary: PlanSummary, path: str) -> str:
    found = "".join(f"<li>{step}</li>" for step in _next_steps(manifest, summary, path))
    return f"<ol>{found}</ol>" if found else "<p>Nothing: there are no letters.</p>"


def _next_steps(manifest: PlanManifest, summary: PlanSummary, path: str) -> Iterator[str]:
    """Yield what to do, in the order in which it helps."""
    counts = {cls: summary.of_class(cls) for cls in LetterClass}
    lost = [state for what, state in summary.missing if what == "transaction"]
    if {"missing", "rolled back"} & set(lost):
        yield (
            "Send again what was committed and never sent: the list is below, and as a whole in"
            f" {_code(path + '/missing')}."
        )
    if counts[LetterClass.POISON]:
        most = summary.failures[0] if summary.failures else None
        why = (
            f" Most letters failed with {_code(most.error_type or most.fingerprint)}"
            f" ({most.letters:,})."
            if most
            else ""
        )
        yield (
            f"Remove the cause of {counted(counts[LetterClass.POISON], 'letter')} that would fail"
            f" again, or edit their messages: {_code('txmq dlq edit')}.{why}"
        )
    if replays := sum(manifest.replays.values()):
        some = min(replays // 10 + 1, 100)
        yield (
            f"Try some, then replay all {replays:,}:"
            f" {_code(f'txmq-spark replay --plan {path} --canary {some} --pause')}, then"
            f" {_code(f'txmq-spark replay --plan {path}')}."
        )
    settled = counts[LetterClass.SUPERSEDED] + counts[LetterClass.NO_BUSINESS_ROW]
    if settled:
        yield (
            f"Look at what is superseded or about no row, {counted(settled, 'letter')}, and"
            f" abandon it: {_code('txmq dlq abandon')}."
        )
    if counts[LetterClass.SUPERSEDED]:
        yield (
            "Where each message has an effect of its own, newer ones supersede none: reconcile"
            f" with a mapping without {_code('version')}."
        )
    if count := counts[LetterClass.APPLIED]:
        yield (
            f"Where consumers have an inbox, replay {counted(count, 'letter')} with an effect, too,"
            f" to lift the fences of their keys: {_code('reconcile --include applied')}."
        )
    if count := counts[LetterClass.PENDING]:
        yield (
            f"Reconcile again later: undecided transactions hold {counted(count, 'letter')}"
            f" ({_code('txmq tx list')})."
        )


def _code(text: str) -> str:
    return f"<code>{escape_text(text)}</code>"


def _facts(manifest: PlanManifest, made: PlanMade) -> str:
    facts = manifest.facts
    ends = "; ".join(
        f"{topic} " + ", ".join(f"{first}–{end}" for first, end in zip(firsts, ends, strict=True))
        for (topic, ends), firsts in zip(facts.ends.items(), facts.firsts.values(), strict=True)
    )
    database = f"{facts.database} at {format_time(made.snapshot_at)}" if facts.database else "none"
    rows = (
        ("Plan", manifest.digest),
        ("Takes", _extent(manifest)),
        ("Of classes", ", ".join(manifest.filters.include)),
        ("Log", f"{facts.log_id}, offsets: {ends}"),
        ("Database", database),
        ("Evidence", ", ".join(facts.evidence) or "none"),
    )
    return "".join(f"<dt>{name}</dt><dd>{escape_text(value, 2_000)}</dd>" for name, value in rows)


def _groups(manifest: PlanManifest) -> str:
    """Return a table of classes by group."""
    head = _row("th", "group", *LetterClass, "to replay")
    rows = "".join(
        _row(
            "td",
            group,
            *(f"{counts[cls]:,}" for cls in LetterClass),
            f"{manifest.replays[group]:,}",
        )
        for group, counts in manifest.letters.items()
    )
    return _table(head, rows)


def _charts(summary: PlanSummary) -> str:
    by_class = [Bar(cls, summary.of_class(cls), cls) for cls in LetterClass]
    by_print = [
        Bar(f"{one.error_type} {one.fingerprint}".strip() or "(none)", one.letters, "neutral")
        for one in summary.failures
    ]
    kinds, rest = summary.other_failures
    if kinds:
        by_print.append(Bar(f"{kinds} others", rest, "neutral"))
    by_age = [
        Bar(age, sum(n for (_cls, one), n in summary.ages.items() if one == age), "neutral")
        for age in (*(name for _limit, name in AGES), OLDER)
    ]
    charts = (
        ("Letters by class", by_class),
        ("Letters by failure", by_print),
        ("Letters by age, at the time of this report", by_age),
    )
    return "".join(bar_chart(title, rows) for title, rows in charts)


def _keys(summary: PlanSummary) -> str:
    keys = summary.keys
    if not keys.keys:
        return "<p>No letter has a key.</p>"
    alone = summary.letters - keys.letters
    text = (
        f"{counted(keys.letters, 'letter')} with {counted(keys.keys, 'key')}; the key with most"
        f" of them has {keys.share(1):.0%}, the first 10 have {keys.share(10):.0%}, the first 100"
        f" {keys.share(100):.0%}."
    )
    if alone:
        text += f" {counted(alone, 'letter')} without a key."
    head = _row("th", "key", "topic", "group", "letters", "to replay", "oldest")
    rows = "".join(
        _row(
            "td",
            one.key,
            one.topic,
            one.group,
            f"{one.letters:,}",
            f"{one.replayed:,}",
            format_time(one.oldest),
        )
        for one in keys.top[:TOP_KEYS]
    )
    return f"<p>{escape_text(text, 1_000)}</p>{_table(head, rows)}"


def _class(cls: LetterClass, count: int, rows: Sequence[Mapping[str, Any]]) -> str:
    if not count:
        return ""
    shown = "".join(_letter(row) for row in rows)
    more = f"<p>and {count - len(rows):,} more</p>" if count > len(rows) else ""
    head = _row("th", "letter", "key", "failure", "died", "why", "plan")
    meaning = escape_text(MEANINGS[cls])
    title = f'<h3><span class="dot {cls}"></span>{cls}: {count:,}</h3><p>{meaning}</p>'
    return f"<section>{title}{_table(head, shown)}{more}</section>"


def _letter(row: Mapping[str, Any]) -> str:
    kind, error = row["error_type"] or "", row["error"] or ""
    cells = (
        f"{row['topic']}/{row['partition']}/{row['offset']}",
        row["key"] or "",
        _failure(kind, error),
        format_time(row["dead_at"]),
        row["reason"],
        "replays" if row["replay"] else "leaves",
    )
    return _row("td", *cells)


def _failure(kind: str, error: str) -> str:
    """Return the type of an error and its text, which may begin with the type, or with
    the name of its class.
    """
    for name in dict.fromkeys((kind, kind.rpartition(".")[2])):
        error = error.removeprefix(f"{name}: ") if name else error
    return ": ".join(filter(None, (kind, error)))


def _table(head: str, rows: str) -> str:
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _row(tag: str, *cells: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _missing(summary: PlanSummary) -> str:
    if not summary.missing:
        return "<p>None: every committed row that was read has its message, and the reverse.</p>"
    counts = "".join(
        _row("td", what, state, f"{count:,}", MISSING_MEANINGS.get((what, state), ""))
        for (what, state), count in summary.missing.items()
    )
    rows = "".join(_missing_row(one) for one in summary.missing_samples)
    total, listed = sum(summary.missing.values()), len(summary.missing_samples)
    more = f"<p>and {total - listed:,} more</p>" if total > listed else ""
    return (
        _table(_row("th", "what", "state", "number", "what it means"), counts)
        + "<h3>The first of them</h3>"
        + _table(_row("th", "what", "table", "name", "state", "committed"), rows)
        + more
    )


def _missing_row(one: MissingMessage) -> str:
    return _row("td", one.what, one.table or "", one.name, one.state, format_time(one.at))


def format_time(micros: int | None) -> str:
    """Return a time as text, in UTC."""
    return (
        ""
        if micros is None
        else f"{datetime.fromtimestamp(micros / SECOND, UTC):%Y-%m-%d %H:%M:%S} UTC"
    )
