"""Rates and sizes of topics and groups, and how long flushes take: sampled from the state, so that no send pays for it.

A few thousand topics and groups are looked at in one turn of the reactor; each has the rate between its last two looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from txmq.broker.core import consumer_queries as queries
from txmq.store.latency import BOUNDS_US

if TYPE_CHECKING:
    from txmq.broker.cataloguing import Cataloguing
    from txmq.broker.core.consumers import Group
    from txmq.broker.core.state import Topic
    from txmq.broker.engine import Engine
    from txmq.broker.retaining import Retaining
    from txmq.broker.seams import Clock

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
            first, second = (max(0, now - before) / passed for now, before in zip(seen, self.seen, strict=True))
            self.at, self.seen, self.per_s = at, seen, (round(first, 1), round(second, 1))


class Statistics:
    """See above. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, clock: Clock, retaining: Retaining, cataloguing: Cataloguing) -> None:
        self._engine, self._clock, self._retaining, self._cataloguing = engine, clock, retaining, cataloguing
        self._topics: dict[int, Rate] = {}
        self._groups: dict[int, Rate] = {}
        self._log = Rate(clock.seconds(), (engine.store.end, engine.store.latencies.count))
        self._left: list[Callable[[], None]] = []
        self._next = clock.seconds()

    def tick(self) -> None:
        """Timer: look at some more."""
        now = self._clock.seconds()
        if not self._left and now >= self._next:
            self._next = now + EVERY_S
            self._begin(now)
        for _ in range(min(len(self._left), AT_ONCE)):
            self._left.pop()()

    def _begin(self, now: float) -> None:
        state, store = self._engine.state, self._engine.store
        self._log.look(now, (store.end, store.latencies.count))
        groups = state.consumers.by_id
        self._topics = {key: rate for key, rate in self._topics.items() if key in state.topics_by_id}
        self._groups = {key: rate for key, rate in self._groups.items() if key in groups}
        self._left = [lambda topic=topic: self._look_at_topic(topic) for topic in state.topics.values()]  # type: ignore[misc]  # bound here
        self._left += [lambda group=group: self._look_at_group(group) for group in groups.values()]  # type: ignore[misc]

    def _look_at_topic(self, topic: Topic) -> None:
        self._look(self._topics, topic.topic_id, (sum(topic.ends), topic.stored))

    def _look_at_group(self, group: Group) -> None:
        done = sum(position.floor + position.settled.total for position in group.positions.values())
        self._look(self._groups, group.group_id, (done, 0))

    def _look(self, rates: dict[int, Rate], key: int, seen: tuple[int, int]) -> None:
        rate, now = rates.get(key), self._clock.seconds()
        if rate is None:
            rates[key] = Rate(now, seen)
        else:
            rate.look(now, seen)

    def flushes(self) -> dict[str, Any]:
        """How long writes took until they were on disk, since the start; `buckets` are counts of not more than that."""
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
        topics = [self._topic(topic) for topic in self._engine.state.topics.values()]
        groups = [self._group(group) for group in self._engine.state.consumers.by_id.values()]
        bytes_per_s, flushes_per_s = self._log.per_s
        return {
            "every_s": EVERY_S,
            "messages_per_s": round(sum(topic["messages_per_s"] for topic in topics), 1),
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
            "topics": _busiest(topics, limit),
            "groups": _busiest(groups, limit),
        }

    def _topic(self, topic: Topic) -> dict[str, Any]:
        rate = self._topics.get(topic.topic_id)
        messages_per_s, bytes_per_s = (0.0, 0.0) if rate is None else rate.per_s
        kept = sum(topic.ends) - sum(topic.firsts)
        told = {"topic": topic.name, "partitions": len(topic.ends), "messages": kept, "bytes": sum(topic.sizes)}
        return told | {"messages_per_s": messages_per_s, "bytes_per_s": bytes_per_s}

    def _group(self, group: Group) -> dict[str, Any]:
        rate = self._groups.get(group.group_id)
        told = queries.counts(self._engine.state, group, self._engine.now())
        return told | {"messages_per_s": 0.0 if rate is None else rate.per_s[0]}


def _busiest(rows: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -float(row["messages_per_s"]))[:limit]
