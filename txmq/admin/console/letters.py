"""Pages of dead letters: groups that have some, the letters of one group by a filter,
one letter with its whole life, and its edit.
"""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from txmq.admin.console.bodies import CONTENT_TYPE, Decoded, decode
from txmq.admin.console.life import life_of
from txmq.admin.console.page import Page, Reader, Refused, View
from txmq.admin.numbers import is_whole_number
from txmq.model.letter_filter import (
    FIELDS,
    STATES,
    InvalidFilter,
    LetterFilter,
    Unfinished,
    format_filter,
    parse_filter,
    unfinished,
)
from txmq.model.units import MILLISECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

SCANNED = 500  # groups of one call
MAX_CALLS = 10
MAX_GROUPS = 200  # with letters, on one page
MAX_ERRORS = 25  # groups of letters with one fingerprint
MAX_SCANS = 8  # calls for one page, where few letters fit
SCAN = 250 * MILLISECOND  # after which a page has what was found, and goes on behind it
MAX_SAVED = 100
MAX_OFFERS = 50
AGES = ("1h", "1d", "7d", "30d", "older")
COUNTED = {"states", "topic", "error_type", "fingerprint"}  # counted without a search
EDITABLE = ("text", "json", "cloudevent")  # kinds of bodies that can be edited as a text


async def groups(reader: Reader) -> View:
    """List the groups that have dead letters, those with the most first; or the
    letters of a filter that names a group.
    """
    wrong: InvalidFilter | None = None
    if written := reader.text("filter"):
        try:
            if group := parse_filter(written, reader.now).group:
                reader.names = (group,)
                return await letters(reader)
            message = "this filter names no group"
            wrong = InvalidFilter(message, written, 0, hint="begin with group:NAME")
        except InvalidFilter as error:
            wrong = error
    found: list[dict[str, Any]] = []
    after, looked = "", 0
    for _ in range(MAX_CALLS):
        reply = await reader.ask("group.list", after=after, limit=SCANNED)
        looked += len(reply["groups"])
        found += [one for one in reply["groups"] if one["letters"]]
        after = reply["next"] or ""
        if not after:
            break
    found.sort(key=lambda one: (-one["letters"], one["group"]))
    values: dict[str, Any] = {"rows": found[:MAX_GROUPS], "count": len(found), "looked": looked}
    values["wrong"] = wrong
    return View("letter_groups.html", values | {"more": bool(after)})


async def letters(reader: Reader) -> View:
    """Show the letters of a group that a filter selects, by fingerprint and in a
    list.
    """
    [group] = reader.names
    written = reader.text("filter")
    wrong: InvalidFilter | None = None
    wanted = LetterFilter(None, {})
    try:
        wanted = _of_group(parse_filter(written, reader.now), group, written)
    except InvalidFilter as error:
        wrong = error
    select = wanted.select
    reply: dict[str, Any] = {"letters": [], "next": None, "scanned": 0}
    counted: dict[str, Any] | None = None
    if wrong is None:
        reply = await _page(reader, group, select)
        if not reader.text("cursor") and (select.keys() <= COUNTED or reader.text("count")):
            counted = await reader.ask("dlq.stats", group=group, select=select, keys=False)
    saved: dict[str, Any] = {"selections": []}
    if reader.may("dlq.saved").allowed:
        saved = await reader.ask("dlq.saved", limit=MAX_SAVED)
    errors = [] if counted is None else counted["fingerprints"]
    return View(
        "letters.html",
        {
            "group": group,
            "written": written,
            "wrong": wrong,
            "rows": reply["letters"],
            "following": reply["next"],
            "scanned": reply["scanned"],
            "counted": counted,
            "errors": [_with_trend(one) for one in errors[:MAX_ERRORS]],
            "ages": AGES,
            "saved": [
                {"name": one["name"], "filter": format_filter(one["select"])}
                for one in saved["selections"]
            ],
            "link": _with(select),
            "plan": _plan_name(group, reader.now),
        },
    )


def _of_group(wanted: LetterFilter, group: str, written: str) -> LetterFilter:
    """Return a filter for the letters of a group. Raises InvalidFilter."""
    if wanted.group not in (None, group):
        message = f"this page is of group {group}"
        at = max(0, written.find("group"))
        raise InvalidFilter(message, written, at, hint="choose the group at Letters")
    return wanted


async def _page(reader: Reader, group: str, select: dict[str, Any]) -> dict[str, Any]:
    """Return a page of letters, without bodies: several calls, where few fit."""
    found: list[dict[str, Any]] = []
    cursor: str | None = reader.text("cursor") or None
    scanned, began = 0, reader.now
    for _ in range(MAX_SCANS):
        args = {"group": group, "select": select, "limit": reader.limit - len(found)}
        reply = await reader.ask("dlq.list", **args, **({"cursor": cursor} if cursor else {}))
        found += reply["letters"]
        scanned += reply["scanned"]
        cursor = reply["next"]
        if cursor is None or len(found) >= reader.limit or reader.now - began > SCAN:
            break
    return {"letters": found, "next": cursor, "scanned": scanned}


def _with_trend(one: dict[str, Any]) -> dict[str, Any]:
    """Add what became of the number of letters: more in this hour than the hours of
    the day have on average, or fewer.
    """
    hour, day = one["1h"], one["1h"] + one["1d"]
    mean = day / 24
    trend = "steady"
    if hour > 2 * mean and hour > 1:
        trend = "rising"
    elif day and hour < mean / 2:
        trend = "falling"
    elif not day:
        trend = "quiet"
    return one | {"trend": trend, "parts": [one[age] for age in AGES]}


def _with(select: dict[str, Any]) -> Any:  # noqa: ANN401  # a function for the template
    """Return a function that gives the filter with another property."""

    def changed(**more: object) -> str:
        return format_filter(select | more)

    return changed


def _plan_name(group: str, now: int) -> str:
    return f"{group.replace('@', '-')[:80]}-{now // 1_000_000 % 10_000_000}"


async def letter(reader: Reader) -> View:
    """Show one letter: its message, its errors, and all that became of it."""
    place = _place(reader)
    shown, may_read = await _letter(reader, place)
    decoded = await _decoded(reader, shown)
    at = f"{place['topic']}/{place['partition']}/{place['offset']}"
    events = await life_of(reader, shown)
    may_life = reader.may(
        "message.life", topic=shown["topic"], partition=shown["partition"], offset=shown["offset"]
    )
    return View(
        "letter.html",
        {
            "one": shown,
            "at": at,
            "body": decoded,
            "may_read": may_read,
            "may_life": may_life,
            "events": events,
            "is_open": shown["state"] in ("open", "dead")
            and not (shown["reserved_by"] or shown["plan"]),
            "members": await _members(reader, shown["group"]),
        },
    )


async def edit(reader: Reader) -> View:
    """Edit the body and the headers of a letter. The diff is shown before it acts."""
    place = _place(reader)
    shown, may_read = await _letter(reader, place)
    decoded = await _decoded(reader, shown)
    body = None
    if decoded is not None and decoded.kind in EDITABLE and not decoded.cut:
        text = b64decode(shown["body"]).decode(errors="replace")
        body = None if "\r" in text else text
    at = f"{place['topic']}/{place['partition']}/{place['offset']}"
    return View(
        "letter_edit.html",
        {"one": shown, "at": at, "body": body, "decoded": decoded, "may_read": may_read},
    )


def _place(reader: Reader) -> dict[str, Any]:
    group, topic, *numbers = reader.names
    if not all(map(is_whole_number, numbers)):
        raise Refused("BadRequest", "a letter's place is TOPIC/PARTITION/OFFSET", "", 400)
    partition, offset = map(int, numbers)
    return {"group": group, "topic": topic, "partition": partition, "offset": offset}


async def _letter(reader: Reader, place: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    may_read = reader.may("dlq.show", **place, bodies=True)
    bodies = {"bodies": True} if may_read.allowed else {}
    return await reader.ask("dlq.show", **place, **bodies), may_read


async def _decoded(reader: Reader, shown: dict[str, Any]) -> Decoded | None:
    """Return the body of a letter; None = it is hidden, or damaged."""
    if shown.get("body") is None:
        return None
    schema = ""
    if reader.may("topic.show", name=shown["topic"]).allowed:
        try:
            schema = (await reader.ask("topic.show", name=shown["topic"])).get("schema") or ""
        except Refused:  # the topic was deleted
            schema = ""
    headers = shown.get("headers") or {}
    return decode(b64decode(shown["body"]), headers.get(CONTENT_TYPE, ""), schema, headers)


async def _members(reader: Reader, group: str) -> list[str]:
    """Return members that could try a letter."""
    if not reader.may("group.show", group=group).allowed:
        return []
    shown = await reader.ask("group.show", group=group)
    return [one["member"] for one in shown["member_list"][:MAX_OFFERS]]


async def offers(reader: Reader) -> list[str]:
    """Return texts to which a filter that is being typed may be completed."""
    written = reader.text("filter")
    typed = unfinished(written, reader.number("at", len(written)) or 0)
    names = await _names(reader, typed)
    ends = ":" if typed.field is None else " "
    begun = typed.begun.lower()
    fitting = [one for one in names if begun in one.lower() and one.lower() != begun]
    head = written[: typed.start]
    return [
        head + (one + ends if typed.field is None else _quoted(one)) for one in fitting[:MAX_OFFERS]
    ]


def _quoted(value: str) -> str:
    return format_filter({"key": value}).removeprefix("key:")


async def _names(reader: Reader, typed: Unfinished) -> list[str]:
    group = reader.text("group")
    match typed.field:
        case None:
            return list(FIELDS)
        case "state":
            return [*STATES, "any"]
        case "group":
            reply = await reader.ask("group.list", limit=SCANNED)
            return [one["group"] for one in reply["groups"]]
        case "age":
            return ["1h", "1d", "7d"]
        case "error" | "fingerprint" | "topic" if group:
            field = {"error": "by_error_type", "topic": "by_topic"}.get(
                typed.field, "by_fingerprint"
            )
            every = {"states": list(STATES)}
            counted = await reader.ask("dlq.stats", group=group, select=every, keys=False)
            return [str(name) for name in counted[field]]
    return []


def path_of(group: str, at: Iterable[object]) -> str:
    """Return the path of a letter's page."""
    return "/".join(("letters", *(quote(str(one), safe="") for one in (group, *at))))


PAGES = (
    Page("letters", "Dead letters", groups, "Letters", "l", live=False),
    Page("letters/*", "Dead letters", letters, live=False),
    Page("letters/*/*/*/*", "Dead letter", letter, live=False),
    Page("letters/*/*/*/*/edit", "Edit a dead letter", edit, live=False),
)
