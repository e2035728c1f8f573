"""A member's place in its consumer group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from txmq.model.retry import RetryPolicy
from txmq.model.topic_partition import FIRST_EPOCH, PartitionName


class PartitionReset(NamedTuple):
    """The generation that a partition's last reset began, and `steps`: offsets, and the
    epoch from there on. Both rise.
    """

    generation: int
    steps: tuple[tuple[int, int], ...]


class Identities(NamedTuple):
    """The ids of the member's topics and the epochs of its partitions, by which an
    inbox knows messages. `resets` has the partitions that were reset.
    """

    topics: Mapping[str, int]
    resets: Mapping[PartitionName, PartitionReset]

    def epochs_of(self, partition: PartitionName) -> tuple[int, ...]:
        """Return the epochs of a partition, the present one last."""
        reset = self.resets.get(partition)
        steps = () if reset is None else reset.steps
        below = steps[:1] == () or steps[0][0] > 0
        return ((FIRST_EPOCH,) if below else ()) + tuple(epoch for _offset, epoch in steps)

    def epoch_of(self, partition: PartitionName, offset: int) -> int:
        """Return the epoch of a message."""
        reset, epoch = self.resets.get(partition), FIRST_EPOCH
        for start, later in () if reset is None else reset.steps:
            if start <= offset:
                epoch = later
        return epoch

    def reset_generation(self, partition: PartitionName) -> int:
        """Return the generation of the last reset; leases of older ones are over."""
        reset = self.resets.get(partition)
        return 0 if reset is None else reset.generation


class Membership(NamedTuple):
    """A member's place in its group, as the broker last reported it.

    `group` is the name to use in requests: in broadcast mode the member's own,
    `group@member`. `instance` tells this process from others with the same member name.
    `retry`: the group's policy.
    """

    group: str
    member: str
    instance: str
    generation: int
    epoch: int
    assignment: frozenset[PartitionName]
    session_s: float
    lease_s: float
    consume_timeout_s: float
    identities: Identities
    retry: RetryPolicy

    def knows(self, partition: PartitionName, topic_id: int, generation: int) -> bool:
        """Return whether messages that were leased in that generation are still those
        of the partition: it was not reset since, and its topic was not made again.
        """
        topics = self.identities.topics
        return (
            generation >= self.identities.reset_generation(partition)
            and topics.get(partition[0], topic_id) == topic_id
        )

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.session_s, self.lease_s) / 3
