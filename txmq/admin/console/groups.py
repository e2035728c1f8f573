"""Pages of consumer groups: the list, one group, and the reset of a position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.admin.console.charts import charts
from txmq.admin.console.listing import by_name
from txmq.admin.console.page import Page, PageRequest, Refused, View
from txmq.admin.console.words import in_words, length
from txmq.model.letter_filter import RETRIED, format_filter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from txmq.core.consumers.resets import ResetPartition

POSITIONS = 100  # of one group, on one page
CHARTS = {"unprocessed": "Unprocessed", "letters": "Dead letters"}


async def groups(request: PageRequest) -> View:
    """List the groups."""
    return View("groups.html", {"found": await by_name(request, "group.list", "groups", "group")})


async def group(request: PageRequest) -> View:
    """Show a group: members, positions with reasons, fenced keys, settings."""
    [name] = request.names
    shown = await request.ask("group.show", group=name)
    first = min(request.number("from", 0) or 0, len(shown["positions"]))
    rows = _stuck_first(shown["positions"])[first : first + POSITIONS]
    series = [(f"group:{name}:{what}", title, "count") for what, title in CHARTS.items()]
    shows_charts = request.may("broker.series", names=[], span="hour").allowed
    settings = dict(shown["settings"])
    retry, altered = settings.pop("retry"), settings.pop("altered")
    return View(
        "group.html",
        {
            "group": shown,
            "rows": rows,
            "charts": await charts(request, series, "hour") if shows_charts else [],
            "following": first + POSITIONS if first + POSITIONS < len(shown["positions"]) else None,
            "settings": settings | {"retry": retry},
            "altered": altered,
            "now": _fields_now(settings, retry),
            "retries": format_filter({"states": RETRIED}),
        },
    )


def _fields_now(settings: dict[str, Any], retry: dict[str, Any]) -> dict[str, str]:
    """Return the present values of the fields of a group's forms, as these take them:
    of the retry policy exactly, since it is changed whole.
    """
    times = {name.replace("_us", "_ms"): in_words(value, name) for name, value in settings.items()}
    return times | {
        "delays_us": ", ".join(length(delay) for delay in retry["delays_us"]),
        "retries": str(retry["retries"]),
        "jitter": str(retry["jitter"]),
        **{name: " ".join(retry[name]) for name in ("dead", "postpone")},
    }


def _stuck_first(positions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return positions, those first that have messages and do not move."""
    return sorted(
        positions,
        key=lambda one: (
            not (one["reason"] and one["unprocessed"]),
            one["topic"],
            one["partition"],
        ),
    )


async def reset(request: PageRequest) -> View:
    """Choose another position, and see what the reset would do before it is done."""
    [name] = request.names
    shown = await request.ask("group.show", group=name)
    args = _reset_args(request, name)
    preview = None
    if args is not None:
        preview = await request.ask("group.reset", **args, dry_run=True)
    wanted = args or {"group": name, "topic": "t", "to": "first"}
    return View(
        "reset.html",
        {
            "group": shown,
            "fields": None if args is None else _fields(args),
            "preview": preview,
            "moves": preview is not None and any(map(_moves, preview["positions"])),
            "may_reset": request.may("group.reset", **wanted),
        },
    )


def _moves(one: ResetPartition) -> bool:
    """Return whether a reset moves a partition's position, or any of its messages."""
    return one.before != one.after or bool(one.again or one.skipped or one.back)


def _reset_args(request: PageRequest, name: str) -> dict[str, Any] | None:
    """Return the arguments that the query asks for; None = nothing was chosen yet."""
    topic = request.text("topic")
    if not topic:
        return None
    to: object = request.text("to") or "first"
    if to == "time":
        to = request.time("at")
        if to is None:
            raise Refused("BadRequest", "no time is given", "give one, in UTC", 400)
    elif to == "offset":
        partition, offset = request.number("partition"), request.number("offset")
        if partition is None or offset is None:
            raise Refused("BadRequest", "partition or offset is missing", "give both", 400)
        to = {partition: offset}
    args = {"group": name, "topic": topic, "to": to}
    return args | ({"reprocess": True} if request.text("reprocess") else {})


def _fields(args: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the form that does what was previewed."""
    fields = {name: value for name, value in args.items() if name != "reprocess"}
    if args.get("reprocess"):
        fields["reprocess"] = "yes"
    if isinstance(args["to"], dict):
        [(fields["partition"], fields["offset"])] = fields.pop("to").items()
    return fields


PAGES = (
    Page("groups", "Consumer groups", groups, "Groups", "g", needs="group.list"),
    Page("groups/*", "Consumer group", group),
    Page("groups/*/reset", "Reset", reset, live=False),
)
