"""Pages of replay plans and replay policies."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from txmq.admin.console.letters import find_letter, path_of
from txmq.admin.console.listing import by_name
from txmq.admin.console.page import Page, PageRequest, Refused, View
from txmq.client.protocol.plans import OUTCOMES
from txmq.core.state.plans import PlanSettings
from txmq.model.letter_filter import InvalidFilter, format_filter, parse_filter

MAX_CHECKS = 20  # calls of one dry run; each judges up to 2,000 letters
NUMBERS = ("checked", "edited", "fenced", "out_of_order", "would_replay", "invalid")
KINDS = ("would_skip", "schema_mistakes")
VERBS = {  # of a plan, by its state
    "building": ("freeze", "cancel"),
    "planned": ("approve", "start", "abandon", "cancel"),
    "canary": ("pause", "resume", "cancel"),
    "ramping": ("pause", "cancel"),
    "paused": ("resume", "cancel"),
    "abandoning": ("cancel",),
    "done": ("delete",),
    "cancelled": ("delete",),
}
LABELS = {
    "approve": "Approve", "start": "Start", "pause": "Pause", "resume": "Resume",
    "cancel": "Cancel", "delete": "Delete", "freeze": "Complete",
    "abandon": "Abandon",
}  # fmt: skip


async def plans(request: PageRequest) -> View:
    """List the plans."""
    return View("plans.html", {"found": await by_name(request, "plan.list", "plans", "name")})


async def plan(request: PageRequest) -> View:
    """Show a plan: progress, outcomes, settings, and what can be done with it."""
    [name] = request.names
    shown = await request.ask("plan.show", name=name)
    outcome = request.text("outcome")
    cursor = request.text("cursor")
    args: dict[str, Any] = {"outcome": outcome} if outcome in OUTCOMES else {}
    page = await request.ask(
        "plan.letters",
        name=name,
        limit=request.limit,
        **args,
        **({"cursor": cursor} if cursor else {}),
    )
    state = shown["state"]
    waits = shown["settings"]["second_approver"] and not shown["approved_by"]
    hidden = "start" if waits else "approve"
    acts = [one for one in VERBS.get(state, ()) if one != hidden]
    return View(
        "plan.html",
        {
            "one": shown,
            "outcomes": OUTCOMES,
            "outcome": outcome,
            "rows": [await _with_letter(request, shown["group"], row) for row in page["letters"]],
            "following": page["next"],
            "acts": acts,
            "labels": LABELS,
            "explained": [(f"plan.{act}", LABELS[act]) for act in acts],
        },
    )


async def _with_letter(request: PageRequest, group: str, row: dict[str, Any]) -> dict[str, Any]:
    """Add the path of a letter, its key, and its error as far as it is one still."""
    at = {name: row[name] for name in ("topic", "partition", "offset")}
    found: dict[str, Any] = {"path": path_of(group, at.values()), "key": None}
    found |= {"error_type": "", "error_text": ""}
    with suppress(Refused):  # its topic was deleted, or the viewer may not see it
        letter = await find_letter(request, {"group": group, **at})
        found |= {name: letter[name] for name in found if name in letter}
    return row | found


async def check(request: PageRequest) -> View:
    """Judge a plan's letters as of now: a dry run."""
    [name] = request.names
    shown = await request.ask("plan.show", name=name)
    total: dict[str, Any] = dict.fromkeys(NUMBERS, 0) | {kind: {} for kind in KINDS}
    cursor: str | None = None
    for _ in range(MAX_CHECKS):
        args = {"cursor": cursor} if cursor else {}
        reply = await request.ask("plan.check", name=name, **args)
        for number in NUMBERS:
            total[number] += reply[number]
        for kind in KINDS:
            for why, count in reply[kind].items():
                total[kind][why] = total[kind].get(why, 0) + count
        cursor = reply["next"]
        if cursor is None:
            break
    return View("plan_check.html", {"one": shown, "total": total, "more": cursor is not None})


async def new(request: PageRequest) -> View:
    """Make a plan: its letters, and how it puts them back."""
    written, group = request.text("filter"), request.text("group")
    counted, wrong = None, None
    try:
        wanted = parse_filter(written, request.now)
        group = group or wanted.group or ""
        if group:
            counted = await request.ask("dlq.stats", group=group, select=wanted.select, keys=False)
    except InvalidFilter as error:
        wrong = error
    return View(
        "plan_new.html",
        {
            "group": group,
            "written": written,
            "counted": counted,
            "wrong": wrong,
            "name": request.text("name"),
            "defaults": PlanSettings()._asdict(),
        },
    )


async def policies(request: PageRequest) -> View:
    """List the policies, by which plans begin by themselves."""
    found = await by_name(request, "policy.list", "policies", "group")
    rows = [row | {"filter": format_filter(row["select"])} for row in found.rows]
    return View(
        "policies.html",
        {
            "found": found._replace(rows=rows),
            "group": request.text("group"),
            "written": request.text("filter"),
            "defaults": PlanSettings()._asdict(),
        },
    )


PAGES = (
    Page("plans", "Replay plans", plans, "Replay plans", "p", needs="plan.list"),
    Page("plan/new", "New plan", new, live=False),
    Page("plans/*", "Replay plan", plan),
    Page("plans/*/check", "Dry run", check, live=False),
    Page("policies", "Replay policies", policies, live=False),
)
