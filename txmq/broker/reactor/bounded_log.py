"""Warnings about single connections, so many a minute: whoever connects again and again
must not fill a disk with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from txmq.broker.reactor.interfaces import Clock

PERIOD_S = 60.0
MOST = 100  # lines in a period
log = structlog.get_logger()


class BoundedLog:
    """Writes warnings, and the number of those that were left out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends_at = float("-inf")
        self._lines = 0

    def warn(self, bound: Any, event: str, **fields: object) -> None:  # noqa: ANN401  # structlog's
        """Write a warning by a connection's logger, while there are few of them."""
        now = self._clock.seconds()
        if now >= self._ends_at:
            if self._lines > MOST:
                log.warning("session.warnings_left_out", lines=self._lines - MOST)
            self._ends_at, self._lines = now + PERIOD_S, 0
        self._lines += 1
        if self._lines <= MOST:
            bound.warning(event, **fields)
