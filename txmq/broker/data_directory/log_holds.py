"""Holds of backups: segments that they still have to read are not removed.

A hold is in memory only, and ends by itself when its backup does not renew it. So
neither a restart of the broker nor a backup that died keeps the log for long. Where the
disk is full, holds give way: the backup fails then, and not the broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.store.tables import SIGN

if TYPE_CHECKING:
    from collections.abc import Callable

HOLD_S = 60.0
MAX_HOLDS = 16


class LogHolds:
    """The holds of running backups, by id. All methods belong to the reactor's thread,
    but `lowest`.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._held: dict[str, tuple[int, float]] = {}  # position, end of the hold

    def hold(self, name: str, position: int) -> bool:
        """Keep the log from a position on, for another `HOLD_S`. False = there are too
        many holds.
        """
        self._expire()
        if name not in self._held and len(self._held) >= MAX_HOLDS:
            return False
        self._held[name] = (position, self._seconds() + HOLD_S)
        return True

    def __contains__(self, name: str) -> bool:
        """Return whether there is a hold of this name."""
        return name in self._held

    def release(self, name: str) -> None:
        """End a hold. Idempotent."""
        self._held.pop(name, None)

    def lowest(self) -> int:
        """Return the position from which on the log is held."""
        self._expire()
        return min((position for position, _until in self._held.values()), default=SIGN)

    def __len__(self) -> int:
        """Return the number of holds."""
        self._expire()
        return len(self._held)

    def _expire(self) -> None:
        now = self._seconds()
        for name in [name for name, (_, until) in self._held.items() if until <= now]:
            del self._held[name]
