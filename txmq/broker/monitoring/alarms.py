"""Alarms for operators: conditions that the broker checks every second, and reports of
other processes.

An alarm is raised while its condition holds; both ends are logged once, and told to
receivers. Nothing is kept over a restart: a condition that still holds raises its alarm
again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import structlog

from txmq.broker.monitoring.alarm import Alarm
from txmq.broker.monitoring.alarm_conditions import Conditions, Raised
from txmq.broker.monitoring.alarm_delivery import AlarmDelivery
from txmq.broker.monitoring.alarm_rules import ALARM_RULES, AlarmRule
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
    from txmq.broker.monitoring.cluster_node import ClusterNode
    from txmq.broker.monitoring.statistics import Statistics
    from txmq.broker.reactor.held_sends import HeldSends
    from txmq.broker.reactor.tls import Certificates
    from txmq.config.broker import AlarmSettings as Limits
    from txmq.config.broker import SettingsFile
    from txmq.wire.calls.alarms import AlarmsReport

LONGEST_US = HOUR  # for which a source may report
log = structlog.get_logger()
MAX_SOURCES = 100


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

    def report(self, report: AlarmsReport, user: str = "") -> None:
        """Replace the alarms of a source's last report. A repeated alarm keeps its
        time. Sources of other users are apart, and `user` is "" where there are none.
        """
        self._expire()
        key = _SourceKey(user, report.source)
        before = self._sources.pop(key, _AlarmSource(0, ()))
        if not report.alarms:
            return
        if len(self._sources) >= MAX_SOURCES and not self._make_room(user):
            raise Throttled(
                f"{MAX_SOURCES} sources of alarms", hint="they are forgotten when they fall silent"
            )
        now, since = self._now(), {alarm.name: alarm.since for alarm in before.alarms}
        who = f"{report.source} of user {user}" if user else report.source
        alarms = tuple(
            Alarm(
                one.name,
                one.severity,
                since.get(one.name, now),
                f"{who}: {one.text}",
                one.action,
                f"source:{who}",
            )
            for one in report.alarms
        )
        self._sources[key] = _AlarmSource(now + int(report.for_s * SECOND), alarms)

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
    """Checks all rules, and has receivers told. All methods belong to the reactor's
    thread.
    """

    def __init__(
        self,
        engine: Engine,
        settings: SettingsFile,
        resolvers: Resolvers,
        listeners: TransactionListeners,
        retention: RetentionService,
        clock: ClockService,
        sends: HeldSends,
        members: MemberSessions,
    ) -> None:
        self._clock, self._sends, self._members = clock, sends, members
        self.cluster: ClusterNode | None = None  # None for a broker alone
        self.statistics: Statistics | None = None  # they tell groups without a member
        self._engine, self._limits, self._resolvers = engine, settings.alarms, resolvers
        self._listeners, self._retention = listeners, retention
        # by rule, and by what they are about where that is told apart
        self._raised: dict[str, dict[str, Alarm]] = {}
        self.reported = ReportedAlarms(engine.now)
        self.delivery = AlarmDelivery(settings.broker.name, settings.alarms, engine.now)
        self.certificates: Certificates | None = None  # where there is TLS

    def use(self, limits: Limits) -> None:
        """Go by other limits and receivers, from the next tick on."""
        self._limits = limits
        self.delivery.use(limits)

    def tick(self) -> None:
        """Timer: raise and clear alarms, and tell receivers."""
        self.delivery.tell(self.raised())

    def _judge_all(self) -> None:
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
        self._judge_all()
        own = (alarm for raised in self._raised.values() for alarm in raised.values())
        return sorted(
            (*own, *self.reported.raised()),
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
            self.delivery.undelivered(),
            {} if self.statistics is None else self.statistics.unattended,
            () if self.cluster is None else self.cluster.view().nodes,
            () if self.certificates is None else self.certificates.ends(),
        )

    def _judge(self, rule: AlarmRule, found: str | Raised | list[Raised], now: int) -> None:
        before = self._raised.get(rule.name, {})
        found = Raised(found, "") if isinstance(found, str) else found
        several = found if isinstance(found, list) else [found]
        # what is not told apart stays one alarm, whatever it is about by now
        raised = {one.about if several is found else "": one for one in several if one.text}
        self._raised[rule.name] = after = {
            key: _alarm(rule, one, before[key].since if key in before else now)
            for key, one in raised.items()
        }
        for key in after.keys() - before.keys():
            log.error(
                "alarm.raised",
                alarm=rule.name,
                severity=after[key].severity,
                text=after[key].text,
                action=after[key].action,
            )
        for key in before.keys() - after.keys():
            seconds = max(0, now - before[key].since) // SECOND
            log.info("alarm.cleared", alarm=rule.name, about=before[key].about, after_s=seconds)


def _alarm(rule: AlarmRule, found: Raised, since: int) -> Alarm:
    severity = found.severity or rule.severity
    alarm = Alarm(rule.name, severity, since, found.text, rule.action, found.about)
    return alarm._replace(action=rule.action.replace("GROUP", alarm.group or "GROUP"))
