"""Routes of messages to several brokers, for all faces.

The partitions of a topic are numbered across the brokers: those of the first broker,
then those of the second. A message with a key always goes to the partition of its key,
and waits for that broker. This keeps the order of messages while a broker is away, as
long as the partition map does not change. A message without a key goes to any broker
that answers; a broker that failed gets none for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any, NamedTuple, TypeAlias

from txmq.client.log import get_logger
from txmq.client.protocol.sender.batches import NO_RECEIPT
from txmq.client.protocol.settings import ClientSettings, Partitioner
from txmq.errors import ConfigError, LocalProtocolError, RecallTooLate, TxmqError
from txmq.model.keys import partition_of
from txmq.model.message import Receipt, check_name

AVOID_S = 30.0  # RocketMQ avoids a broker that did not answer for as long
Counts: TypeAlias = tuple[int, ...]  # partitions of a topic at each broker
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
        count: Callable[[int, str], int],
        given: Mapping[str, Sequence[int]] | None = None,
        partitioner: Partitioner | None = None,
    ) -> None:
        """`count` asks one broker for its partitions of a topic.

        `given` are the partitions of topics at each broker that need no lookup.
        """
        self._brokers, self._count, self._partitioner = brokers, count, partitioner
        self._counts = {
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
        return checked

    def partition_counts(self, topic: str) -> Counts:
        """Return the partitions at each broker.

        Raises BrokerUnavailable where the lookup needs a broker that is away.
        """
        counts = self._counts.get(topic)
        if counts is None:
            counts = self._counts[topic] = tuple(
                self._count(broker, topic) for broker in range(self._brokers)
            )
        return counts

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
            partition = self._partitioner(topic, key, sum(counts))
        if partition is None:
            if not key:
                return None
            partition = partition_of(key, sum(counts))
        return _broker_partition(counts, partition)


class Routing:
    """The choice of routes. For any number of threads."""

    def __init__(
        self,
        urls: Sequence[str],
        settings: ClientSettings,
        partitions: Callable[[int, str], int],
        given: Mapping[str, Sequence[int]] | None,
    ) -> None:
        """`partitions` asks a broker for its partitions of a topic; `given` needs no
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
        self.map = PartitionMap(len(urls), partitions, given, settings.partitioner)
        # The client of each broker has no partitioner: partitions are chosen here.
        self.broker_settings = replace(settings, partitioner=None)
        self._brokers = len(urls)
        self._turns = count()
        self._avoided: dict[int, float] = {}

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
        """Return all brokers in turn, those to avoid last."""
        first = next(self._turns)
        turn = [(first + step) % self._brokers for step in range(self._brokers)]
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
        for broker, end in enumerate(accumulate(counts)):
            if partition < end:
                return BrokerPartition(broker, partition - end + counts[broker])
    raise LocalProtocolError(
        f"invalid partition {partition!r}", hint=f"use a number from 0 to {sum(counts) - 1}"
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
