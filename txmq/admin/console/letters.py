"""Pages of dead letters: groups that have some, the letters of one group by a filter,
one letter with its whole life, and the form that edits it.
"""

from __future__ import annotations

from base64 import b64decode
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from txmq.admin.addresses import is_whole_number
from txmq.admin.console.bodies import Decoded, decode_message
from txmq.admin.console.life import life_of
from txmq.admin.console.listing import MAX_CALLS, MAX_SCANS, SCAN, SCANNED
from txmq.admin.console.page import Page, PageRequest, Refused, View
from txmq.errors import MessagesDamaged, UnknownLetter
from txmq.model.letter_filter import (
    RETRIED,
    InvalidFilter,
    LetterFilter,
    format_filter,
    parse_filter,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_GROUPS = 200  # with letters, on one page
MAX_ERRORS = 25  # groups of letters with one fingerprint
MAX_SAVED = 100
MAX_MEMBERS = 50  # that are named for a trial
AGES = ("1h", "1d", "7d", "30d", "older")
COUNTED = {"states", "topic", "error_type", "fingerprint"}  # counted without a search
EDITABLE = ("text", "json", "cloudevent")  # kinds of bodies that can be edited as a text


async def groups(request: PageRequest) -> View:
    """List the groups that have dead letters or retries, those with the most letters
    first; or the letters of a filter that names a group.
    """
    wrong: InvalidFilter | None = None
    if written := request.text("filter"):
        try:
            if group := parse_filter(written, request.now).group:
                request.names = (group,)
                return await letters(request)
            message = "this filter names no group"
            wrong = InvalidFilter(message, written, 0, hint="begin with group:NAME")
        except InvalidFilter as error:
            wrong = error
    found: list[dict[str, Any]] = []
    after, looked = "", 0
    for _ in range(MAX_CALLS):
        reply = await request.ask("group.list", after=after, limit=SCANNED)
        looked += len(reply["groups"])
        retried = [
            one | {"retried": one["retrying"] + one["at_consumers"]} for one in reply["groups"]
        ]
        found += [one for one in retried if one["letters"] or one["retried"]]
        after = reply["next"] or ""
        if not after:
            break
    found.sort(key=lambda one: (-one["letters"], -one["retried"], one["group"]))
    return View(
        "letter_groups.html",
        {
            "rows": found[:MAX_GROUPS],
            "count": len(found),
            "looked": looked,
            "wrong": wrong,
            "more": bool(after),
            "retries": format_filter({"states": RETRIED}),
        },
    )


async def letters(request: PageRequest) -> View:
    """Show the letters of a group that a filter selects, by fingerprint and in a
    list.
    """
    [group] = request.names
    written = request.text("filter")
    wrong: InvalidFilter | None = None
    wanted = LetterFilter(None, {})
    try:
        wanted = _of_group(parse_filter(written, request.now), group, written)
    except InvalidFilter as error:
        wrong = error
    select = wanted.select
    reply: dict[str, Any] = {"letters": [], "next": None, "scanned": 0}
    counted: dict[str, Any] | None = None
    if wrong is None:
        reply = await _page(request, group, select)
        if not request.text("cursor") and (select.keys() <= COUNTED or request.text("count")):
            counted = await request.ask("dlq.stats", group=group, select=select, keys=False)
    saved: dict[str, Any] = {"selections": []}
    if request.may("dlq.saved").allowed:
        saved = await request.ask("dlq.saved", limit=MAX_SAVED)
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
            "plan": _plan_name(group, request.now),
            "is_retried": {*select.get("states", ("open",))} <= {*RETRIED},
            "retries": format_filter({"states": RETRIED}),
        },
    )


def _of_group(wanted: LetterFilter, group: str, written: str) -> LetterFilter:
    """Return a filter for the letters of a group. Raises InvalidFilter."""
    if wanted.group not in (None, group):
        message = f"this page is of group {group}"
        at = max(0, written.find("group"))
        raise InvalidFilter(message, written, at, hint="choose the group at Letters")
    return wanted


async def _page(request: PageRequest, group: str, select: dict[str, Any]) -> dict[str, Any]:
    """Return a page of letters, without bodies: several calls, where few fit."""
    found: list[dict[str, Any]] = []
    cursor: str | None = request.text("cursor") or None
    scanned, began = 0, request.now
    for _ in range(MAX_SCANS):
        args = {"group": group, "select": select, "limit": request.limit - len(found)}
        reply = await request.ask("dlq.list", **args, **({"cursor": cursor} if cursor else {}))
        found += reply["letters"]
        scanned += reply["scanned"]
        cursor = reply["next"]
        if cursor is None or len(found) >= request.limit or request.now - began > SCAN:
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


async def letter(request: PageRequest) -> View:
    """Show one letter: its message, its errors, and all that became of it."""
    place = _place(request)
    at = f"{place['topic']}/{place['partition']}/{place['offset']}"
    try:
        shown, may_read = await _letter(request, place)
    except Refused as refused:
        if refused.kind is not UnknownLetter:
            raise
        return await _no_letter(request, place, at)
    decoded = await _decoded(request, shown)
    events = await life_of(request, shown)
    is_retried = shown["state"] in RETRIED
    may_life = request.may(
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
            "is_retried": is_retried,
            "may_retry": is_retried and not (shown["reserved_by"] or shown["plan"]),
            "members": await _members(request, shown["group"]),
        },
    )


async def _no_letter(request: PageRequest, place: dict[str, Any], at: str) -> View:
    """Show what became of a message that is no dead letter, or no longer."""
    message = await find_letter(request, place)
    events = await life_of(request, message)
    return View(
        "no_letter.html", {"group": place["group"], "one": message, "at": at, "events": events}
    )


async def find_letter(request: PageRequest, place: dict[str, Any]) -> dict[str, Any]:
    """Return a letter without its body, or the message that is one no longer. Raises
    Refused.
    """
    try:
        letter: dict[str, Any] = await request.ask("dlq.show", **place, bodies=False)
    except Refused as refused:
        if refused.kind is not UnknownLetter:
            raise
        wanted = {name: value for name, value in place.items() if name != "group"}
        found = (await request.ask("message.find", **wanted, limit=1))["messages"]
        if not found or found[0]["offset"] != place["offset"]:
            raise
        letter = found[0]
    return letter


async def edit(request: PageRequest) -> View:
    """Edit the body and the headers of a letter. The diff is shown before it acts."""
    place = _place(request)
    shown, may_read = await _letter(request, place)
    decoded = await _decoded(request, shown)
    body = None
    if decoded is not None and decoded.kind in EDITABLE and not decoded.cut:
        text = b64decode(shown["body"]).decode(errors="replace")
        body = None if "\r" in text else text
    at = f"{place['topic']}/{place['partition']}/{place['offset']}"
    return View(
        "letter_edit.html",
        {"one": shown, "at": at, "body": body, "decoded": decoded, "may_read": may_read},
    )


def _place(request: PageRequest) -> dict[str, Any]:
    group, topic, *numbers = request.names
    if not all(map(is_whole_number, numbers)):
        raise Refused("BadRequest", "a letter's place is TOPIC/PARTITION/OFFSET", "", 400)
    partition, offset = map(int, numbers)
    return {"group": group, "topic": topic, "partition": partition, "offset": offset}


async def _letter(request: PageRequest, place: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a letter, with its body where the viewer may read it. A damaged letter has
    none: the call is refused when it asks for one.
    """
    may_read = request.may("dlq.show", **place, bodies=True)
    if may_read.allowed:
        try:
            return await request.ask("dlq.show", **place, bodies=True), may_read
        except Refused as refused:
            if refused.kind is not MessagesDamaged:
                raise
        return await request.ask("dlq.show", **place, bodies=False), may_read
    return await request.ask("dlq.show", **place), may_read


async def _decoded(request: PageRequest, shown: dict[str, Any]) -> Decoded | None:
    """Return the body of a letter; None = it is hidden, or damaged."""
    schema = ""
    has_body = shown.get("body") is not None
    if has_body and request.may("topic.show", name=shown["topic"]).allowed:
        with suppress(Refused):  # the topic was deleted
            schema = (await request.ask("topic.show", name=shown["topic"])).get("schema") or ""
    return decode_message(shown, schema)


async def _members(request: PageRequest, group: str) -> list[str]:
    """Return members that could try a letter."""
    if not request.may("group.show", group=group).allowed:
        return []
    shown = await request.ask("group.show", group=group)
    return [one["member"] for one in shown["member_list"][:MAX_MEMBERS]]


def path_of(group: str, at: Iterable[object]) -> str:
    """Return the path of a letter's page."""
    return "/".join(("letters", *(quote(str(one), safe="") for one in (group, *at))))


PAGES = (
    Page("letters", "Dead letters", groups, "Dead letters", "l", live=False, needs="group.list"),
    Page("letters/*", "Dead letters", letters, live=False),
    Page("letters/*/*/*/*", "Dead letter", letter, live=False),
    Page("letters/*/*/*/*/edit", "Edit a dead letter", edit, live=False),
)
