"""Key fences of a group whose heads are settled, by the partition of the last head.

Such a fence goes on, or is lifted, once no lease that is older than it holds messages.
So the fences of a partition are kept by their first lease: those that wait for fewer
leases come first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedList

from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FenceName = tuple[int, int]  # topic id and key hash


class WaitingFences:
    """The fences in state WAITING, without any other of their fields."""

    __slots__ = ("_places", "_queues")

    def __init__(self) -> None:
        self._places: dict[FenceName, tuple[TopicPartition, int]] = {}
        # of each partition, the first lease and the key hash of its fences
        self._queues: dict[TopicPartition, Any] = {}

    def add(self, name: FenceName, partition: int, first_lease: int) -> None:
        """Add a fence, which is not there."""
        tp = TopicPartition(name[0], partition)
        self._places[name] = (tp, first_lease)
        queue = self._queues.get(tp)
        if queue is None:
            queue = self._queues[tp] = SortedList()
        queue.add((first_lease, name[1]))

    def discard(self, name: FenceName) -> None:
        """Take out a fence, if it is there."""
        place = self._places.pop(name, None)
        if place is None:
            return
        tp, first_lease = place
        self._queues[tp].remove((first_lease, name[1]))
        if not self._queues[tp]:
            del self._queues[tp]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[FenceName]:
        return iter(self._places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WaitingFences) and self._places == other._places

    __hash__ = None  # type: ignore[assignment]  # it changes

    @property
    def partitions(self) -> Mapping[TopicPartition, Iterable[tuple[int, int]]]:
        """The first leases and the key hashes of the fences of each partition, in that
        order.
        """
        return self._queues
