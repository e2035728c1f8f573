"""When an undecided transaction is asked about: first soon, then ever more slowly,
never for the last time.

Defaults: RocketMQ's first check after 6 s and then every 30 s; unlike there, nothing is
given up after 15 checks, it is only flagged for the operator (PROTOCOLS 1.5 and 5,
result 8).
"""

from __future__ import annotations

from dataclasses import dataclass

SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class CheckSchedule:
    """Times in microseconds."""

    first: int = 6 * SECOND
    second: int = 30 * SECOND
    factor: float = 1.5
    longest: int = 600 * SECOND
    in_doubt_after: int = 15  # checks

    def delay(self, tries: int, jitter: float) -> int:
        """Time from check number `tries` (from 1) to the next; `jitter` in [0, 1)
        spreads it by up to a tenth.
        """
        wait = min(self.second * self.factor ** min(tries - 1, 64), self.longest)
        return int(wait * (0.9 + 0.1 * jitter))

    def in_doubt(self, tries: int) -> bool:
        """Whether an operator should look at a transaction still undecided after this
        many checks.
        """
        return tries >= self.in_doubt_after
