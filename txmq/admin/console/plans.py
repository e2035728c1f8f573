"""Pages of replay plans and replay policies."""

from __future__ import annotations

from typing import Any

from txmq.admin.console.letters import path_of
from txmq.admin.console.listing import by_name
from txmq.admin.console.page import Page, Reader, View
from txmq.core.state.plans import PlanSettings
from txmq.model.letter_filter import InvalidFilter, format_filter, parse_filter

OUTCOMES = ("planned", "delivered", "processed", "died_again", "skipped", "ended")
MAX_CHECKS = 20  # calls of one dry run; each judges up to 2,000 letters
NUMBERS = ("checked", "edited", "fenced", "out_of_order", "would_replay", "invalid")
KINDS = ("would_skip", "schema_mistakes")
ACTIONS = {
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


async def plans(reader: Reader) -> View:
    """List the plans."""
    return View("plans.html", {"found": await by_name(reader, "plan.list", "plans", "name")})


async def plan(reader: Reader) -> View:
    """Show a plan: progress, outcomes, settings, and what can be done with it."""
    [name] = reader.names
    shown = await reader.ask("plan.show", name=name)
    outcome = reader.text("outcome")
    cursor = reader.text("cursor")
    args: dict[str, Any] = {"outcome": outcome} if outcome in OUTCOMES else {}
    page = await reader.ask(
        "plan.letters",
        name=name,
        limit=reader.limit,
        **args,
        **({"cursor": cursor} if cursor else {}),
    )
    state = shown["state"]
    acts = ACTIONS.get(state, ())
    return View(
        "plan.html",
        {
            "one": shown,
            "outcomes": OUTCOMES,
            "outcome": outcome,
            "rows": [row | {"path": _path(shown["group"], row)} for row in page["letters"]],
            "following": page["next"],
            "acts": [act for act in acts if act != "approve" or not shown["approved_by"]],
            "labels": LABELS,
        },
    )


def _path(group: str, row: dict[str, Any]) -> str:
    return path_of(group, (row["topic"], row["partition"], row["offset"]))


async def check(reader: Reader) -> View:
    """Judge a plan's letters as of now: a dry run."""
    [name] = reader.names
    shown = await reader.ask("plan.show", name=name)
    total: dict[str, Any] = dict.fromkeys(NUMBERS, 0) | {kind: {} for kind in KINDS}
    cursor: str | None = None
    for _ in range(MAX_CHECKS):
        args = {"cursor": cursor} if cursor else {}
        reply = await reader.ask("plan.check", name=name, **args)
        for number in NUMBERS:
            total[number] += reply[number]
        for kind in KINDS:
            for why, count in reply[kind].items():
                total[kind][why] = total[kind].get(why, 0) + count
        cursor = reply["next"]
        if cursor is None:
            break
    return View("plan_check.html", {"one": shown, "total": total, "more": cursor is not None})


async def new(reader: Reader) -> View:
    """Make a plan: its letters, and how it puts them back."""
    written, group = reader.text("filter"), reader.text("group")
    counted, wrong = None, None
    try:
        wanted = parse_filter(written, reader.now)
        group = group or wanted.group or ""
        if group:
            counted = await reader.ask("dlq.stats", group=group, select=wanted.select, keys=False)
    except InvalidFilter as error:
        wrong = error
    return View(
        "plan_new.html",
        {
            "group": group,
            "written": written,
            "counted": counted,
            "wrong": wrong,
            "name": reader.text("name"),
            "defaults": PlanSettings(),
        },
    )


async def policies(reader: Reader) -> View:
    """List the policies, by which plans begin by themselves."""
    found = await by_name(reader, "policy.list", "policies", "group")
    rows = [row | {"filter": format_filter(row["select"])} for row in found.rows]
    return View(
        "policies.html",
        {
            "found": found._replace(rows=rows),
            "group": reader.text("group"),
            "written": reader.text("filter"),
            "defaults": PlanSettings(),
        },
    )


PAGES = (
    Page("plans", "Replay plans", plans, "Plans", "p"),
    Page("plan/new", "New plan", new, live=False),
    Page("plans/*", "Replay plan", plan),
    Page("plans/*/check", "Dry run", check, live=False),
    Page("policies", "Replay policies", policies, live=False),
)
