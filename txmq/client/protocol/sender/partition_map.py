"""Partitions of a topic over several brokers, numbered through: those of the first
broker, then those of the second.

The numbers of a key never change while the map does not, whatever broker is away: that
keeps the order of its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from txmq.client.protocol.sender.topics import Partitioner
from txmq.errors import ConfigError, LocalProtocolError
from txmq.model.keys import partition_of
from txmq.model.message import check_name

Counts = tuple[int, ...]  # partitions of a topic at each broker


class Slot(NamedTuple):
    """A partition: the place of its broker among all, and its number there."""

    broker: int
    partition: int


class PartitionMap:
    """Where keys go. `count` asks one broker for its partitions of a topic; what it
    says is kept for good.
    """

    def __init__(
        self,
        brokers: int,
        count: Callable[[int, str], int],
        given: Mapping[str, Sequence[int]] | None = None,
        partitioner: Partitioner | None = None,
    ) -> None:
        """`given`: partitions at each broker, where they are known beforehand, and may
        never be asked for.
        """
        self._brokers, self._count, self._partitioner = brokers, count, partitioner
        self._counts = {
            check_name(topic, "topic"): self._checked(counts)
            for topic, counts in (given or {}).items()
        }

    def _checked(self, counts: Sequence[int]) -> Counts:
        found = tuple(counts)
        good = (
            len(found) == self._brokers
            and all(type(n) is int and n >= 0 for n in found)
            and sum(found) > 0
        )
        if not good:
            hint = (
                f"a number of partitions for each of {self._brokers} brokers, one of them above 0"
            )
            raise ConfigError(
                "partition_map", f"{found} does not tell how a topic is shared out", hint=hint
            )
        return found

    def counts(self, topic: str) -> Counts:
        """Partitions at each broker. Raises BrokerUnavailable where one has never been
        asked and is away.
        """
        counts = self._counts.get(topic)
        if counts is None:
            counts = self._counts[topic] = tuple(
                self._count(broker, topic) for broker in range(self._brokers)
            )
        return counts

    def has_to_ask(self, topic: str, key: str | None, partition: int | None = None) -> bool:
        """Whether brokers are asked about the topic before the partition of such a
        message can be chosen.
        """
        free = partition is None and self._partitioner is None and not key
        return not free and topic not in self._counts

    def chosen(self, topic: str, key: str | None, partition: int | None = None) -> Slot | None:
        """The partition of a message: asked for (numbered through), the partitioner's,
        or its key's; None = any.

        Raises LocalProtocolError for a partition that is none, and what `counts`
        raises.
        """
        if partition is None and self._partitioner is None and not key:
            return None
        counts = self.counts(topic)
        if partition is None and self._partitioner is not None:
            partition = self._partitioner(topic, key, sum(counts))
        if partition is None:
            if not key:
                return None
            partition = partition_of(key, sum(counts))
        return _slot(counts, partition)


def _slot(counts: Counts, partition: int) -> Slot:
    if type(partition) is int and partition >= 0:
        for broker, end in enumerate(accumulate(counts)):
            if partition < end:
                return Slot(broker, partition - end + counts[broker])
    raise LocalProtocolError(
        f"{partition!r} is no partition", hint=f"a number from 0 to {sum(counts) - 1} is needed"
    )
