"""What recovery found, as rows: short ones for people, all of it for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from txmq.recover.findings import Finding, Report

RELATIONS_TOLD: Final = 3
PIDS_TOLD: Final = 5


def details(report: Report) -> list[dict[str, Any]]:
    """Everything that is known of each finding."""
    return [_detail(one) for one in report.findings]


def lines(report: Report) -> list[dict[str, Any]]:
    """As much as a table's row holds."""
    return [
        {
            "where": one.where,
            "what": one.what,
            "age": f"{one.age_s:.0f} s",
            "locks": _few([lock.on for lock in one.hold.locks], RELATIONS_TOLD),
            "blocks": _few([f"pid {blocked.pid}" for blocked in one.hold.blocked], PIDS_TOLD),
            "vacuum": f"{one.prepared.horizon} xids" if one.prepared is not None else None,
            "decision": None if one.word is None else one.word.value,
            "action": f"done: {one.action}" if one.done else one.action.value,
            "reason": one.reason,
        }
        for one in report.findings
    ]


def alarms(report: Report, alarm_s: float | None) -> list[dict[str, Any]]:
    """One line for each branch that has stood for too long, foreign ones too: they hold
    up as much.
    """
    old = [
        one
        for one in report.findings
        if alarm_s is not None and one.age_s > alarm_s and not one.done
    ]
    return [{"alarm": _alarm(one)} for one in old]


def _alarm(one: Finding) -> str:
    text = f"{one.what} has stood in {one.where} for {one.age_s:.0f} s"
    if one.prepared is not None:
        text += f", VACUUM may remove nothing of the last {one.prepared.horizon} transactions"
    if one.hold.locks:
        text += (
            f", locks {_few([f'{lock.on} {lock.mode}' for lock in one.hold.locks], RELATIONS_TOLD)}"
        )
    if one.hold.blocked:
        text += f", blocks {_few([_waiting(blocked) for blocked in one.hold.blocked], PIDS_TOLD)}"
    return text


def _waiting(blocked: Any) -> str:
    return f"pid {blocked.pid} on {blocked.on} for {blocked.waits_s:.0f} s"


def _few(texts: list[str], most: int) -> str:
    known = list(dict.fromkeys(texts))
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def _detail(one: Finding) -> dict[str, Any]:
    prepared, hold = one.prepared, one.hold
    is_branch = prepared is not None or "_" in one.what  # no token has one, and every gid of ours
    return {
        "where": one.where,
        "gid": one.what if is_branch else None,
        "token": (None if one.token is None else one.token.hex) if is_branch else one.what,
        "age_s": round(one.age_s, 3),
        "owner": None if prepared is None else prepared.owner,
        "database": None if prepared is None else prepared.database,
        "horizon": None if prepared is None else prepared.horizon,
        "locks": [lock._asdict() for lock in hold.locks],
        "rows": list(hold.rows),
        "blocked": [blocked._asdict() for blocked in hold.blocked],
        "decision": None if one.word is None else one.word.value,
        "action": one.action.value,
        "reason": one.reason,
        "done": one.done,
        "needs_hand": one.needs_hand,
    }
