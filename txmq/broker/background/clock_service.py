"""The clock of the broker's machine, watched: a wall clock that is not believed is an
alarm, until it is right, or other clocks or an operator confirm it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import structlog

from txmq.broker.reactor.steady_clock import BELIEVED_US
from txmq.core.events.base import TimeNoted
from txmq.core.retention.broker_time import CONFIRMED_S, TOLERATED_US, NoteTime
from txmq.errors import RequestRejected
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.checkback.resolvers import Resolvers
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.broker.reactor.steady_clock import SteadyClock
    from txmq.core.events.base import RecordContext

AGREED_S = 60.0  # for which all other clocks must agree with a wall clock that has jumped
UNREAD = "its clock has not been read lately; the broker reads it every 30 s"
log = structlog.get_logger()


class ClockStatus(NamedTuple):
    """The broker's time, the wall clock's, and one that is certainly past, in
    microseconds.

    `certain_after_s`: if the clock stays steady, nothing is in doubt after so many
    seconds; None = the clock is wrong, or nothing is in doubt. `databases` are those
    whose clocks are known, with their times; `not_compared` the others, with reasons.
    """

    now: int
    wall: int
    certain: int
    certain_after_s: float | None
    databases: dict[str, int]
    not_compared: dict[str, str]

    @property
    def wall_ahead(self) -> int:
        return self.wall - self.now

    @property
    def is_believed(self) -> bool:
        """Return whether the broker's time is the wall clock's."""
        return abs(self.wall_ahead) <= BELIEVED_US


class ClockService:
    """Judges the wall clock. All methods belong to the reactor's thread."""

    def __init__(
        self, engine: Engine, clock: SteadyClock, timers: Clock, resolvers: Resolvers
    ) -> None:
        self._engine, self._clock, self._timers = engine, clock, timers
        self._resolvers = resolvers
        self._steady_since: float | None = None  # by the timers' clock
        self._agreed_since: float | None = None
        self._follows = False  # the event that is being recorded lets the clock follow
        engine.listen(TimeNoted, self._noted)

    def status(self) -> ClockStatus:
        engine, left_s = self._engine, None
        if engine.state.doubted and self._steady_since is not None:
            left_s = max(0.0, self._steady_since + CONFIRMED_S - self._timers.seconds())
        resolvers = self._resolvers.status()
        databases = {one.name: one.time for one in resolvers if one.time}
        others = {one.name: one.trouble or UNREAD for one in resolvers if not one.time}
        return ClockStatus(
            engine.now(), self._clock.wall(), engine.certain(), left_s, databases, others
        )

    def tick(self) -> None:
        """Timer: look at the clocks, and end a doubt once the clock was steady for long
        enough.
        """
        now_s, seen, doubted = self._timers.seconds(), self.status(), self._engine.state.doubted
        if seen.is_believed:
            self._agreed_since = None
            if self._steady_since is None:
                self._steady_since = now_s
            if doubted and now_s - self._steady_since >= CONFIRMED_S:
                self._note(NoteTime(0))
            return
        self._steady_since = None
        if -seen.wall_ahead > doubted + TOLERATED_US:
            self._note(NoteTime(-seen.wall_ahead))
        if not _agree(seen):
            self._agreed_since = None
        elif self._agreed_since is None:
            self._agreed_since = now_s
        elif now_s - self._agreed_since >= AGREED_S:
            # they may be clocks of the same machine: what cannot be undone still waits
            self._follow(seen, doubted, by=", ".join(seen.databases))

    def confirm(self, operator: str, act: Callable[[object], object] | None = None) -> None:
        """Follow the wall clock, by an operator's word. Nothing is in doubt then. `act`
        makes an operator's command of what is submitted.
        """
        seen = self.status()
        self._follow(seen, -seen.wall_ahead, by=f"operator {operator}", act=act)

    def _follow(
        self,
        seen: ClockStatus,
        doubted: int,
        *,
        by: str,
        act: Callable[[object], object] | None = None,
    ) -> None:
        """Follow the wall clock. In doubt is then as much as it is ahead, and
        `doubted`.
        """
        log.warning("clock.followed", by=by, ahead_s=round(seen.wall_ahead / SECOND, 3))
        back = 0 if seen.is_believed else -seen.wall_ahead
        self._follows = True
        note = NoteTime(max(0, doubted + seen.wall_ahead), back)
        self._note(note if act is None else act(note))
        self._follows = False
        self._steady_since = self._agreed_since = None

    def _note(self, command: object) -> None:
        def noted(reply: object) -> None:
            if isinstance(reply, RequestRejected):  # no space: the next tick tries again
                log.error("clock.not_noted", reason=reply.message)

        self._engine.submit(command, noted)

    def _noted(self, event: TimeNoted, _context: RecordContext) -> None:
        # Before another record: it would have the time before.
        log.info("clock.noted", doubted_s=event.doubted / SECOND, back_s=event.back / SECOND)
        if self._follows:
            self._clock.follow()


def contradicting(seen: ClockStatus) -> list[str]:
    """Return the names of the databases whose clocks say otherwise than the wall
    clock.
    """
    return [name for name, time in seen.databases.items() if abs(time - seen.wall) > BELIEVED_US]


def _agree(seen: ClockStatus) -> bool:
    """Return whether other clocks are known, and all of them say what the wall clock
    says.
    """
    return bool(seen.databases) and not contradicting(seen)
