"""Metrics of topics and consumer groups: one series for each topic and group.

The names with `consumergroup` have the shape of those that dashboards for Kafka know
(kafka_exporter), summed over partitions. Members of a broadcast group count for their
group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from txmq.core.consumers import letter_stats, progress
from txmq.core.consumers.group_views import summarize
from txmq.core.consumers.head_of_line import OUTAGE, POISON, Window, window_of
from txmq.core.consumers.progress import TopicProgress
from txmq.core.state import visibility
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.broker.delivery.group_paces import GroupPaces
    from txmq.broker.engine.engine import Engine
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.steps import Steps

MAX_NAMES = 500  # per metric, because Prometheus keeps each series in memory
MAX_PAIRS = 2_000  # of group and topic, or of group and error
MAX_WINDOWS = 2_000  # of partitions, that are looked at
LETTERS_S = 30.0  # between two looks at letters and windows, which read tables
GROUP_GAUGES = {
    "unprocessed": "Messages that are not processed: not settled, or failed",
    "unsettled": "Messages that are not delivered, or in hand",
    "leased": "Messages leased to members",
    "retrying": "Failed messages that wait for a retry",
    "parked": "Messages parked behind the fence of their key",
    "fences": "Keys with a fence",
    "letters": "Open dead letters",
    "at_consumers": "Failed messages in local stores of consumers",
    "store_attempts": "Failed attempts of the messages in local stores of consumers",
    "stores": "Local stores of consumers that have messages",
    "stores_lost": "Local stores of consumers that have messages, and no owner",
    "floods": "Times that the group's circuit breaker opened: many keys failed with one error",
    "expired": "Messages that expired before their delivery",
    "filtered": "Messages that members passed over, by tags or selector",
    "members": "Members of the group",
}
HEADS = {  # what windows of partitions tell, and what else is counted with them
    "poison_partitions": "Partitions whose head is poison: most of what follows is processed",
    "outage_partitions": "Partitions most of whose window is unprocessed: an outage",
    "standing_unprocessed": "Unprocessed messages of windows that stand",
    "standing_processed": "Messages of windows that stand and were processed behind the head",
    "letters_until_exported": "Open dead letters that a group keeps until an export has them",
}


class GroupMetrics(Collector):
    """Metrics of topics and groups. What takes long is read by `sample`, in steps."""

    def __init__(self, engine: Engine, paces: GroupPaces | None = None) -> None:
        self._engine, self._paces = engine, paces
        self._messages: dict[str, int] = {}  # published, by topic
        self._views: list[dict[str, Any]] = []
        self._progress: dict[str, dict[str, TopicProgress]] = {}  # by group and topic
        self._letters: dict[tuple[str, str], int] = {}  # by group and type of error
        self._letters_at = 0
        self._heads: dict[str, Counter[str]] = {}  # by name of HEADS and group

    def sample(self) -> Steps[None]:
        """Read what takes long."""
        self._messages = yield from self._published()
        views: list[dict[str, Any]] = []
        found_topics: dict[str, dict[str, TopicProgress]] = {}
        groups = list(self._engine.state.groups.by_id.values())
        for group in groups:
            now = self._engine.now()
            found = yield from progress.by_topic(self._engine.state, group, now)
            views.append((yield from summarize(self._engine.state, group, now, found)))
            topics = found_topics.setdefault(_name(group.name), {})
            for one in found:
                topics[one.topic] = one.plus(topics.get(one.topic, TopicProgress(one.topic)))
        self._views = sorted(views, key=lambda view: str(view["group"]))
        self._progress = found_topics
        if self._engine.now() - self._letters_at >= LETTERS_S * SECOND:
            self._letters = yield from self._letters_by_error(groups)
            self._heads = yield from self._heads_of(groups)
            self._letters_at = self._engine.now()

    def _published(self) -> Steps[dict[str, int]]:
        state = self._engine.state
        messages: dict[str, int] = {}
        for name, topic in list(islice(state.topics.items(), MAX_NAMES)):
            messages[name] = 0
            for number in range(len(topic.end_offsets)):
                messages[name] += visibility.visible_end(state, topic.topic_id, number)
                if number % 64 == 63:
                    yield
            yield
        return messages

    def _letters_by_error(
        self, groups: Iterable[ConsumerGroup]
    ) -> Steps[dict[tuple[str, str], int]]:
        counts = Counter[tuple[str, str]]()
        for group in groups:
            if group.letters and group.group_id in self._engine.state.groups.by_id:
                errors = yield from letter_stats.open_by_error(self._engine.state, group)
                for error, letters in errors.items():
                    counts[_name(group.name), error] += letters
        return dict(counts.most_common(MAX_PAIRS))

    def _heads_of(self, groups: Iterable[ConsumerGroup]) -> Steps[dict[str, Counter[str]]]:
        """Return what the windows of partitions tell of each group, twice a minute: it
        reads failed messages.
        """
        found = {name: Counter[str]() for name in HEADS}
        state, left = self._engine.state, MAX_WINDOWS
        for group in groups:
            name = _name(group.name)
            for counts in found.values():
                counts[name] += 0
            if group.settings.keep_until_exported:
                found["letters_until_exported"][name] += group.letters - group.exported_letters
            for number, tp in enumerate(list(group.positions)):
                if tp not in group.positions or group.deleted or not left:
                    break
                if group.positions[tp].unsettled or group.retrying[tp]:
                    left -= 1
                    _add_window(found, name, window_of(state, group, tp, self._engine.now()))
                    yield
                elif number % 64 == 63:
                    yield
        return found

    def collect(self) -> Iterator[Metric]:
        yield from self._topics()
        yield from self._groups()
        yield from self._consumer_groups()
        letters = GaugeMetricFamily(
            "txmq_dead_letters",
            "Open dead letters by the type of their error, counted twice a minute",
            labels=("consumergroup", "error"),
        )
        for labels, number in self._letters.items():
            letters.add_metric(labels, number)
        yield letters
        yield self._sent_bytes()
        for field, meaning in HEADS.items():
            yield _by_group(f"txmq_group_{field}", meaning, self._heads.get(field, Counter()))

    def _topics(self) -> Iterator[Metric]:
        topics = self._engine.state.topics
        yield GaugeMetricFamily("txmq_topics", "Topics", len(topics))
        messages = CounterMetricFamily(
            "txmq_topic_messages", "Messages published", labels=("topic",)
        )
        partitions = GaugeMetricFamily("txmq_topic_partitions", "Partitions", labels=("topic",))
        kept = GaugeMetricFamily(
            "txmq_topic_bytes", "Bytes of messages that are retained", labels=("topic",)
        )
        stored = CounterMetricFamily(
            "txmq_topic_stored_bytes", "Bytes published since the start", labels=("topic",)
        )
        for name, published in self._messages.items():
            topic = topics.get(name)
            if topic is None:  # deleted meanwhile
                continue
            messages.add_metric((name,), published)
            partitions.add_metric((name,), len(topic.end_offsets))
            kept.add_metric((name,), sum(topic.partition_bytes))
            stored.add_metric((name,), topic.published_bytes)
        yield from (messages, partitions, kept, stored)

    def _groups(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "txmq_groups",
            "Consumer groups, members of broadcast groups included",
            len(self._views),
        )
        for field, meaning in GROUP_GAUGES.items():
            values = Counter[str]()
            for view in self._views:
                values[_name(view["group"])] += view[field]
            yield _by_group(f"txmq_group_{field}", meaning, values)
        ages = dict[str, float]()
        for view in self._views:
            name = _name(view["group"])
            ages[name] = max(ages.get(name, 0.0), view["age_ms"] / 1_000)
        yield _by_group(
            "txmq_group_unprocessed_seconds",
            "Age of the oldest message that is not processed",
            ages,
        )
        yield _by_group(
            "txmq_group_oldest_stored_seconds",
            "Time since the first failure of a message in a local store of a consumer",
            self._ages("oldest_stored"),
        )
        yield _by_group(
            "txmq_group_oldest_fence_seconds",
            "Time for which a key has been standing",
            self._ages("oldest_fence"),
        )

    def _ages(self, field: str) -> dict[str, float]:
        """Return the seconds since a time of the views, of groups that have it."""
        now, ages = self._engine.now(), dict[str, float]()
        for view in self._views:
            if view[field] is not None:
                name, age = _name(view["group"]), max(0, now - view[field]) / SECOND
                ages[name] = max(ages.get(name, 0.0), age)
        return ages

    def _sent_bytes(self) -> Metric:
        sent = Counter[str]()
        for group, size in () if self._paces is None else self._paces.sent_bytes().items():
            sent[_name(group)] += size
        family = CounterMetricFamily(
            "txmq_group_sent_bytes",
            "Bytes of messages sent to members since the start, each delivery counted",
            labels=("group",),
        )
        for group, size in sent.most_common(MAX_NAMES):
            family.add_metric((group,), size)
        return family

    def _consumer_groups(self) -> Iterator[Metric]:
        labels = ("consumergroup", "topic")
        lag = GaugeMetricFamily(
            "txmq_consumergroup_lag", "Messages that are not processed", labels=labels
        )
        age = GaugeMetricFamily(
            "txmq_consumergroup_lag_seconds",
            "Age of the oldest message that is not processed",
            labels=labels,
        )
        done = CounterMetricFamily(
            "txmq_consumergroup_messages",
            "Messages processed since the start of the broker",
            labels=labels,
        )
        pairs = (
            (group, one) for group, topics in self._progress.items() for one in topics.values()
        )
        for group, one in islice(pairs, MAX_PAIRS):
            lag.add_metric((group, one.topic), one.unprocessed)
            age.add_metric((group, one.topic), one.age_ms / 1_000)
            done.add_metric((group, one.topic), one.processed)
        yield from (lag, age, done)


def _add_window(found: dict[str, Counter[str]], group: str, window: Window) -> None:
    if not window.standing:
        return
    found["poison_partitions"][group] += window.word == POISON
    found["outage_partitions"][group] += window.word == OUTAGE
    found["standing_unprocessed"][group] += window.unprocessed
    found["standing_processed"][group] += window.processed


def _name(group: str) -> str:
    """Return the name of a group, or that of the group whose broadcast member it is."""
    return group.partition("@")[0]


def _by_group(name: str, meaning: str, values: dict[str, float] | Counter[str]) -> Metric:
    gauge = GaugeMetricFamily(name, meaning, labels=("group",))
    for group, value in list(values.items())[:MAX_NAMES]:
        gauge.add_metric((group,), value)
    return gauge
