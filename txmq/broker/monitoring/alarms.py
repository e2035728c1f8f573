"""Alarms for operators: conditions that the broker checks every second, and reports of
other processes.

An alarm is raised while its condition holds; both ends are logged once. Nothing is kept
over a restart: a condition that still holds raises its alarm again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import structlog

from txmq.broker.monitoring.alarm_conditions import Conditions, Raised
from txmq.broker.monitoring.alarm_rules import ALARM_RULES, AlarmRule
from txmq.core.events.outcome import Rejected
from txmq.errors import Throttled
from txmq.model.units import HOUR, SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from txmq.broker.background.clock_service import ClockService
    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.broker.checkback.transaction_listeners import TransactionListeners
    from txmq.broker.data_directory.retention_service import RetentionService
    from txmq.broker.delivery.member_sessions import MemberSessions
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.held_sends import HeldSends
    from txmq.config.broker import AlarmSettings as Limits
    from txmq.wire.calls.alarms import AlarmsReport

LONGEST_US = HOUR  # for which a source may report
log = structlog.get_logger()
MAX_SOURCES = 100


class Alarm(NamedTuple):
    """An alarm that is raised, `since` microseconds of the epoch."""

    name: str
    severity: str  # "critical": something stands still or is wrong; "warning": it may become so
    since: int
    text: str
    action: str
    about: str = ""  # "group:NAME", "plan:NAME", "tx:TOKEN"


class _SourceKey(NamedTuple):
    user: str
    source: str


class _AlarmSource(NamedTuple):
    until: int
    alarms: tuple[Alarm, ...]


class ReportedAlarms:
    """Alarms of other processes, such as the XA recoverer and the relay, which see what
    the broker cannot.

    They are kept in memory. A source repeats its report, and is forgotten when it falls
    silent. `now` gives microseconds since the epoch.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._sources: dict[_SourceKey, _AlarmSource] = {}  # the latest report comes last

    def report(self, report: AlarmsReport, user: str = "") -> Rejected | None:
        """Replace the alarms of a source's last report. A repeated alarm keeps its
        time. Sources of other users are apart, and `user` is "" where there are none.
        """
        self._expire()
        key = _SourceKey(user, report.source)
        before = self._sources.pop(key, _AlarmSource(0, ()))
        if not report.alarms:
            return None
        if len(self._sources) >= MAX_SOURCES and not self._make_room(user):
            return Rejected(
                Throttled,
                f"{MAX_SOURCES} sources of alarms",
                "they are forgotten when they fall silent",
            )
        now, since = self._now(), {alarm.name: alarm.since for alarm in before.alarms}
        who = f"{report.source} of user {user}" if user else report.source
        alarms = tuple(
            Alarm(
                one.name, one.severity, since.get(one.name, now), f"{who}: {one.text}", one.action
            )
            for one in report.alarms
        )
        self._sources[key] = _AlarmSource(now + int(report.for_s * SECOND), alarms)
        return None

    def _make_room(self, user: str) -> bool:
        """Forget the oldest report of the user who has the most sources: none keeps the
        alarms of others out. False = it is the one who reports.
        """
        counts = Counter(key.user for key in self._sources)
        most = max(counts, key=lambda name: counts[name])
        if counts[user] >= counts[most]:
            return False
        del self._sources[next(key for key in self._sources if key.user == most)]
        return True

    def raised(self) -> Iterator[Alarm]:
        """Return the alarms of all sources."""
        self._expire()
        for source in self._sources.values():
            yield from source.alarms

    def _expire(self) -> None:
        now = self._now()
        self._sources = {
            name: source
            for name, source in self._sources.items()
            if now < source.until <= now + LONGEST_US  # unless the time was set back
        }


class AlarmService:
    """Checks all rules. All methods belong to the reactor's thread."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        resolvers: Resolvers,
        listeners: TransactionListeners,
        retention: RetentionService,
        clock: ClockService,
        sends: HeldSends,
        members: MemberSessions,
    ) -> None:
        self._clock, self._sends, self._members = clock, sends, members
        self._engine, self._limits, self._resolvers = engine, limits, resolvers
        self._listeners, self._retention = listeners, retention
        self._raised: dict[str, Alarm] = {}
        self.reported = ReportedAlarms(engine.now)

    def use(self, limits: Limits) -> None:
        """Go by other limits, from the next tick on."""
        self._limits = limits

    def tick(self) -> None:
        """Timer: raise and clear alarms."""
        seen = self._conditions()
        for rule in ALARM_RULES:
            try:
                found = rule.check(seen)
            except Exception as error:  # noqa: BLE001  # the other alarms must not depend on it
                self._engine.faults.record(f"alarm {rule.name}", error)
                continue
            self._judge(rule, found, seen.now)

    def raised(self) -> list[Alarm]:
        """Return the alarms that hold now: the critical ones first, and of these the
        oldest.
        """
        self.tick()
        return sorted(
            (*self._raised.values(), *self.reported.raised()),
            key=lambda alarm: (alarm.severity, alarm.since),
        )

    def _conditions(self) -> Conditions:
        engine, store = self._engine, self._engine.store
        return Conditions(
            engine.state,
            store.read_only,
            store.quarantined,
            engine.disk,
            (self._retention.missed, self._retention.missed_at),
            self._retention.held_bytes,
            engine.now(),
            self._resolvers.status(),
            self._listeners.unresolvable_at,
            self._limits,
            self._clock.status(),
            engine.faults,
            engine.oldest_reply_s(),
            self._sends.waiting_s,
            self._members.filters(),
        )

    def _judge(self, rule: AlarmRule, found: str | Raised, now: int) -> None:
        raised = self._raised.get(rule.name)
        text, about = found if isinstance(found, Raised) else (found, "")
        if text:
            since = now if raised is None else raised.since
            self._raised[rule.name] = Alarm(
                rule.name, rule.severity, since, text, rule.action, about
            )
            if raised is None:
                log.error(
                    "alarm.raised",
                    alarm=rule.name,
                    severity=rule.severity,
                    text=text,
                    action=rule.action,
                )
        elif raised is not None:
            del self._raised[rule.name]
            log.info("alarm.cleared", alarm=rule.name, after_s=max(0, now - raised.since) // SECOND)
