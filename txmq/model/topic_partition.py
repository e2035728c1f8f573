"""The identity of a partition inside the broker: ids, where clients use names."""

from __future__ import annotations

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """A partition of a topic, by ids.

    It equals, hashes and serialises as the plain tuple `(topic_id, partition)`: events
    and table rows that come back from the log hold plain tuples.
    """

    topic_id: int
    partition: int


FIRST_EPOCH = 1  # of a group in a partition, until a reset or a restore begins another

PartitionName = tuple[str, int]
"""A partition as clients name it: the topic's name, and the number of the partition."""
