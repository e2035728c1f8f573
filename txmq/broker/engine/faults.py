"""Bugs that showed: exceptions that nothing expected, caught where they concern one
request, one timer or one step only.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import TYPE_CHECKING

import structlog

from txmq.store.tables import IndexDamaged

if TYPE_CHECKING:
    from collections.abc import Callable

TRACEBACK_S = 60.0  # between two tracebacks of one place in the log
log = structlog.get_logger()


class Faults:
    """The faults since the start: their number, and the last one."""

    def __init__(self, seconds: Callable[[], float], now: Callable[[], int]) -> None:
        """`seconds` is a monotonic clock, `now` gives microseconds since the epoch.

        `on_damage` is called when the index is damaged: that concerns all.
        """
        self._seconds, self._now = seconds, now
        self.on_damage: Callable[[IndexDamaged], None] = lambda _error: None
        self._logged: dict[str, float] = {}
        self.counts: Counter[str] = Counter()  # by place
        self.last, self.last_at = "", 0
        self.rebuilt, self.rebuilt_at = "", 0  # the index at the start, and why

    def note_rebuilt(self, reason: str) -> None:
        """Note that the start has discarded the index, and makes it anew."""
        self.rebuilt, self.rebuilt_at = reason, self._now()

    def record(self, place: str, error: BaseException) -> None:
        """Count a fault and log it, with the traceback once a minute."""
        self.counts[place] += 1
        self.last, self.last_at = f"{place}: {type(error).__name__}: {error}", self._now()
        if isinstance(error, IndexDamaged):
            self.on_damage(error)
        seconds = self._seconds()
        if seconds - self._logged.get(place, -TRACEBACK_S) < TRACEBACK_S:
            return
        self._logged[place] = seconds
        text = "".join(traceback.format_exception(error))
        log.error("broker.fault", place=place, error=str(error), traceback=text)

    def guard(self, place: str, function: Callable[[], object]) -> Callable[[], None]:
        """Return `function` such that an exception in it is recorded and ends nothing
        else.
        """

        def guarded() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001  # whatever it is, others go on
                self.record(place, error)

        return guarded
