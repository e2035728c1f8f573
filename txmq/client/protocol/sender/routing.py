"""Routes of messages to several brokers, for all faces.

The partitions of a topic are numbered across the brokers: those of the first broker,
then those of the second. A message with a key always goes to the partition of its key,
and waits for that broker. This keeps the order of messages while a broker is away, as
long as the partition map does not change. A message without a key goes to any broker
that answers; a broker that failed gets none for a while.

A broker that is added gets messages without a key, and keys of topics that are made
later: a topic keeps the brokers that had its keys at first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from txmq.client.log import get_logger
from txmq.client.protocol.sender.batches import NO_RECEIPT
from txmq.client.protocol.sender.brokers import Brokers
from txmq.client.protocol.sender.topics import TopicMetadata
from txmq.client.protocol.settings import ClientSettings, Partitioner
from txmq.errors import ConfigError, LocalProtocolError, RecallTooLate, TxmqError
from txmq.model.keys import partition_of
from txmq.model.message import Receipt, check_name

AVOID_S = 30.0  # RocketMQ avoids a broker that did not answer for as long
# Partitions of a topic by the index of their broker, in the order of their numbers.
Counts: TypeAlias = Mapping[int, int]
Describe: TypeAlias = Callable[[int, str], Awaitable[TopicMetadata]]  # a broker's topic
log = get_logger()


class BrokerPartition(NamedTuple):
    """A partition: the index of its broker, and its number there."""

    broker: int
    partition: int


class SendRoute(NamedTuple):
    """A broker's index, and the partition there. None leaves the partition to its
    client.
    """

    broker: int
    partition: int | None


# The places of rows by their routes; None is the route of rows that may go anywhere.
RowsByRoute: TypeAlias = dict[SendRoute | None, list[int]]


class PartitionMap:
    """Partitions of topics at each broker, looked up once and then kept for good."""

    def __init__(
        self,
        brokers: int,
        look_up: Callable[[str], Counts],
        given: Mapping[str, Sequence[int]] | None = None,
        partitioner: Partitioner | None = None,
    ) -> None:
        """`look_up` asks the brokers for their partitions of a topic.

        `given` are the partitions of topics at each broker that need no lookup.
        """
        self._brokers, self._look_up, self._partitioner = brokers, look_up, partitioner
        self._counts: dict[str, Counts] = {
            check_name(topic, "topic"): self._checked(counts)
            for topic, counts in (given or {}).items()
        }

    def _checked(self, counts: Sequence[int]) -> Counts:
        checked = tuple(counts)
        valid = (
            len(checked) == self._brokers
            and all(type(n) is int and n >= 0 for n in checked)
            and sum(checked) > 0
        )
        if not valid:
            hint = (
                f"give the number of partitions at each of {self._brokers} brokers,"
                " at least one of them above 0"
            )
            raise ConfigError("partition_map", f"invalid partitions {checked}", hint=hint)
        return dict(enumerate(checked))

    def keep(self, topic: str, counts: Counts) -> None:
        """Keep the partitions of a topic that was looked up."""
        self._counts.setdefault(topic, counts)

    def partition_counts(self, topic: str) -> Counts:
        """Return the partitions at each broker.

        Raises BrokerUnavailable where the lookup needs a broker that is away.
        """
        if topic not in self._counts:
            self.keep(topic, self._look_up(topic))
        return self._counts[topic]

    def needs_lookup(self, topic: str, key: str | None, partition: int | None = None) -> bool:
        """Return whether `choose` would ask brokers about the topic."""
        free = partition is None and self._partitioner is None and not key
        return not free and topic not in self._counts

    def choose(
        self, topic: str, key: str | None, partition: int | None = None
    ) -> BrokerPartition | None:
        """Return the partition of a message, or None where any will do.

        It is the requested one (numbered across brokers), the partitioner's, or the
        key's. Raises LocalProtocolError for an invalid partition, and the errors of
        `partition_counts`.
        """
        if partition is None and self._partitioner is None and not key:
            return None
        counts = self.partition_counts(topic)
        if partition is None and self._partitioner is not None:
            partition = self._partitioner(topic, key, sum(counts.values()))
        if partition is None:
            if not key:
                return None
            partition = partition_of(key, sum(counts.values()))
        return _broker_partition(counts, partition)


class Routing:
    """The choice of routes. For any number of threads."""

    brokers: Brokers[Any]  # its face gives it

    def __init__(
        self,
        urls: Sequence[str],
        settings: ClientSettings,
        look_up: Callable[[str], Counts],
        given: Mapping[str, Sequence[int]] | None,
    ) -> None:
        """`look_up` asks brokers for their partitions of a topic; `given` needs no
        lookup.

        Raises ConfigError for invalid brokers, settings or partitions.
        """
        if not urls:
            raise ConfigError(
                "url", "no broker is named", hint='use ["txmq://a:7650", "txmq://b:7650"]'
            )
        if settings.log_id is not None:
            raise ConfigError(
                "log_id", "each of several brokers has its own log", hint="leave it out"
            )
        self.map = PartitionMap(len(urls), look_up, given, settings.partitioner)
        # The client of each broker has no partitioner: partitions are chosen here.
        self.broker_settings = replace(settings, partitioner=None)
        self._turns = count()
        self._avoided: dict[int, float] = {}

    async def look_up(self, topic: str, describe: Describe) -> Counts:
        """Keep the partitions of a topic at each broker that has keys of it, and return
        them. `describe` asks a broker.

        The first log's answer comes behind the list by which its topic was numbered.
        Raises BrokerUnavailable where one of these brokers is away.
        """
        while True:
            self.brokers.refresh()
            version = self.brokers.version
            numbered = await describe(self.brokers.first, topic)
            brokers = self.brokers.with_keys_of(numbered.topic_id)
            counts = {broker: (await describe(broker, topic)).partitions for broker in brokers}
            self.brokers.refresh()  # those that were asked may have told of others
            if self.brokers.version == version:
                self.map.keep(topic, counts)
                return counts

    def required_route(
        self, topic: str, key: str | None, partition: int | None = None
    ) -> SendRoute | None:
        """Return the only route of a message, or None where it may go anywhere.

        Raises as `PartitionMap.choose`.
        """
        chosen = self.map.choose(topic, key, partition)
        return None if chosen is None else SendRoute(*chosen)

    def choose_route(
        self, topic: str, key: str | None, partition: int | None, now: float
    ) -> SendRoute:
        """Return the route of a message. Raises as `required_route`."""
        return self.required_route(topic, key, partition) or SendRoute(
            self.brokers_in_turn(now)[0], None
        )

    def rows_by_route(
        self, topic: str, keys: Sequence[str | None], partition: int | None = None
    ) -> RowsByRoute:
        """Return the places of rows by their required routes."""
        places: RowsByRoute = {}
        for place, key in enumerate(keys):
            places.setdefault(self.required_route(topic, key, partition), []).append(place)
        return places

    def brokers_in_turn(self, now: float) -> list[int]:
        """Return all brokers that messages without a key may go to, in turn, those to
        avoid last.
        """
        brokers = self.brokers.for_any
        first = next(self._turns) % len(brokers)
        turn = [*brokers[first:], *brokers[:first]]
        return sorted(turn, key=lambda broker: self._avoided.get(broker, 0.0) > now)

    def avoid(self, broker: int, error: BaseException | None, now: float) -> None:
        """Avoid a broker for a while after a retriable error of a send to it."""
        if isinstance(error, TxmqError) and error.retriable:
            self._avoided[broker] = now + AVOID_S
            log.warning("broker.avoided", broker=broker, error=str(error))


def can_fail_over(error: TxmqError) -> bool:
    """Return whether a failed message can go to another broker.

    It cannot where the first broker may have stored it: stored twice, it would be two
    messages.
    """
    return error.retriable and error.outcome != "unknown"


def select_rows(places: Iterable[int], columns: Iterable[Sequence[Any] | None]) -> list[Any]:
    """Return these rows of each column; an absent column stays None."""
    return [None if column is None else [column[place] for place in places] for column in columns]


def merge_receipts(parts: Sequence[tuple[Sequence[int], list[Receipt]]]) -> list[Receipt]:
    """Return the receipts of messages with several routes, in the order of the
    messages.
    """
    receipts = [NO_RECEIPT] * sum(len(places) for places, _receipts in parts)
    for places, own in parts:
        for place, receipt in zip(places, own, strict=True):
            receipts[place] = receipt
    return receipts


def _broker_partition(counts: Counts, partition: int) -> BrokerPartition:
    if type(partition) is int and partition >= 0:
        left = partition
        for broker, partitions in counts.items():
            if left < partitions:
                return BrokerPartition(broker, left)
            left -= partitions
    last = sum(counts.values()) - 1
    raise LocalProtocolError(
        f"invalid partition {partition!r}", hint=f"use a number from 0 to {last}"
    )


def of_one_broker(call: str) -> LocalProtocolError:
    """Return the error for a call that has no meaning for several brokers."""
    return LocalProtocolError(
        f"{call} concerns one broker, and a cluster has several",
        hint=f"use it on the client of a broker: cluster.clients[0].{call}",
    )


def recall_refusal(refusals: Sequence[TxmqError]) -> TxmqError:
    """Return the error of a recall that every broker refused.

    RecallTooLate says that a broker does not have the message; another error leaves
    that open.
    """
    others = (error for error in refusals if not isinstance(error, RecallTooLate))
    return next(others, refusals[0])
