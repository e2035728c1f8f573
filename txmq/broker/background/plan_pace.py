"""The pace of a running replay plan: how many letters it may put back now, and how long
the rest takes.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from txmq.core.replay import putting_back

if TYPE_CHECKING:
    from txmq.core.state.plans import Plan

FIRST_SHARE = 0.1  # of the rate, with which a ramp begins
MEASURED_S = 5.0  # of a plan's speed
BURST_S = 0.25  # a plan may put back what it has missed for so long
FAST = 1 << 30  # letters per step of a plan without a rate


class PlanPace:
    """The token bucket of a running plan, whose rate grows along a ramp."""

    def __init__(self, plan: Plan, now: float) -> None:
        self._settings, self.state = plan.settings, plan.state
        self._began = self._at = now
        self._tokens = 1.0
        self._measured_from, self._taken = now, 0
        self._speed: float | None = None  # letters per second of the last measurement

    def rate(self, now: float) -> float:
        """Return the letters per second of now; 0 = without a limit."""
        rate, ramp = self._settings.rate, self._settings.ramp_s
        share = min((now - self._began) / ramp, 1.0) if ramp else 1.0
        return rate * (FIRST_SHARE + (1 - FIRST_SHARE) * share)

    def allowed(self, now: float) -> int:
        """Return how many letters may be put back now."""
        if not self._settings.rate:
            return FAST
        rate = self.rate(now)
        most = max(1.0, rate * BURST_S)
        self._tokens = min(self._tokens + (now - self._at) * rate, most)
        self._at = now
        return int(self._tokens)

    def goes_on(self, now: float) -> bool:
        """Return True if the next step need not wait for a tick. A step for each letter
        would make all others wait for a disk flush of its own.
        """
        return self.allowed(now) >= putting_back.STEP_LETTERS

    def take(self, letters: int) -> None:
        """Count letters that were put back."""
        self._tokens -= letters
        self._taken += letters

    def measure(self, now: float) -> None:
        """Measure the speed from time to time."""
        if (elapsed := now - self._measured_from) >= MEASURED_S:
            self._speed = self._taken / elapsed
            self._measured_from, self._taken = now, 0

    def seconds_for(self, letters: int, now: float, *, by_outcomes: bool) -> float | None:
        """Return how long it takes to put so many letters back; None = not known.

        `by_outcomes`: letters without an outcome hold up the others, so that the speed
        is that of the group, and not the rate.
        """
        seconds = self._ramp_for(letters, now)
        if not by_outcomes:
            return seconds
        return max(seconds, letters / self._speed) if self._speed else None

    def _ramp_for(self, letters: int, now: float) -> float:
        """Return how long so many letters take by the rate, which grows meanwhile."""
        full, rate = self._settings.rate, self.rate(now)
        if not (full and letters):
            return 0.0
        left = max(self._settings.ramp_s - (now - self._began), 0.0)
        in_ramp = (rate + full) / 2 * left
        if letters >= in_ramp or rate == full:
            return left + max(letters - in_ramp, 0.0) / full
        growth = (full - rate) / left
        return (sqrt(rate * rate + 2 * growth * letters) - rate) / growth
