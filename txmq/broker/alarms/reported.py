"""Alarms that others raise: who looks after prepared branches or a replication slot
sees what the broker does not.

Kept in memory: who has something to tell tells it again and again, and a source that
has fallen silent knows nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.alarms.alarm import SECOND, Alarm
from txmq.core.state.state import Rejected
from txmq.errors import Throttled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from txmq.wire.calls_alarms import AlarmsReport

MOST_SOURCES = 100


class _Source(NamedTuple):
    until: int
    alarms: tuple[Alarm, ...]


class Reported:
    """What each source told last. `now` gives microseconds since the epoch."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._sources: dict[str, _Source] = {}

    def report(self, told: AlarmsReport) -> Rejected | None:
        """Take it over. What a source tells again keeps the time since when it
        holds.
        """
        self._forget()
        before = self._sources.pop(told.source, _Source(0, ()))
        if len(self._sources) >= MOST_SOURCES:
            return Rejected(
                Throttled,
                f"{MOST_SOURCES} sources of alarms",
                "they are forgotten when they fall silent",
            )
        if told.alarms:
            now, since = self._now(), {alarm.name: alarm.since for alarm in before.alarms}
            alarms = tuple(
                Alarm(
                    one.name,
                    one.severity,
                    since.get(one.name, now),
                    f"{told.source}: {one.text}",
                    one.action,
                )
                for one in told.alarms
            )
            self._sources[told.source] = _Source(now + int(told.for_s * SECOND), alarms)
        return None

    def raised(self) -> Iterator[Alarm]:
        """What holds, as far as is known."""
        self._forget()
        for source in self._sources.values():
            yield from source.alarms

    def _forget(self) -> None:
        now = self._now()
        self._sources = {
            name: source for name, source in self._sources.items() if source.until > now
        }
