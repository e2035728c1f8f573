"""Alarms of recovery, which are repeated while their cause lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from txmq.client.log import get_logger
from txmq.client.protocol.alarm_reports import AlarmReport
from txmq.recover.findings import Finding, PassReport
from txmq.tx.orphans import BranchAction

MAX_LOCKS: Final = 8
NAMES: Final = ("xa.lost_branch", "xa.needs_operator", "xa.orphan")
log = get_logger()


class RecoveryAlarms:
    """Alarms about findings that a pass has left.

    Those that need an operator are due at once, others after `alarm_s`.
    """

    def __init__(self, alarm_s: float, clock: Callable[[], float]) -> None:
        self._alarm_s, self._clock = alarm_s, clock
        self._logged_at: dict[object, float] = {}

    def log_alarms(self, report: PassReport) -> None:
        """Log the alarms that are due after a pass."""
        now = self._clock()
        left = [one for one in report.findings if not one.done and self.is_due(one)]
        for where, why in report.troubles:
            self._log(("trouble", where), now, log.warning, "xa.unreachable", where=where, why=why)
        for one in left:
            event = _name(one)
            self._log((event, *one.key), now, log.error, event, **log_fields(one))
        lasting = {("trouble", where) for where, _ in report.troubles}
        self._drop_all_but(lasting | {(event, *one.key) for one in left for event in NAMES})

    def for_brokers(self, report: PassReport) -> list[AlarmReport]:
        """Return one alarm of each kind, about the oldest finding, for the brokers."""
        left = sorted(
            (one for one in report.findings if not one.done and self.is_due(one)),
            key=lambda one: -one.age_s,
        )
        by_name = {name: [one for one in left if _name(one) == name] for name in NAMES}
        alarms = [_alarm(name, found) for name, found in by_name.items() if found]
        if report.troubles:
            text = "; ".join(f"{where}: {why}" for where, why in report.troubles)
            alarms.append(
                AlarmReport(
                    "xa.unreachable",
                    "warning",
                    text,
                    "recovery of XA goes on as soon as they answer",
                )
            )
        return alarms

    def is_due(self, finding: Finding) -> bool:
        """Return whether an alarm about a finding is due."""
        return finding.needs_operator or (
            finding.token is not None and finding.age_s >= self._alarm_s
        )

    def _log(
        self, key: object, now: float, write: Callable[..., object], event: str, **values: object
    ) -> None:
        if now - self._logged_at.get(key, -self._alarm_s) >= self._alarm_s:
            self._logged_at[key] = now
            write(event, **values)

    def _drop_all_but(self, lasting: Iterable[object]) -> None:
        keys = set(lasting)
        self._logged_at = {key: at for key, at in self._logged_at.items() if key in keys}


def _name(finding: Finding) -> str:
    """Return the name of the alarm about a finding."""
    if finding.action is BranchAction.LOST:
        return "xa.lost_branch"
    return "xa.needs_operator" if finding.needs_operator else "xa.orphan"


def _alarm(name: str, left: list[Finding]) -> AlarmReport:
    first = left[0]
    locks = ", ".join(f"{lock.on} {lock.mode}" for lock in first.locks.locks[:MAX_LOCKS])
    blocked = (
        f", and keeps {len(first.locks.blocked)} sessions waiting" if first.locks.blocked else ""
    )
    held = f"; it locks {locks}{blocked}" if locks else ""
    oldest = f"{first.name} in {first.place}, for {first.age_s:.0f} s: {first.reason}{held}"
    action = "txmq xa doctor shows all of them, and what is to be done about each"
    return AlarmReport(name, "critical", f"{len(left)} stand; the oldest, {oldest}", action)


def log_fields(one: Finding) -> dict[str, object]:
    """Return the fields of a log line about a finding."""
    values: dict[str, object] = {"where": one.place, "what": one.name, "age_s": round(one.age_s, 1)}
    values |= {"action": one.action.value, "reason": one.reason}
    if one.prepared is not None:
        values |= {
            "owner": one.prepared.owner,
            "horizon": one.prepared.horizon,
            "locks": [f"{lock.on} {lock.mode}" for lock in one.locks.locks[:MAX_LOCKS]],
            "blocked": [blocked.pid for blocked in one.locks.blocked],
        }
    return values
