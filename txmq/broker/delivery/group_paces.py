"""Paces of groups that have a limit: messages a second, and bytes a second of what lies
far behind the end of the log. The disk has to read these.

Counts are in memory. A group without limits costs one look-up for each fetch.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from txmq.core.token_bucket import LimitBuckets

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.core.consumers.candidates import Candidate

RECENTLY_S = 5.0  # of fetches that a limit keeps waiting
HOT_BYTES = 256 << 20  # at the end of the log: the system's cache has them


class GroupPace:
    """The limits of one group, as they are used up."""

    def __init__(self, messages_per_s: int, cold_bytes_per_s: int, now: float) -> None:
        self._buckets = LimitBuckets()
        self.change(messages_per_s, cold_bytes_per_s, now)
        self.waits = {"messages_per_s": 0, "cold_bytes_per_s": 0}  # fetches that waited
        self._waited_at: dict[str, float] = {}  # the last of them

    def change(self, messages_per_s: int, cold_bytes_per_s: int, now: float) -> None:
        """Have other limits from now on. What was used up still counts."""
        self.limits = (messages_per_s, cold_bytes_per_s)
        self._messages = self._buckets.change("messages_per_s", messages_per_s, now)
        self._cold = self._buckets.change("cold_bytes_per_s", cold_bytes_per_s, now)

    def has_debt(self, now: float) -> bool:
        """Return whether a limit, perhaps a removed one, still has a debt."""
        return self._buckets.has_debt(now)

    def holds(self, now: float) -> str:
        """Return the limit that fetches wait for, "" without one."""
        for name, bucket in (("messages_per_s", self._messages), ("cold_bytes_per_s", self._cold)):
            waited_at = self._waited_at.get(name, float("-inf"))
            if bucket is not None and bucket.wait_s(now) and now < waited_at + RECENTLY_S:
                return name
        return ""

    def _note_wait(self, name: str, now: float) -> None:
        self.waits[name] += 1
        self._waited_at[name] = now

    def messages(self, most: int, now: float) -> int:
        """Return how many messages a fetch may bring now."""
        if self._messages is None:
            return most
        if self._messages.wait_s(now):
            self._note_wait("messages_per_s", now)
            return 0
        return min(most, max(1, int(self._messages.tokens)))

    def may_read(self, candidates: Iterable[Candidate], hot_from: int, now: float) -> bool:
        """Return whether these may be read now."""
        if self._cold is None or not self._cold.wait_s(now) or not cold_bytes(candidates, hot_from):
            return True
        self._note_wait("cold_bytes_per_s", now)
        return False

    def note(self, messages: int, cold: int) -> None:
        """Count what was delivered, and the bytes that were cold."""
        if self._messages is not None:
            self._messages.take(messages)
        if self._cold is not None:
            self._cold.take(cold)


class GroupPaces:
    """The paces of all groups that have a limit, and what was sent to each group."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._paces: dict[str, GroupPace] = {}
        self._sent = Counter[str]()  # bytes

    def note_sent(self, group: str, size: int) -> None:
        """Count bytes of messages that were sent to a member of a group."""
        self._sent[group] += size

    def sent_bytes(self) -> Counter[str]:
        """Return the bytes of messages that were sent to each group since the start."""
        known = self._engine.state.groups.by_name
        self._sent = Counter({name: size for name, size in self._sent.items() if name in known})
        return self._sent

    def of(self, group: str) -> GroupPace | None:
        """Return the pace of a group; None = it has no limit."""
        found = self._engine.state.groups.by_name.get(group)
        if found is None:
            return None
        settings = found.settings
        limits = (settings.messages_per_s, settings.cold_bytes_per_s)
        if limits == (0, 0):
            return None
        pace = self._paces.get(group)
        if pace is None:
            pace = self._paces[group] = GroupPace(*limits, self.now())
        elif pace.limits != limits:
            pace.change(*limits, self.now())
        return pace

    def holds(self, group: str) -> str:
        """Return the limit that a group's fetches wait for now, "" without one."""
        pace = self.of(group)
        return "" if pace is None else pace.holds(self.now())

    def now(self) -> float:
        """Return the time that paces go by."""
        return self._clock.seconds()

    def hot_from(self) -> int:
        """Return the position from which on the log is hot."""
        return self._engine.store.durable - HOT_BYTES

    def view(self) -> dict[str, dict[str, int]]:
        """Return how many fetches waited, by group and limit. A group without a limit
        is forgotten when its debts are paid.
        """
        now, groups = self.now(), self._engine.state.groups.by_name
        limited = {name: pace for name, pace in self._paces.items() if self.of(name) is pace}
        in_debt = {
            name: pace
            for name, pace in self._paces.items()
            if name in groups and pace.has_debt(now)
        }
        self._paces = in_debt | limited
        return {name: dict(pace.waits) for name, pace in limited.items()}


def cold_bytes(candidates: Iterable[Candidate], hot_from: int) -> int:
    """Return the bytes of what lies before the hot end of the log."""
    return sum(
        entry.length
        for one in candidates
        if one.wanted
        for entry in one.batches
        if entry.position < hot_from
    )
