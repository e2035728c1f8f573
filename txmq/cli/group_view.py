"""Consumer groups for people: tables of what is unusual in a reply of `group.show`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from txmq.model.units import SECOND

# Tables have names of their own, and programs alone need a number of the next letter.
LEFT_OUT = ("settings", "member_list", "positions", "store_list", "fence_list", "next_letter")
STORE_COLUMNS = ("store", "state", "member", "messages")
WINDOW_COLUMNS = ("window", "unprocessed_share", "processed_share", "head")
POSITION_COLUMNS = ("partition", "unprocessed", "position", "end", "owners")
# columns that are shown where any row has a value above 0
OPTIONAL_COLUMNS = (
    "age_ms",
    "unsettled",
    "leased",
    "redeliver",
    "reserved",
    "retrying",
    "at_consumers",
    "passed",
)


def readable_group(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply of `group.show` for terminals: narrow tables of what is unusual.

    Partitions that do not move have a table of their own, with the reason. `--json`
    prints the whole reply.
    """
    single = {name: value for name, value in reply.items() if name not in LEFT_OUT}
    if "paused_topics" in single:
        single["paused_topics"] = " ".join(single["paused_topics"])
    positions = reply.get("positions", ())
    tables = {
        "settings": _settings_rows(reply.get("settings", {})),
        "members": [_member_fields(row) for row in reply.get("member_list", ())],
        "partitions": _position_rows(positions),
        "not_moving": [
            {"partition": _partition_text(row), "reason": row["reason"], "why": row["why"]}
            for row in positions
            if row["reason"]
        ],
        "windows": [
            {"partition": _partition_text(row)} | {name: row[name] for name in WINDOW_COLUMNS}
            for row in positions
            if row.get("window")
        ],
        "stores": [
            {name: row[name] for name in STORE_COLUMNS} for row in reply.get("store_list", ())
        ],
        "fences": [
            {"partition": _partition_text(row)} | _fence_fields(row)
            for row in reply.get("fence_list", ())
        ],
    }
    return single | {name: rows for name, rows in tables.items() if rows}


def _fence_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fence with its key, or with the hash where the key is not known."""
    key = row.get("key")
    named = {"key_hash": row["key_hash"]} if key is None else {"key": key}
    return named | _without(row, "topic", "partition", "key", "key_hash")


def _position_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = [
        *POSITION_COLUMNS[:-1],
        *(name for name in OPTIONAL_COLUMNS if any(row.get(name) for row in rows)),
        POSITION_COLUMNS[-1],
    ]
    named = [{**row, "partition": _partition_text(row), "position": row["floor"]} for row in rows]
    return [{name: row.get(name) for name in names} for row in named]


def _partition_text(row: Mapping[str, Any]) -> str:
    return f"{row['topic']}/{row['partition']}"


def _settings_rows(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings, one per row, with times in seconds."""
    table: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "retry":
            table["retry_delays_s"] = [delay / SECOND for delay in value["delays_us"]]
            table |= {
                field if field == "retries" else f"retry_{field}": item
                for field, item in value.items()
                if field != "delays_us"
            }
        elif name.endswith("_us"):
            table[f"{name.removesuffix('_us')}_s"] = value / SECOND
        else:
            table[name] = value
    return [{"setting": name, "value": value} for name, value in table.items()]


def _member_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a member, what is long last. `since` is a generation."""
    return _without(row, "since", "assignment") | {"assignment": row["assignment"]}


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}
