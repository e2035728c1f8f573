"""The schedule of check-backs of an undecided transaction.

Checks come soon at first, then ever more slowly, and never stop. Defaults: RocketMQ's
first check after 6 s, and then every 30 s. RocketMQ gives up after 15 checks; here the
transaction is only flagged for the operator then.
"""

from __future__ import annotations

from dataclasses import dataclass

from txmq.model.units import SECOND


@dataclass(frozen=True, slots=True)
class CheckSchedule:
    """Times between check-backs, in microseconds."""

    first: int = 6 * SECOND
    second: int = 30 * SECOND
    factor: float = 1.5
    longest: int = 600 * SECOND
    in_doubt_after: int = 15  # checks

    def delay(self, tries: int, jitter: float) -> int:
        """Return the time from check number `tries` (from 1) to the next.

        `jitter` in [0, 1) shortens it by up to a tenth.
        """
        wait = min(self.second * self.factor ** min(tries - 1, 64), self.longest)
        return int(wait * (0.9 + 0.1 * jitter))

    def in_doubt(self, tries: int) -> bool:
        """Return whether a transaction is in doubt after this many checks."""
        return tries >= self.in_doubt_after
