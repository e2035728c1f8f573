"""The event of logs that have topics in common."""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.events.base import event


@event(90)
class LogsListed(NamedTuple):
    """The list of logs is this one from now on: the rows of a `LogList`."""

    version: int
    logs: tuple[tuple[bytes, str, int, int], ...]
