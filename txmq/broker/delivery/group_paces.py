"""How fast groups with a limit may get messages in a second, and bytes of what lies far
behind the end of the log: the disk has to read these.

Counts are in memory. A group without limits costs one look-up for each fetch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.token_bucket import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.core.consumers.candidates import Candidate

HOT_BYTES = 256 << 20  # at the end of the log: the system's cache has them


class Pace:
    """The limits of one group, as they are used up."""

    def __init__(self, messages_per_s: int, cold_bytes_per_s: int, now: float) -> None:
        self.limits = (messages_per_s, cold_bytes_per_s)
        self._messages = TokenBucket(messages_per_s, now) if messages_per_s else None
        self._cold = TokenBucket(cold_bytes_per_s, now) if cold_bytes_per_s else None
        self.waits = {"messages_per_s": 0, "cold_bytes_per_s": 0}  # fetches that waited

    def messages(self, most: int, now: float) -> int:
        """Return how many messages a fetch may bring now."""
        if self._messages is None:
            return most
        if self._messages.wait_s(now):
            self.waits["messages_per_s"] += 1
            return 0
        return min(most, max(1, int(self._messages.tokens)))

    def may_read(self, candidates: Iterable[Candidate], hot_from: int, now: float) -> bool:
        """Return whether these may be read now."""
        if self._cold is None or not self._cold.wait_s(now) or not cold_bytes(candidates, hot_from):
            return True
        self.waits["cold_bytes_per_s"] += 1
        return False

    def note(self, messages: int, cold: int) -> None:
        """Count what was delivered, and the bytes that were cold."""
        if self._messages is not None:
            self._messages.take(messages)
        if self._cold is not None:
            self._cold.take(cold)


class GroupPaces:
    """The paces of all groups that have a limit."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._paces: dict[str, Pace] = {}

    def of(self, group: str) -> Pace | None:
        """Return the pace of a group; None = it has no limit."""
        found = self._engine.state.groups.by_name.get(group)
        if found is None:
            return None
        settings = found.settings
        limits = (settings.messages_per_s, settings.cold_bytes_per_s)
        if limits == (0, 0):
            return None
        pace = self._paces.get(group)
        if pace is None or pace.limits != limits:
            pace = self._paces[group] = Pace(*limits, self.now())
        return pace

    def now(self) -> float:
        """Return the time that paces go by."""
        return self._clock.seconds()

    def hot_from(self) -> int:
        """Return the position from which on the log is hot."""
        return self._engine.store.durable - HOT_BYTES

    def view(self) -> dict[str, dict[str, int]]:
        """Return how many fetches waited, by group and limit. Groups that have no limit
        any more are forgotten.
        """
        self._paces = {name: pace for name, pace in self._paces.items() if self.of(name) is pace}
        return {name: dict(pace.waits) for name, pace in self._paces.items()}


def cold_bytes(candidates: Iterable[Candidate], hot_from: int) -> int:
    """Return the bytes of what lies before the hot end of the log."""
    return sum(
        entry.length
        for one in candidates
        if one.wanted
        for entry in one.batches
        if entry.position < hot_from
    )
