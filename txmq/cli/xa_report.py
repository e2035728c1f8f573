"""Findings of a recovery pass over XA branches, as rows for JSON and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from txmq.model.measures import counted

if TYPE_CHECKING:
    from txmq.recover.findings import Finding, PassReport
    from txmq.tx.postgres.prepared_list import Blocked

MAX_RELATIONS: Final = 3  # that a row or an alarm names
MAX_PIDS: Final = 5


def json_rows(report: PassReport) -> list[dict[str, Any]]:
    """Return all fields of the findings."""
    return [_json_row(one) for one in report.findings]


def table_rows(report: PassReport) -> list[dict[str, Any]]:
    """Return the fields that fit into the row of a table."""
    return [
        {
            "where": one.place,
            "what": one.name,
            "age": f"{one.age_s:.0f} s",
            "locks": _shorten([lock.on for lock in one.locks.locks], MAX_RELATIONS),
            "blocks": _shorten([f"pid {blocked.pid}" for blocked in one.locks.blocked], MAX_PIDS),
            "vacuum": f"{one.prepared.horizon} xids" if one.prepared is not None else None,
            "decision": None if one.outcome is None else one.outcome.value,
            "action": f"done: {one.action}" if one.done else one.action.value,
            "reason": one.reason,
        }
        for one in report.findings
    ]


def age_alarms(report: PassReport, alarm_s: float | None) -> list[dict[str, Any]]:
    """Return an alarm for each branch that is too old. Foreign branches count, because
    their locks block others as well.
    """
    old = [
        one
        for one in report.findings
        if alarm_s is not None and one.age_s > alarm_s and not one.done
    ]
    return [{"alarm": _alarm_text(one)} for one in old]


def _alarm_text(one: Finding) -> str:
    text = f"{one.name} has been prepared in {one.place} for {one.age_s:.0f} s"
    if one.prepared is not None:
        text += f", keeps VACUUM from the last {counted(one.prepared.horizon, 'transaction')}"
    if one.locks.locks:
        locks = [f"{lock.on} {lock.mode}" for lock in one.locks.locks]
        text += f", locks {_shorten(locks, MAX_RELATIONS)}"
    if one.locks.blocked:
        blocked = [_blocked_text(waiter) for waiter in one.locks.blocked]
        text += f", blocks {_shorten(blocked, MAX_PIDS)}"
    return text


def _blocked_text(blocked: Blocked) -> str:
    return f"pid {blocked.pid} on {blocked.on} for {blocked.waits_s:.0f} s"


def _shorten(texts: list[str], most: int) -> str:
    distinct = list(dict.fromkeys(texts))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + more


def _json_row(one: Finding) -> dict[str, Any]:
    prepared, hold = one.prepared, one.locks
    is_branch = prepared is not None or "_" in one.name  # a gid of txmq has one, a token has none
    return {
        "where": one.place,
        "gid": one.name if is_branch else None,
        "token": (None if one.token is None else one.token.hex) if is_branch else one.name,
        "age_s": round(one.age_s, 3),
        "owner": None if prepared is None else prepared.owner,
        "database": None if prepared is None else prepared.database,
        "horizon": None if prepared is None else prepared.horizon,
        "locks": [lock._asdict() for lock in hold.locks],
        "rows": list(hold.rows),
        "blocked": [blocked._asdict() for blocked in hold.blocked],
        "decision": None if one.outcome is None else one.outcome.value,
        "action": one.action.value,
        "reason": one.reason,
        "done": one.done,
        "needs_hand": one.needs_operator,
    }
