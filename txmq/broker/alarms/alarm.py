"""What an alarm is."""

from __future__ import annotations

from typing import NamedTuple

SECOND = 1_000_000


class Alarm(NamedTuple):
    """An alarm that is raised. `since` is when it was first seen, in microseconds since
    the epoch.
    """

    name: str
    severity: str  # "critical": something stands still or is wrong; "warning": it may become so
    since: int
    text: str
    action: str
