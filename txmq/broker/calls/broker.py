"""Control calls of the broker itself: its state, alarms and statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from txmq.broker.monitoring.alarm import Alarm
from txmq.core.state import restores
from txmq.errors import BadRequest
from txmq.model.own_topics import is_own

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.calls.dispatcher import CallContext, Handler
    from txmq.broker.engine.engine import Engine
    from txmq.broker.monitoring.alarms import AlarmService
    from txmq.broker.monitoring.statistics import Statistics
    from txmq.config.broker import SettingsFile
    from txmq.wire.calls.alarms import AlarmsReport
    from txmq.wire.calls.arguments import NoArgs, SeriesArgs, StatsArgs


NO_RECEIVER = BadRequest(
    "nobody is told of alarms",
    hint="name a receiver in the broker's settings: [[alarms.webhook]] or [[alarms.mail]]",
)


class BrokerCalls:
    """Calls about the broker. `throttled` returns what waits, and why."""

    def __init__(
        self,
        engine: Engine,
        settings: SettingsFile,
        alarms: AlarmService,
        statistics: Statistics,
        throttled: Callable[[], dict[str, object]],
    ) -> None:
        self._engine, self._settings, self._alarms = engine, settings, alarms
        self._statistics, self._throttled = statistics, throttled
        self.handlers: dict[str, Handler] = {
            "broker.show": self.show,
            "broker.alarms": self.alarms,
            "alarms.test": self.send_test_alarm,
            "broker.stats": self.stats,
            "broker.series": self.series,
            "alarms.report": self.report,
        }

    def show(self, call: CallContext, args: NoArgs) -> None:
        store, state = self._engine.store, self._engine.state
        space = self._engine.disk.space
        incarnation = restores.incarnation(state)
        call.answer(
            {
                "name": self._settings.broker.name,
                "log_id": str(store.log_id),
                "incarnation": None if incarnation is None else str(UUID(bytes=incarnation)),
                "boot_epoch": state.boot_epoch,
                "end": store.end,
                "durable": store.durable,
                "read_only": store.read_only or self._engine.disk.refusing,
                "disk": None if space is None else space._asdict(),
                "topics": sum(1 for name in state.topics if not is_own(name)),
                "groups": len(state.groups.by_name),
                "undecided": state.undecided,
                "delayed": state.delayed_count,
                "segments": len(store.segments()),
                "throttled": self._throttled(),
                "resolvers": [resolver.name for resolver in self._settings.resolver],
            }
        )

    def alarms(self, call: CallContext, args: NoArgs) -> None:
        """List alarms, at once: with a full disk, which is an alarm, nothing becomes
        durable.
        """
        call.answer({"alarms": [alarm._asdict() for alarm in self._alarms.raised()]})

    def send_test_alarm(self, call: CallContext, args: NoArgs) -> None:
        """Tell all receivers of an alarm that is none, and answer when they had it."""
        by = f" by {call.user}" if call.user else ""
        alarm = Alarm(
            "alarms.test", "critical", self._engine.now(), f"a test{by}", "nothing is to be done"
        )
        told = self._alarms.delivery.test(alarm)
        told.addCallback(lambda found: call.answer({"receivers": found} if found else NO_RECEIVER))

    def report(self, call: CallContext, args: AlarmsReport) -> None:
        self._alarms.reported.report(args, call.user)
        call.answer({})

    def stats(self, call: CallContext, args: StatsArgs) -> None:
        call.answer(self._statistics.describe(args.limit))

    def series(self, call: CallContext, args: SeriesArgs) -> None:
        call.answer(self._statistics.series(args.names, args.span))
