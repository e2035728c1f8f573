"""Rates and sizes of topics and groups, and latencies of flushes, sampled from the
state: no send pays for them.

A turn of the reactor samples a few thousand topics and groups. The rate of each is that
between its last two samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.broker.monitoring.series import STEPS_S, SeriesStore, Span
from txmq.core.consumers import group_views, progress
from txmq.core.series import POINTS, NoteSeries, number_at, stored
from txmq.core.state.state import Topic
from txmq.core.transactions.indexes import ListKind
from txmq.model.own_topics import is_own
from txmq.model.units import SECOND
from txmq.store.log.latency import BOUNDS_US

if TYPE_CHECKING:
    from collections.abc import Sequence

    from txmq.broker.data_directory.retention_service import RetentionService
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.broker.search.catalogue_service import CatalogueService
    from txmq.core.state.consumer_groups import ConsumerGroup

PERIOD_S = 5.0  # between two samples of a topic or group
SAMPLES_PER_TICK = 2_000  # in one turn of the reactor: about 2 ms
GROUPS_SERIES = 100  # groups with series of their own
GROUP_SERIES = ("unprocessed", "letters")


@dataclass(slots=True)
class Rate:
    """A counter pair at its last sample, and its growth per second since the sample
    before.
    """

    at: float
    count: tuple[int, int]
    per_s: tuple[float, float] = (0.0, 0.0)

    def update(self, at: float, seen: tuple[int, int]) -> None:
        """Add a sample. A counter that went back, such as that of a group that was
        reset, has no rate.
        """
        passed = at - self.at
        if passed > 0:
            first, second = (
                max(0, now - before) / passed for now, before in zip(seen, self.count, strict=True)
            )
            self.at, self.count, self.per_s = at, seen, (round(first, 1), round(second, 1))


class Unattended(NamedTuple):
    """The messages of a group that has had no member since a time."""

    since: int
    messages: int


class Statistics:
    """Samples the rates. All methods belong to the reactor's thread."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        retention: RetentionService,
        catalogues: CatalogueService,
    ) -> None:
        self._engine, self._clock, self._retention = engine, clock, retention
        self._catalogues = catalogues
        self._topics: dict[int, Rate] = {}
        self._groups: dict[int, Rate] = {}
        self._log = Rate(clock.seconds(), (engine.store.end, engine.store.latencies.count))
        self._unprocessed: dict[int, int] = {}  # by group, at its last sample
        self.unattended: dict[int, Unattended] = {}  # groups with messages and no member
        self._store, self._sampled = SeriesStore(), 0
        self._counted: tuple[float, dict[str, int]] = (0.0, {})
        self._flushed = (0, 0)  # number and microseconds, at the last sample of the series
        self._unsampled: list[Topic | ConsumerGroup] = []
        self._next = clock.seconds()

    def start(self) -> None:
        """Go on with the series that the log has. Of the time from which the clock was
        set back, there is nothing any more.
        """
        now = self._sampled = number_at(self._engine.now())
        found = stored(self._engine.state)
        self._store = SeriesStore(stored=(one for one in found if one.step <= now // POINTS))

    def stop(self) -> None:
        """Keep the step that is not over."""
        if self._engine.failed is None:
            self._keep(self._store.unfinished())

    def _keep(self, step: NoteSeries | None) -> None:
        if step is not None:
            self._engine.submit(step)

    def tick(self) -> None:
        """Timer: sample some more topics and groups."""
        now = self._clock.seconds()
        if not self._unsampled and now >= self._next:
            self._next = now + PERIOD_S
            self._begin(now)
        if (number := number_at(self._engine.now())) != self._sampled:
            self._sample_series(number)
        for _ in range(min(len(self._unsampled), SAMPLES_PER_TICK)):
            self._sample(self._unsampled.pop())

    def _sample_series(self, number: int) -> None:
        if number < self._store.last:  # the clock was set back: what is there has no time
            self._store = SeriesStore()
        self._sampled = number
        self._keep(self._store.sample(number, self._numbers()))

    def _begin(self, now: float) -> None:
        state, store = self._engine.state, self._engine.store
        self._log.update(now, (store.end, store.latencies.count))
        groups = state.groups.by_id
        if len(self._groups) > len(groups):
            self._groups = {key: rate for key, rate in self._groups.items() if key in groups}
            left = self._unprocessed.items()
            self._unprocessed = {key: number for key, number in left if key in groups}
            alone = self.unattended.items()
            self.unattended = {key: since for key, since in alone if key in groups}
        if len(self._topics) > len(state.topics):  # deleted ones stay in the state, by their ids
            live = {topic.topic_id for topic in state.topics.values()}
            self._topics = {key: rate for key, rate in self._topics.items() if key in live}
        self._unsampled = [*state.topics.values(), *groups.values()]

    def _sample(self, one: Topic | ConsumerGroup) -> None:
        if isinstance(one, Topic):
            self._update(self._topics, one.topic_id, (sum(one.end_offsets), one.published_bytes))
        else:
            self._update(self._groups, one.group_id, (one.processed.total(), 0))
            self._unprocessed[one.group_id] = progress.unprocessed(self._engine.state, one)
            self._note_unattended(one)

    def _note_unattended(self, group: ConsumerGroup) -> None:
        before = self.unattended.pop(group.group_id, None)
        messages = 0 if group.members else progress.deliverable(self._engine.state, group)
        if messages:
            since = self._engine.now() if before is None else before.since
            self.unattended[group.group_id] = Unattended(since, messages)

    def _update(self, rates: dict[int, Rate], key: int, seen: tuple[int, int]) -> None:
        rate, now = rates.get(key), self._clock.seconds()
        if rate is None:
            rates[key] = Rate(now, seen)
        else:
            rate.update(now, seen)

    def flushes(self) -> dict[str, Any]:
        """Return the latencies of writes since the start. `buckets` are cumulative
        counts.
        """
        latencies = self._engine.store.latencies
        buckets = zip(BOUNDS_US, accumulate(latencies.counts), strict=False)
        return {
            "count": latencies.count,
            "p50_us": latencies.quantile(0.5),
            "p99_us": latencies.quantile(0.99),
            "max_us": latencies.max_us,
            "total_us": latencies.total_us,
            "buckets": [list(bucket) for bucket in buckets],
        }

    def _numbers(self) -> dict[str, float]:
        """Return a sample of all series: of the broker, and of its busiest groups."""
        state, latencies = self._engine.state, self._engine.store.latencies
        groups = state.groups.by_id.values()
        count, total_us = latencies.count - self._flushed[0], latencies.total_us - self._flushed[1]
        self._flushed = (latencies.count, latencies.total_us)
        found = {
            **self._rates(),
            "undecided": state.undecided,
            "in_doubt": state.listed[ListKind.IN_DOUBT],
            "delayed": state.delayed_count,
            "unprocessed": sum(self._unprocessed.values()),
            "letters": sum(group.letters for group in groups),
        }
        if count > 0:
            found["flush_ms"] = total_us / count / 1_000
        for group in nlargest(GROUPS_SERIES, groups, self._weight):
            numbers = (self._unprocessed.get(group.group_id, 0), group.letters)
            for name, number in zip(GROUP_SERIES, numbers, strict=True):
                found[f"group:{group.name}:{name}"] = number
        return found

    def _rates(self) -> dict[str, float]:
        """Return what came in, was processed and was written, each per second since the
        last sample of the series.
        """
        now, topics = self._clock.seconds(), self._engine.state.topics
        sent = [topic.topic_id for name, topic in topics.items() if not is_own(name)]
        counts = {
            "in_rate": sum(self._topics[key].count[0] for key in sent if key in self._topics),
            "out_rate": sum(rate.count[0] for rate in self._groups.values()),
            "bytes_rate": self._engine.store.end,
        }
        before, self._counted = self._counted, (now, counts)
        passed = now - before[0]
        if not before[1] or passed <= 0:
            return {}
        # what was deleted or reset since then does not count
        return {name: max(0, count - before[1][name]) / passed for name, count in counts.items()}

    def _weight(self, group: ConsumerGroup) -> float:
        return self._rate(group) + self._unprocessed.get(group.group_id, 0) + group.letters

    def series(self, names: Sequence[str], span: Span) -> dict[str, Any]:
        """Return the points of series by name, and the names of all."""
        return {
            "step_s": STEPS_S[span],
            "end": self._store.end_s(span) * SECOND,
            "names": self._store.names(),
            "series": {name: self._store.points(name, span) for name in names},
        }

    def describe(self, limit: int) -> dict[str, Any]:
        """Return all statistics; of topics and groups the `limit` with the highest
        rates.
        """
        store = self._engine.store
        state = self._engine.state
        topics = [topic for name, topic in state.topics.items() if not is_own(name)]
        groups = state.groups.by_id.values()
        bytes_per_s, flushes_per_s = self._log.per_s
        return {
            "every_s": PERIOD_S,
            "messages_per_s": round(sum(map(self._rate, topics)), 1),
            "log": {
                "bytes": store.end - store.first,
                "segments": len(store.segments()),
                "bytes_per_s": bytes_per_s,
                "flushes_per_s": flushes_per_s,
                "needed_from": self._retention.free.below,
                "held_by": self._retention.free.held_by,
                "uncatalogued": self._catalogues.uncatalogued,
                "backed_up_at": state.backed_up_at or None,
            },
            "flush": self.flushes(),
            "topics": [self._topic(topic) for topic in nlargest(limit, topics, self._rate)],
            "groups": [self._group(group) for group in nlargest(limit, groups, self._rate)],
        }

    def _rate(self, one: Topic | ConsumerGroup) -> float:
        rate = (
            self._topics.get(one.topic_id)
            if isinstance(one, Topic)
            else self._groups.get(one.group_id)
        )
        return 0.0 if rate is None else rate.per_s[0]

    def _topic(self, topic: Topic) -> dict[str, Any]:
        rate = self._topics.get(topic.topic_id)
        messages_per_s, bytes_per_s = (0.0, 0.0) if rate is None else rate.per_s
        messages = sum(topic.end_offsets) - sum(topic.start_offsets)
        view = {
            "topic": topic.name,
            "partitions": len(topic.end_offsets),
            "messages": messages,
            "bytes": sum(topic.partition_bytes),
        }
        return view | {"messages_per_s": messages_per_s, "bytes_per_s": bytes_per_s}

    def _group(self, group: ConsumerGroup) -> dict[str, Any]:
        view = group_views.count_messages(self._engine.state, group, self._engine.now())
        return view | {"messages_per_s": self._rate(group)}
