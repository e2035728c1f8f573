"""Progress of consumer groups: how many messages have had their effect, and how many
have not.

`unprocessed` is the sum of both places in which a message waits for its effect:

- unsettled: not delivered yet, or in hand (leased, to be delivered again, or acked by
  an undecided transaction);
- failed: retrying, at a consumer, parked behind a fenced key, or a dead letter. An
  abandoned letter is none of them.
"""

from __future__ import annotations

from collections import Counter
from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.state import failed_messages, visibility
from txmq.core.topics import topics
from txmq.model.units import MILLISECOND

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.state import State
    from txmq.core.steps import Steps
    from txmq.model.topic_partition import TopicPartition

# Partitions of each group whose oldest message is read for a list of all groups.
TIMED_PARTITIONS = 16
PARTITIONS_PER_STEP = 64  # between two looks at the clock


class Counts(NamedTuple):
    """Messages of a partition, for one group."""

    unprocessed: int
    unsettled: int


class TopicProgress(NamedTuple):
    """Progress of a group in a topic, `processed` since the start of the broker.

    `age_ms` is the age of the oldest unprocessed message; 0 for topics none of whose
    partitions is among the `TIMED_PARTITIONS`.
    """

    topic: str
    unprocessed: int = 0
    unsettled: int = 0
    processed: int = 0
    age_ms: int = 0

    def plus(self, other: TopicProgress) -> TopicProgress:
        """Return the progress of two groups together."""
        sums = map(int.__add__, self[1:4], other[1:4])
        return TopicProgress._make((self.topic, *sums, max(self.age_ms, other.age_ms)))


def counts(state: State, group: ConsumerGroup, tp: TopicPartition) -> Counts:
    """Return how many messages of a partition have not had their effect."""
    position, failed = group.positions[tp], group.failed.get(tp, 0)
    if state.topics_by_id[tp[0]].deleted:
        return Counts(0, 0)
    unsettled = visibility.visible_end(state, *tp) - position.cursor + position.unsettled
    return Counts(unsettled + failed, unsettled)


def unprocessed(state: State, group: ConsumerGroup) -> int:
    """Return the number of unprocessed messages of all partitions together."""
    return sum(counts(state, group, tp).unprocessed for tp in group.positions)


def deliverable(state: State, group: ConsumerGroup) -> int:
    """Return how many messages a member would get: the unprocessed ones but for dead
    letters, what is parked behind failed messages, and what is in local stores.
    """
    unsettled = sum(counts(state, group, tp).unsettled for tp in group.positions)
    return unsettled + group.retrying.total()


def age_ms(state: State, group: ConsumerGroup, tp: TopicPartition, now: int) -> int:
    """Return the age of the oldest unprocessed message of a partition; 0 = none."""
    found = (oldest_unsettled(state, group, tp), oldest_failed(state, group, tp))
    stored_at = min((at for at in found if at is not None), default=now)
    return max(0, now - stored_at) // MILLISECOND


def oldest_unsettled(state: State, group: ConsumerGroup, tp: TopicPartition) -> int | None:
    """Return the storage time of the oldest message that is neither processed nor
    failed.
    """
    position = group.positions[tp]
    first_ranges = (
        ranges.first() for ranges in (position.leased, position.redeliver, position.reserved)
    )
    offsets = [held.start for held in first_ranges if held is not None]
    if position.cursor < visibility.visible_end(state, *tp):
        offsets.append(position.cursor)
    if not offsets:
        return None
    return next(
        (entry.stored_at for _base, entry in topics.scan_entries(state, tp, min(offsets))), None
    )


def oldest_failed(state: State, group: ConsumerGroup, tp: TopicPartition) -> int | None:
    """Return the storage time of the oldest failed message that is not processed."""
    row = failed_messages.first_unprocessed(state, group, tp) if group.failed[tp] else None
    return None if row is None else row.stored_at


def by_topic(state: State, group: ConsumerGroup, now: int) -> Steps[list[TopicProgress]]:
    """Return the progress of a group in each of its topics, in steps. The state may
    change between them.
    """
    found: dict[TopicPartition, Counts] = {}
    for number, tp in enumerate(list(group.positions)):
        if tp in group.positions:
            found[tp] = counts(state, group, tp)
        if number % PARTITIONS_PER_STEP == PARTITIONS_PER_STEP - 1:
            yield
    ages = Counter[int]()
    for tp in nlargest(TIMED_PARTITIONS, found, lambda one: found[one].unprocessed):
        if tp in group.positions:
            ages[tp[0]] = max(ages[tp[0]], age_ms(state, group, tp, now))
    yield
    of_topics: dict[int, list[Counts]] = {}
    for tp, one in found.items():
        of_topics.setdefault(tp[0], []).append(one)
    return [
        TopicProgress(
            state.topics_by_id[topic_id].name,
            sum(one.unprocessed for one in some),
            sum(one.unsettled for one in some),
            group.processed[topic_id],
            ages[topic_id],
        )
        for topic_id, some in of_topics.items()
    ]
