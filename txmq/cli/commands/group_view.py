"""A group as people read it on a terminal: narrow tables of what is not as usual.
`--json` has everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SECOND = 1_000_000
LISTS = ("settings", "member_list", "positions", "fence_list")
ALWAYS = ("partition", "floor", "end", "lag", "owners")
NOW_AND_THEN = (
    "lag_ms",
    "leased",
    "redeliver",
    "reserved",
    "retrying",
    "passed",
)  # columns, where any is not 0


def readable(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to `group.show`, with why partitions are not moving below the table of
    where they are.
    """
    single = {name: value for name, value in reply.items() if name not in LISTS}
    if "paused_topics" in single:
        single["paused_topics"] = " ".join(single["paused_topics"])
    positions = reply.get("positions", ())
    tables = {
        "settings": _settings(reply.get("settings", {})),
        "member_list": [_last(row, "assignment") for row in reply.get("member_list", ())],
        "positions": _positions(positions),
        "not_moving": [
            {"partition": _place(row), "reason": row["reason"], "why": row["why"]}
            for row in positions
            if row["reason"]
        ],
        "fence_list": [
            {"partition": _place(row)} | _without(row, "topic", "partition")
            for row in reply.get("fence_list", ())
        ],
    }
    return single | {name: rows for name, rows in tables.items() if rows}


def _positions(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = [
        *ALWAYS[:-1],
        *(name for name in NOW_AND_THEN if any(row[name] for row in rows)),
        ALWAYS[-1],
    ]
    placed = [{**row, "partition": _place(row)} for row in rows]
    return [{name: row[name] for name in names} for row in placed]


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['topic']}/{row['partition']}"


def _settings(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One a line; times in seconds."""
    told = {}
    for name, value in settings.items():
        if name == "retry":
            told["retry_delays_s"] = [delay / SECOND for delay in value["delays"]]
            told |= {f"retry_{field}": item for field, item in value.items() if field != "delays"}
        elif name.endswith("_us"):
            told[f"{name.removesuffix('_us')}_s"] = value / SECOND
        else:
            told[name] = value
    return [{"setting": name, "value": value} for name, value in told.items()]


def _last(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _without(row, name) | ({name: row[name]} if name in row else {})


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}
