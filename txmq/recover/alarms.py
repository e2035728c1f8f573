"""What operators have to know of: told when it comes up, and again every so often while
it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from txmq.client.blocking.alarm_reports import Alarm
from txmq.client.log import get_logger
from txmq.recover.findings import Finding, Report

LOCKS_TOLD: Final = 8
log = get_logger()


class Alarms:
    """Lines of the log about what a pass has left: at once what needs an operator, the
    rest after `alarm_s`.
    """

    def __init__(self, alarm_s: float, clock: Callable[[], float]) -> None:
        self._alarm_s, self._clock = alarm_s, clock
        self._told: dict[object, float] = {}

    def tell(self, report: Report) -> None:
        """After each pass."""
        now = self._clock()
        left = [one for one in report.findings if not one.done and self.is_due(one)]
        for where, why in report.troubles:
            self._tell(("trouble", where), now, log.warning, "xa.unreachable", where=where, why=why)
        for one in left:
            event = "xa.needs_operator" if one.needs_hand else "xa.orphan"
            self._tell((event, *one.key), now, log.error, event, **fields(one))
        lasting = {("trouble", where) for where, _ in report.troubles}
        self._forget(
            lasting
            | {(event, *one.key) for one in left for event in ("xa.needs_operator", "xa.orphan")}
        )

    def of(self, report: Report) -> list[Alarm]:
        """What brokers are told of a pass: one alarm of a kind, about the oldest that
        it found.
        """
        left = sorted(
            (one for one in report.findings if not one.done and self.is_due(one)),
            key=lambda one: -one.age_s,
        )
        by_hand = [one for one in left if one.needs_hand]
        orphans = [one for one in left if not one.needs_hand]
        told = [_alarm("xa.needs_operator", by_hand)] if by_hand else []
        told += [_alarm("xa.orphan", orphans)] if orphans else []
        if report.troubles:
            text = "; ".join(f"{where}: {why}" for where, why in report.troubles)
            told.append(
                Alarm(
                    "xa.unreachable",
                    "warning",
                    text,
                    "recovery of XA goes on as soon as they answer",
                )
            )
        return told

    def is_due(self, finding: Finding) -> bool:
        """Whether it has to be told of."""
        return finding.needs_hand or (finding.token is not None and finding.age_s >= self._alarm_s)

    def _tell(
        self, key: object, now: float, how: Callable[..., object], event: str, **values: object
    ) -> None:
        if now - self._told.get(key, -self._alarm_s) >= self._alarm_s:
            self._told[key] = now
            how(event, **values)

    def _forget(self, lasting: Iterable[object]) -> None:
        kept = set(lasting)
        self._told = {key: at for key, at in self._told.items() if key in kept}


def _alarm(name: str, left: list[Finding]) -> Alarm:
    """Of several, the first is told of."""
    first = left[0]
    locks = ", ".join(f"{lock.on} {lock.mode}" for lock in first.hold.locks[:LOCKS_TOLD])
    blocked = (
        f", and keeps {len(first.hold.blocked)} sessions waiting" if first.hold.blocked else ""
    )
    held = f"; it locks {locks}{blocked}" if locks else ""
    oldest = f"{first.what} in {first.where}, for {first.age_s:.0f} s: {first.reason}{held}"
    action = "txmq xa doctor shows all of them, and what is to be done about each"
    return Alarm(name, "critical", f"{len(left)} stand; the oldest, {oldest}", action)


def fields(one: Finding) -> dict[str, object]:
    """What an alarm tells of a finding."""
    told: dict[str, object] = {"where": one.where, "what": one.what, "age_s": round(one.age_s, 1)}
    told |= {"action": one.action.value, "reason": one.reason}
    if one.prepared is not None:
        told |= {
            "owner": one.prepared.owner,
            "horizon": one.prepared.horizon,
            "locks": [f"{lock.on} {lock.mode}" for lock in one.hold.locks[:LOCKS_TOLD]],
            "blocked": [blocked.pid for blocked in one.hold.blocked],
        }
    return told
