"""Rates and sizes of topics and groups, and how long flushes take: sampled from the
state, so that no send pays for it.

A few thousand topics and groups are looked at in one turn of the reactor; each has the
rate between its last two looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from txmq.core.consumers import queries
from txmq.core.state.state import Topic
from txmq.store.latency import BOUNDS_US

if TYPE_CHECKING:
    from txmq.broker.catalogues.catalogue_service import Cataloguing
    from txmq.broker.data_directory.retention_service import Retaining
    from txmq.broker.engine import Engine
    from txmq.broker.reactor.protocols import Clock
    from txmq.core.state.consumer_groups import Group

EVERY_S = 5.0  # between two looks at one of them
AT_ONCE = 2_000  # in one turn of the reactor: about 2 ms


@dataclass(slots=True)
class Rate:
    """A counter as last seen, and how fast it grew since the look before."""

    at: float
    seen: tuple[int, int]
    per_s: tuple[float, float] = (0.0, 0.0)

    def look(self, at: float, seen: tuple[int, int]) -> None:
        """A later look. What went back, such as a group that was reset, has no rate."""
        passed = at - self.at
        if passed > 0:
            first, second = (
                max(0, now - before) / passed for now, before in zip(seen, self.seen, strict=True)
            )
            self.at, self.seen, self.per_s = at, seen, (round(first, 1), round(second, 1))


class Statistics:
    """See above. All methods belong to the reactor's thread."""

    def __init__(
        self, engine: Engine, clock: Clock, retaining: Retaining, cataloguing: Cataloguing
    ) -> None:
        self._engine, self._clock, self._retaining, self._cataloguing = (
            engine,
            clock,
            retaining,
            cataloguing,
        )
        self._topics: dict[int, Rate] = {}
        self._groups: dict[int, Rate] = {}
        self._log = Rate(clock.seconds(), (engine.store.end, engine.store.latencies.count))
        self._left: list[Topic | Group] = []
        self._next = clock.seconds()

    def tick(self) -> None:
        """Timer: look at some more."""
        now = self._clock.seconds()
        if not self._left and now >= self._next:
            self._next = now + EVERY_S
            self._begin(now)
        for _ in range(min(len(self._left), AT_ONCE)):
            self._look_at(self._left.pop())

    def _begin(self, now: float) -> None:
        state, store = self._engine.state, self._engine.store
        self._log.look(now, (store.end, store.latencies.count))
        groups = state.consumers.by_id
        if len(self._groups) > len(groups):  # a deleted topic is known for ever
            self._groups = {key: rate for key, rate in self._groups.items() if key in groups}
        self._left = [*state.topics.values(), *groups.values()]

    def _look_at(self, one: Topic | Group) -> None:
        if isinstance(one, Topic):
            self._look(self._topics, one.topic_id, (sum(one.ends), one.stored))
        else:
            done = sum(
                position.floor + position.settled.total for position in one.positions.values()
            )
            self._look(self._groups, one.group_id, (done, 0))

    def _look(self, rates: dict[int, Rate], key: int, seen: tuple[int, int]) -> None:
        rate, now = rates.get(key), self._clock.seconds()
        if rate is None:
            rates[key] = Rate(now, seen)
        else:
            rate.look(now, seen)

    def flushes(self) -> dict[str, Any]:
        """How long writes took until they were on disk, since the start; `buckets` are
        counts of not more than that.
        """
        latencies = self._engine.store.latencies
        buckets = zip(BOUNDS_US, accumulate(latencies.counts), strict=False)
        return {
            "count": latencies.count,
            "p50_us": latencies.quantile(0.5),
            "p99_us": latencies.quantile(0.99),
            "max_us": latencies.most_us,
            "total_us": latencies.total_us,
            "buckets": [list(bucket) for bucket in buckets],
        }

    def tell(self, limit: int) -> dict[str, Any]:
        """All of it: of the topics and groups those with the highest rates."""
        store = self._engine.store
        topics, groups = (
            self._engine.state.topics.values(),
            self._engine.state.consumers.by_id.values(),
        )
        bytes_per_s, flushes_per_s = self._log.per_s
        return {
            "every_s": EVERY_S,
            "messages_per_s": round(sum(map(self._rate, topics)), 1),
            "log": {
                "bytes": store.end - store.first,
                "segments": len(store.segments()),
                "bytes_per_s": bytes_per_s,
                "flushes_per_s": flushes_per_s,
                "needed_from": self._retaining.free.below,
                "held_by": self._retaining.free.held_by,
                "uncatalogued": self._cataloguing.waiting,
            },
            "flush": self.flushes(),
            "topics": [self._topic(topic) for topic in nlargest(limit, topics, self._rate)],
            "groups": [self._group(group) for group in nlargest(limit, groups, self._rate)],
        }

    def _rate(self, one: Topic | Group) -> float:
        rate = (
            self._topics.get(one.topic_id)
            if isinstance(one, Topic)
            else self._groups.get(one.group_id)
        )
        return 0.0 if rate is None else rate.per_s[0]

    def _topic(self, topic: Topic) -> dict[str, Any]:
        rate = self._topics.get(topic.topic_id)
        messages_per_s, bytes_per_s = (0.0, 0.0) if rate is None else rate.per_s
        kept = sum(topic.ends) - sum(topic.firsts)
        told = {
            "topic": topic.name,
            "partitions": len(topic.ends),
            "messages": kept,
            "bytes": sum(topic.sizes),
        }
        return told | {"messages_per_s": messages_per_s, "bytes_per_s": bytes_per_s}

    def _group(self, group: Group) -> dict[str, Any]:
        told = queries.counts(self._engine.state, group, self._engine.now())
        return told | {"messages_per_s": self._rate(group)}
