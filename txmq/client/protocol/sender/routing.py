"""Which of several brokers gets a message: the rules of both faces.

Messages with a key go to the partition that the map of all partitions says, and wait
for its broker; others go to whatever broker answers, and one that failed is left alone
for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from txmq.client.blocking.sender.producer import NO_RECEIPT
from txmq.client.log import get_logger
from txmq.client.protocol.sender.partition_map import PartitionMap
from txmq.client.protocol.settings import Settings
from txmq.errors import ConfigError, TxmqError
from txmq.model.message import Receipt

AVOIDED_S = 30.0  # as RocketMQ leaves a broker alone that did not answer
log = get_logger()


class Way(NamedTuple):
    """The place of a broker among all, and the partition there; None = whichever it
    chooses.
    """

    broker: int
    partition: int | None


Spread: TypeAlias = dict[
    Way | None, list[int]
]  # the places of rows by where they have to go; None = anywhere


class Routing:
    """Where messages go. For any number of threads."""

    def __init__(
        self,
        urls: Sequence[str],
        settings: Settings,
        partitions: Callable[[int, str], int],
        given: Mapping[str, Sequence[int]] | None,
    ) -> None:
        """`partitions`: those of a topic at one broker, to be asked for; `given`: those
        that are known beforehand.

        Raises ConfigError for brokers, settings or a map that cannot be meant.
        """
        if not urls:
            raise ConfigError(
                "url", "no broker is named", hint='["txmq://a:7650", "txmq://b:7650"]'
            )
        if settings.log_id is not None:
            raise ConfigError("log_id", "each broker has its own", hint="leave it out")
        self.map = PartitionMap(len(urls), partitions, given, settings.partitioner)
        self.single = replace(
            settings, partitioner=None
        )  # of a client of one: partitions are chosen here
        self._brokers = len(urls)
        self._turns = count()
        self._avoided: dict[int, float] = {}

    def fixed(self, topic: str, key: str | None, partition: int | None = None) -> Way | None:
        """Where the message has to go; None = anywhere. Raises as `PartitionMap.chosen`
        does.
        """
        slot = self.map.chosen(topic, key, partition)
        return None if slot is None else Way(*slot)

    def way(self, topic: str, key: str | None, partition: int | None, now: float) -> Way:
        """Where the message goes. Raises as `fixed` does."""
        return self.fixed(topic, key, partition) or Way(self.in_turn(now)[0], None)

    def spread(
        self, topic: str, keys: Sequence[str | None], partition: int | None = None
    ) -> Spread:
        """Where rows have to go, and which: those that may go anywhere all together."""
        places: Spread = {}
        for place, key in enumerate(keys):
            places.setdefault(self.fixed(topic, key, partition), []).append(place)
        return places

    def in_turn(self, now: float) -> list[int]:
        """All brokers in turn, those last that are to be left alone."""
        first = next(self._turns)
        turn = [(first + step) % self._brokers for step in range(self._brokers)]
        return sorted(turn, key=lambda broker: self._avoided.get(broker, 0.0) > now)

    def avoid(self, broker: int, error: BaseException | None, now: float) -> None:
        """Leaves the broker alone for a while, if this error, of a send there, is a
        reason to.
        """
        if isinstance(error, TxmqError) and error.retriable:
            self._avoided[broker] = now + AVOIDED_S
            log.warning("broker.avoided", broker=broker, error=str(error))


def may_go_elsewhere(error: TxmqError) -> bool:
    """Whether a message that was not taken can be sent at another broker: stored twice
    it would be two messages.
    """
    return error.retriable and error.outcome != "unknown"


def picked(places: Iterable[int], columns: Iterable[Sequence[Any] | None]) -> list[Any]:
    """These rows of each column that there is."""
    return [None if column is None else [column[place] for place in places] for column in columns]


def in_order(parts: Sequence[tuple[Sequence[int], list[Receipt]]]) -> list[Receipt]:
    """The receipts of messages that went several ways, by their places among all."""
    receipts = [NO_RECEIPT] * sum(len(places) for places, _receipts in parts)
    for places, mine in parts:
        for place, receipt in zip(places, mine, strict=True):
            receipts[place] = receipt
    return receipts
