"""Delivery of alarms to receivers: webhooks and mail.

A receiver is told of an alarm when it is raised or becomes critical, again from time to
time while it holds, and when it has ended. What a receiver did not take is sent again.
Nothing is kept over a restart: an alarm that still holds is told again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import structlog
from twisted.internet.defer import gatherResults, inlineCallbacks, maybeDeferred

from txmq.broker.monitoring.alarm_notices import Exchange, Notice, send
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from twisted.internet.defer import Deferred

    from txmq.broker.monitoring.alarm import Alarm
    from txmq.config.broker import AlarmSettings, MailSettings, WebhookSettings

EVERY_S = 10.0  # between two notices to a receiver: an alarm may come and go each second
LONGEST_S = 300.0  # between two attempts at a receiver that does not answer
FAILING_S = 30.0  # until that is an alarm itself
FORGETFUL_S = 60.0  # Alertmanager ends alarms that are not repeated
log = structlog.get_logger()


class Told(NamedTuple):
    """An alarm as a receiver was told of it last."""

    at: int
    alarm: Alarm


class Receiver:
    """A receiver of alarms: those it was told of, and when it may be told more."""

    def __init__(self, settings: WebhookSettings | MailSettings) -> None:
        self.settings = settings
        self.told: dict[str, Told] = {}
        self.busy = False
        self.next_at = 0
        self.failing_since = 0
        self.error = ""
        self._wait_s = EVERY_S

    @property
    def repeat_s(self) -> float:
        forgets = getattr(self.settings, "form", "") == "alertmanager"
        return min(self.settings.repeat_s, FORGETFUL_S) if forgets else self.settings.repeat_s

    def due(self, broker: str, raised: Iterable[Alarm], now: int) -> Notice | None:
        """Return what the receiver is to be told now."""
        if self.busy or now < self.next_at:
            return None
        wanted = ("critical", self.settings.severity)
        current = {one.key: one for one in raised if one.severity in wanted}
        repeat = round(self.repeat_s * SECOND)
        new = (
            alarm
            for key, alarm in current.items()
            if key not in self.told
            or now >= self.told[key].at + repeat
            or alarm.severity < self.told[key].alarm.severity  # "critical" by now
        )
        ended = (told.alarm for key, told in self.told.items() if key not in current)
        notice = Notice(broker, now, self.repeat_s, tuple(new), tuple(ended))
        return notice if notice.raised or notice.resolved else None

    def begin(self, now: int) -> None:
        """Begin an attempt, which may last."""
        self.busy, self.failing_since = True, self.failing_since or now
        self.error = self.error or "no answer yet"

    def has(self, notice: Notice) -> None:
        """Note that the receiver has a notice."""
        for alarm in notice.raised:
            self.told[alarm.key] = Told(notice.at, alarm)
        for alarm in notice.resolved:
            self.told.pop(alarm.key, None)
        self.answers()

    def answers(self) -> None:
        """Note that the receiver takes what it is sent."""
        self.failing_since, self.error, self._wait_s = 0, "", EVERY_S

    def fails(self, error: str) -> None:
        """Note that the receiver did not take a notice: it waits longer each time."""
        self.error = error
        self._wait_s = min(2 * self._wait_s, LONGEST_S)

    def rest(self, now: int) -> None:
        """End an attempt."""
        self.busy, self.next_at = False, now + round(self._wait_s * SECOND)


class AlarmDelivery:
    """Tells receivers. All methods belong to the reactor's thread.

    `in_thread` calls a function in a thread; None = nobody is told, as in tests of
    other things.
    """

    def __init__(self, broker: str, settings: AlarmSettings, now: Callable[[], int]) -> None:
        self._broker, self._now = broker, now
        self.in_thread: Callable[..., Deferred[None]] | None = None
        self._receivers: dict[str, Receiver] = {}
        self._exchanges = set[Exchange]()
        self.use(settings)

    def use(self, settings: AlarmSettings) -> None:
        """Go by other settings. A receiver whose settings are as before remembers what
        it was told.
        """
        known = self._receivers
        self._receivers = {
            one.name: known[one.name]
            if one.name in known and known[one.name].settings == one
            else Receiver(one)
            for one in settings.receivers
        }

    def tell(self, raised: Iterable[Alarm]) -> None:
        """Tell receivers what is due. Called again and again: it bounds what lasts."""
        alarms, now = list(raised), self._now()
        for exchange in self._exchanges:
            exchange.bound(now)
        for receiver in self._receivers.values() if self.in_thread else ():
            notice = receiver.due(self._broker, alarms, now)
            if notice is not None:
                receiver.begin(now)
                self._send(receiver, notice)

    @inlineCallbacks
    def _send(self, receiver: Receiver, notice: Notice) -> Generator[Deferred[None], None, None]:
        try:
            yield self._exchange(receiver, notice)
        except Exception as error:  # noqa: BLE001  # of the network, or of another's software
            log.error("alarm.undelivered", receiver=receiver.settings.name, error=_text(error))  # noqa: TRY400  # no bug of ours
            receiver.fails(_text(error))
        else:
            receiver.has(notice)
        receiver.rest(self._now())

    def test(self, alarm: Alarm) -> Deferred[list[dict[str, str]]]:
        """Tell each receiver of an alarm that is raised and at once resolved. Gives the
        error of each, "" = it has taken both; none = there are no receivers.
        """
        return gatherResults([self._test(one, alarm) for one in self._receivers.values()])

    @inlineCallbacks
    def _test(
        self, receiver: Receiver, alarm: Alarm
    ) -> Generator[Deferred[None], None, dict[str, str]]:
        notice = Notice(self._broker, alarm.since, receiver.repeat_s, (alarm,), ())
        try:
            for one in (notice, notice._replace(raised=(), resolved=(alarm,))):
                yield self._exchange(receiver, one)
        except Exception as error:  # noqa: BLE001  # likewise
            return {"receiver": receiver.settings.name, "error": _text(error)}
        receiver.answers()
        return {"receiver": receiver.settings.name, "error": ""}

    @inlineCallbacks
    def _exchange(
        self, receiver: Receiver, notice: Notice
    ) -> Generator[Deferred[None], None, None]:
        assert self.in_thread is not None, "somebody is told"
        exchange = Exchange()
        self._exchanges.add(exchange)
        try:
            yield maybeDeferred(self.in_thread, send, receiver.settings, notice, exchange)
        finally:
            self._exchanges.discard(exchange)

    def undelivered(self) -> dict[str, str]:
        """Return why receivers do not get their alarms, by name."""
        now = self._now()
        return {
            name: f"has not taken alarms for {(now - one.failing_since) // SECOND} s: {one.error}"
            for name, one in self._receivers.items()
            if one.failing_since and now - one.failing_since >= FAILING_S * SECOND
        }


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
