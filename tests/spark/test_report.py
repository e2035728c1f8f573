"""Reports: texts of messages are shown, never interpreted."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from tests.spark.letters import Letter, letter
from txmq_spark.plan.charts import Bar, bar_chart, escape_text
from txmq_spark.plan.directory import PlanFilters, PlanInputs, PlanMade, PlanManifest
from txmq_spark.plan.report import html_page, terminal_summary
from txmq_spark.plan.rules import SAFE, LetterClass, PlanRules
from txmq_spark.plan.summary import (
    AGES,
    LISTED_LETTERS,
    OLDER,
    TOP_FAILURES,
    Concentration,
    Failure,
    KeyCount,
    MissingMessage,
    PlanSummary,
)

HOUR = 3_600_000_000
NOW = 1_700_000_000_000_000
HOSTILE = [
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    '"><svg/onload=alert(1)>',
    "$facts ${letters}",
    "\x1b]0;owned\x07\x1b[31m",
    "[bold red]markup[/]",
    "\u202egnp.exe",
    "=cmd|' /C calc'!A0",
    "javascript:alert(1)",
    "a" * 10_000,
    "\x00\n\r\u2028",
]


def found(
    letters: Sequence[Letter], missing: Sequence[MissingMessage] = (), unlisted: int = 0
) -> tuple[PlanManifest, PlanMade, PlanSummary]:
    """Return what `html_page` takes, for letters that may have a class."""
    rows: list[Letter] = [
        {"class": "replay_alone", "reason": "it is fine", "replay": True} | one for one in letters
    ]
    for row in rows:
        row["replay"] = row["class"] in SAFE
    classes = Counter(("billing", row["class"]) for row in rows)
    replays = sum(row["replay"] for row in rows)
    kinds = Counter((row["error_type"], row["fingerprint"], row["error"]) for row in rows)
    failures = sorted(Failure(*kind, count) for kind, count in kinds.items())
    rest = failures[TOP_FAILURES:]
    keys = Counter(row["key"] for row in rows if row["key"] is not None)
    top = tuple(KeyCount("billing", "orders", key, n, n, NOW) for key, n in sorted(keys.items()))
    counts = Counter((one.what, one.state) for one in missing)
    if unlisted:
        counts[missing[0].what, missing[0].state] += unlisted
    facts = PlanInputs(
        groups=("billing",),
        log_id="l",
        firsts={"orders": (0,)},
        ends={"orders": (9,)},
        evidence=("applied",),
        database="7/shop",
    )
    manifest = PlanManifest(
        facts=facts,
        filters=PlanFilters.of(PlanRules()),
        letters={"billing": {cls: classes["billing", str(cls)] for cls in LetterClass}},
        replays={"billing": replays},
        parts=(),
    )
    summary = PlanSummary(
        now=NOW,
        classes=dict(classes),
        replayed={},
        ages=dict(Counter((row["class"], age(row)) for row in rows)),
        failures=tuple(failures[:TOP_FAILURES]),
        other_failures=(len(rest), sum(one.letters for one in rest)),
        keys=Concentration(len(keys), keys.total(), top),
        samples=tuple(sorted(rows, key=lambda row: row["offset"])[:LISTED_LETTERS]),
        missing=dict(counts),
        missing_samples=tuple(missing[:100]),
    )
    return manifest.sealed(), PlanMade(snapshot_at=NOW), summary


def age(row: Letter) -> str:
    return next((name for limit, name in AGES if NOW - row["dead_at"] < limit), OLDER)


class Seen(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_page_shows_hostile_texts_without_interpreting_them(text: str) -> None:
    fields: dict[str, Any] = {
        "error_type": text,
        "error": text,
        "fingerprint": text,
        "dead_at": NOW,
    }
    html = html_page(
        *found([letter(1, text, **fields)], [MissingMessage("key", text, text, "missing", None)])
    )
    plain = html_page(
        *found([letter(1, "k", dead_at=NOW)], [MissingMessage("key", "k", "k", "missing", None)])
    )
    seen, known = Seen(html), Seen(plain)
    assert set(seen.tags) == set(known.tags)
    assert {name for name, _value in seen.attributes} == {name for name, _value in known.attributes}
    shown = "".join(seen.texts)
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert len(html) < len(plain) + 10_000
    visible = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )
    assert visible[:30] in shown


def test_a_page_is_self_contained_and_forbids_scripts() -> None:
    html = html_page(*found([letter(n, f"k{n}", dead_at=NOW) for n in range(3)]))
    seen = Seen(html)
    assert not {"script", "link", "iframe", "object", "img", "base", "form"} & set(seen.tags)
    assert not {"href", "src", "srcset", "action", "onload"} & {
        name for name, _value in seen.attributes
    }
    assert re.findall(r"url\(|@import|https?:", html) == []
    policy = dict(seen.attributes).get("content", "") or ""
    assert "default-src 'none'" in html
    assert "script-src" not in policy


def test_a_page_counts_classes_failures_and_ages() -> None:
    letters = [
        letter(1, "a", error_type="Timeout", fingerprint="f1", dead_at=NOW - HOUR // 2),
        letter(2, "b", error_type="Timeout", fingerprint="f1", dead_at=NOW - 5 * HOUR),
        letter(3, "c", error_type="BadOrder", fingerprint="f2", dead_at=NOW - 100 * HOUR)
        | {"class": "applied"},
        letter(
            4,
            "d",
            error_type="BadOrder",
            fingerprint="f2",
            dead_at=NOW - 1_000 * HOUR,
        )
        | {"class": "no_business_row"},
    ]
    html = html_page(*found(letters))
    titles = re.findall(r"<title>([^<]*): (\d+)</title>", html)
    assert dict(titles) == {
        **{str(cls): "0" for cls in LetterClass},
        "applied": "1",
        "no_business_row": "1",
        "replay_alone": "2",
        "Timeout f1": "2",
        "BadOrder f2": "2",
        "under an hour": "1",
        "under a day": "1",
        "under a week": "1",
        "a week or more": "1",
    }
    assert "7/shop at 2023-11-14 22:13:20 UTC" in html


def test_long_lists_are_cut_with_the_number_of_the_rest() -> None:
    letters = [letter(n, error_type=f"E{n:03}", dead_at=NOW) for n in range(LISTED_LETTERS + 5)]
    missing = [MissingMessage("transaction", None, f"{n:032x}", "missing", NOW) for n in range(150)]
    html = html_page(*found(letters, missing, unlisted=7))
    assert "and 5 more" in html
    assert "and 57 more" in html
    assert f"{LISTED_LETTERS + 5 - TOP_FAILURES} others" in html
    assert html.count("<tr>") < 220


def test_the_same_findings_make_the_same_page() -> None:
    letters = [
        letter(n, f"k{n % 2}", dead_at=NOW - n * HOUR, fingerprint=f"f{n}") for n in range(9)
    ]
    assert html_page(*found(letters)) == html_page(*found(letters[::-1]))


def test_the_terminal_shows_counts_and_no_markup_of_messages() -> None:
    out = Console(file=io.StringIO(), width=120, force_terminal=False)
    missing = [
        MissingMessage("key", "orders", "k", "missing", None),
        MissingMessage("transaction", None, "t", "pending", NOW),
    ]
    poison = letter(1, "[bold]k[/]", dead_at=NOW) | {"class": "poison"}
    manifest, _made, summary = found([poison, letter(2, dead_at=NOW)], missing, 3)
    out.print(terminal_summary(manifest, summary))
    text = out.file.getvalue()  # type: ignore[attr-defined] # a StringIO
    assert re.search(r"poison\s+│\s+1 │", text)
    assert re.search(r"replay_alone\s+│\s+1 │", text)
    assert "messages without rows: 5 (4 key missing, 1 transaction pending)" in text
    assert "1 letter to replay" in text


def test_a_page_says_what_to_do_and_which_keys_have_most_letters() -> None:
    letters = [letter(n, "hot" if n < 8 else f"k{n}", dead_at=NOW) for n in range(10)]
    letters[0]["class"], letters[1]["class"] = "poison", "pending"
    lost = [MissingMessage("transaction", None, "ab", "missing", NOW)]
    html = html_page(*found(letters, lost), path="s3a://plans/<today>")
    assert "txmq-spark replay --plan s3a://plans/&lt;today&gt; --canary 1 --pause" in html
    assert "10 letters with 3 keys; the key with most of them has 80%" in html
    steps = re.findall(r"<li>([A-Z]\w+ \w+)", html)
    assert steps == ["Send again", "Remove the", "Try some", "Reconcile again"]
    assert "Nothing: there are no letters." in html_page(*found([]))


def test_a_failure_does_not_repeat_the_type_of_its_error() -> None:
    errors = {
        "shop.errors.BadOrder": "BadOrder: no customer",
        "ValueError": "ValueError: ValueError: twice",
        "KeyError": "'KeyError: a'",
    }
    letters = [
        letter(n, error_type=kind, error=text, dead_at=NOW)
        for n, (kind, text) in enumerate(errors.items())
    ]
    html = html_page(*found(letters))
    assert "<td>shop.errors.BadOrder: no customer</td>" in html
    assert "<td>ValueError: ValueError: twice</td>" in html
    assert "<td>KeyError: &#x27;KeyError: a&#x27;</td>" in html


def test_a_page_says_when_newer_versions_do_not_supersede() -> None:
    advice = "without <code>version</code>"
    of_class = {
        cls: html_page(*found([letter(1, dead_at=NOW) | {"class": cls}])) for cls in LetterClass
    }
    assert [cls for cls, html in of_class.items() if advice in html] == [LetterClass.SUPERSEDED]


def test_a_label_keeps_its_end() -> None:
    kind = "shop.billing.workers.errors.BadOrder"
    svg = bar_chart("t", [Bar(f"{kind} 436b19f1e77898fb", 1, "x")])
    assert ">….errors.BadOrder 436b19f1e77898fb<" in svg
    assert f"<title>{kind} 436b19f1e77898fb: 1</title>" in svg


def test_bars_are_in_proportion_and_never_empty_for_a_count() -> None:
    svg = bar_chart(
        "t", [Bar("a", 100_000, "x"), Bar("b", 50_000, "x"), Bar("c", 1, "x"), Bar("d", 0, "x")]
    )
    assert [int(width) for width in re.findall(r'<rect [^>]*width="(\d+)"', svg)] == [
        640,
        320,
        2,
        0,
    ]
    assert "none" in bar_chart("t", [])


def test_texts_are_cut_at_the_limit() -> None:
    assert escape_text("abc", 3) == "abc"
    assert escape_text("abcd", 3) == "ab…"
    assert escape_text("<&>'\"") == "&lt;&amp;&gt;&#x27;&quot;"
