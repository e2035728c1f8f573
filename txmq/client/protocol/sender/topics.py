"""Which partition a message goes to, by the shape of its topic as last seen, and how it
is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from txmq.batch import PLAIN, Compression
from txmq.client.protocol.sender.rows import Rows, by_partition
from txmq.errors import LocalProtocolError, RemoteProtocolError
from txmq.model.keys import partition_of
from txmq.model.message import check_name

Partitioner = Callable[
    [str, str | None, int], int | None
]  # topic, key, partitions; None = by the key's hash
Describe = Callable[
    [str], dict[str, Any]
]  # a topic's name, made on first use where the broker allows it

MOST = 1 << 32


class Shape(NamedTuple):
    """A topic: how many partitions it has, and which of its shapes this is."""

    name: str
    partitions: int
    epoch: int


def shape_of(topic: str, described: Mapping[str, Any]) -> Shape:
    """A topic as the broker described it. Raises RemoteProtocolError for a description
    that is none.
    """
    try:
        [fields] = described["topics"]
        return Shape(topic, int(fields["partitions"]), int(fields["epoch"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(
            f"a description of topic {topic} that is none: {described!r:.200}"
        ) from error


class Topics:
    """The topics that a client knows, its choice of partitions and its compression. For
    any number of threads.
    """

    def __init__(
        self, describe: Describe, partitioner: Partitioner | None, compression: Compression = PLAIN
    ) -> None:
        self._describe = describe
        self._partitioner = partitioner
        self._shapes: dict[str, Shape] = {}
        self.asks_user = partitioner is not None
        self.compression = compression
        self._turns = count()

    def shape(self, topic: str) -> Shape:
        """The topic as last seen; the first look asks the broker. Raises UnknownTopic
        and what a call raises.
        """
        return self._shapes.get(topic) or self.refresh(topic)

    def refresh(self, topic: str) -> Shape:
        """The topic as it is now."""
        shape = self._shapes[topic] = shape_of(topic, self._describe(check_name(topic, "topic")))
        return shape

    def known(self, topic: str) -> Shape | None:
        """The topic as last seen, if it was."""
        return self._shapes.get(topic)

    def forget(self, topic: str) -> None:
        """The broker no longer has the topic."""
        self._shapes.pop(topic, None)

    def choose(self, shape: Shape, key: str | None, partition: int | None = None) -> int:
        """The partition of one message: the one asked for, the partitioner's, its
        key's, or the next in turn.
        """
        if partition is not None:
            return _checked(partition)
        if self._partitioner is not None:
            chosen = self._partitioner(shape.name, key, shape.partitions)
            if chosen is not None:
                return _checked(chosen, shape.partitions)
        if not key:
            return self.turn(shape)
        try:
            return partition_of(key, shape.partitions)
        except (TypeError, UnicodeEncodeError) as error:
            raise LocalProtocolError(
                f"{key!r:.80} cannot be a key", hint="text that UTF-8 can hold is needed"
            ) from error

    def turn(self, shape: Shape) -> int:
        """The partition whose turn it is."""
        return next(self._turns) % shape.partitions

    def spread(
        self, shape: Shape, rows: Rows, partition: int | None = None
    ) -> dict[int, Sequence[int]]:
        """The places of rows for each partition; those without a key all go to the one
        whose turn it is.
        """
        everything = range(len(rows))
        keys = rows.keys_of()
        if partition is not None:
            return {_checked(partition): everything}
        if self._partitioner is not None:
            return self._asked(shape, keys or [None] * len(rows))
        keyless = self.turn(shape)
        if keys is None or shape.partitions == 1:
            return {keyless: everything}
        return dict(by_partition(keys, shape.partitions, keyless))

    def _asked(self, shape: Shape, keys: Sequence[str | None]) -> dict[int, Sequence[int]]:
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self.choose(shape, key), []).append(place)
        return dict(places)


def _checked(partition: int, partitions: int = MOST) -> int:
    """The number itself, if it can be one of a partition: whether it exists, the broker
    knows best.
    """
    if type(partition) is not int or not 0 <= partition < partitions:
        last = f" to {partitions - 1}" if partitions < MOST else ""
        raise LocalProtocolError(
            f"{partition!r} is no partition", hint=f"a number from 0{last} is needed"
        )
    return partition
