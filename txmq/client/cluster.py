"""A client of several brokers that have topics in common, each of them with a log of its own.

Messages with a key go to the partition that the map of all partitions says, and wait for its broker; others go to
whatever broker answers, and one that failed is left alone for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Self, TypeVar, Unpack
from weakref import WeakSet

from txmq.client.blocking import Client
from txmq.client.checkers import Checker
from txmq.client.consumers import Consumers
from txmq.client.consuming.settings import Options as ConsumerOptions
from txmq.client.consuming.settings import checked
from txmq.client.core import Core
from txmq.client.log import get_logger
from txmq.client.partition_map import PartitionMap, Slot
from txmq.client.producer import NO_RECEIPT, Fields, StoredBatch, checked_messages
from txmq.client.rows import check_columns
from txmq.client.settings import Settings
from txmq.client.together import together
from txmq.errors import ConfigError, TxmqError
from txmq.message import Message, Receipt

AVOIDED_S = 30.0  # as RocketMQ leaves a broker alone that did not answer
CLOSE_S = 10.0
T = TypeVar("T")
log = get_logger()


class Cluster:
    """For any number of threads, and for use with `with`. Made by `txmq.connect` with a sequence of URLs.

    `clients` are those of the single brokers, in the order of the URLs: transactions begin at one of them, and take
    others in with `tx.at(client)`.
    """

    def __init__(
        self, urls: Sequence[str], settings: Settings, partition_map: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        if not urls:
            raise ConfigError("url", "no broker is named", hint='["txmq://a:7650", "txmq://b:7650"]')
        if settings.log_id is not None:
            raise ConfigError("log_id", "each broker has its own", hint="leave it out")
        single = replace(settings, partitioner=None)  # partitions are chosen here
        self.clients = tuple(Client(Core(url, single)) for url in urls)
        self._settings = settings
        self._map = PartitionMap(len(urls), self._partitions, partition_map, settings.partitioner)
        self._turns = count()
        self._avoided: dict[int, float] = {}
        self._consumers = WeakSet[Consumers]()

    def _partitions(self, broker: int, topic: str) -> int:
        return self.clients[broker].core.topics.shape(topic).partitions

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        **fields: Unpack[Fields],
    ) -> Receipt:
        """Sends one message and returns once it is stored, within `timeout` seconds. `partition` is numbered through.

        Without key and partition, it goes to another broker where one certainly did not take it. The receipt has the
        number that the partition has at its broker.
        """
        patience = self._settings.timeout if timeout is None else timeout
        slot = self._map.chosen(topic, fields.get("key"), partition)
        if slot is not None:
            client = self.clients[slot.broker]
            return client.send(topic, body, partition=slot.partition, timeout=patience, **fields)
        share = patience / len(self.clients)
        return self._wherever(lambda client: client.send(topic, body, timeout=share, **fields))

    def _wherever(self, send: Callable[[Client], T]) -> T:
        """Sends at the first broker that takes it. Raises the last refusal; at once where the outcome is unknown."""
        failed: TxmqError | None = None
        for broker in self._in_turn():
            try:
                return send(self.clients[broker])
            except TxmqError as error:
                self._avoid(broker, error)
                if not error.retriable or error.outcome == "unknown":
                    raise
                failed = error
        assert failed is not None, "there is at least one broker"
        raise failed

    def _in_turn(self) -> list[int]:
        """All brokers in turn, those last that are to be left alone."""
        now, brokers = time.monotonic(), len(self.clients)
        first = next(self._turns)
        turn = [(first + step) % brokers for step in range(brokers)]
        return sorted(turn, key=lambda broker: self._avoided.get(broker, 0.0) > now)

    def _avoid(self, broker: int, error: BaseException | None) -> None:
        if isinstance(error, TxmqError) and error.retriable:
            self._avoided[broker] = time.monotonic() + AVOIDED_S
            log.warning("broker.avoided", broker=broker, error=str(error))

    def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        **fields: Unpack[Fields],
    ) -> Future[Receipt]:
        """Sends one message without waiting, for the future of its receipt; as the one of Client otherwise.

        Where its broker fails, the future does; messages without a key then go elsewhere for a while.
        """
        slot = self._map.chosen(topic, fields.get("key"), partition)
        broker, number = slot or (self._in_turn()[0], None)
        future = self.clients[broker].send_async(topic, body, partition=number, timeout=timeout, **fields)
        future.add_done_callback(lambda done: None if done.cancelled() else self._avoid(broker, done.exception()))
        return future

    def send_one_way(self, topic: str, body: bytes, **fields: Unpack[Fields]) -> None:
        """Sends one message and forgets it; as the one of Client."""
        slot = self._map.chosen(topic, fields.get("key"))
        broker, number = slot or (self._in_turn()[0], None)
        self.clients[broker].send_one_way(topic, body, partition=number, **fields)

    def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None, timeout: float | None = None
    ) -> list[Receipt]:
        """Sends messages and returns their receipts, in their order, once all are stored. It is not all or nothing."""
        listed = checked_messages(messages)
        receipts = [NO_RECEIPT] * len(listed)
        for slot, places in self._spread(topic, [message.key for message in listed], partition):
            client, mine = self.clients[slot[0]], [listed[place] for place in places]
            stored = client.send_batch(topic, mine, partition=slot[1], timeout=timeout)
            for place, receipt in zip(places, stored, strict=True):
                receipts[place] = receipt
        return receipts

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[StoredBatch]:
        """Sends messages given as columns; as the one of Client."""
        check_columns(bodies, keys, tags)
        stored = []
        for slot, places in self._spread(topic, keys or [None] * len(bodies), None):
            pick = partial(_picked, places)
            columns = (pick(bodies), None if keys is None else pick(keys), None if tags is None else pick(tags))
            stored += self.clients[slot[0]].send_many(topic, *columns, partition=slot[1], timeout=timeout)
        return stored

    def _spread(
        self, topic: str, keys: Sequence[str | None], partition: int | None
    ) -> Iterator[tuple[tuple[int, int | None], list[int]]]:
        """Where rows go, and which: those that may go anywhere all to one broker, whose turn it is."""
        places: dict[Slot | None, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._map.chosen(topic, key, partition), []).append(place)
        for slot, mine in places.items():
            yield slot or (self._in_turn()[0], None), mine

    def flush(self, timeout: float | None = None) -> None:
        """Returns once everything sent with `send_async` has its receipt, or has failed. Raises RequestTimeout."""
        together([partial(client.flush, timeout) for client in self.clients])

    def consumer(self, group: str, topics: Iterable[str], **options: Unpack[ConsumerOptions]) -> Consumers:
        """Joins a consumer group at each broker; one that is away is joined when it is back.

        Raises as `Client.consumer` does; BrokerUnavailable where no broker answers.
        """
        names = topics if isinstance(topics, str) else list(topics)
        consumers = Consumers([client.core for client in self.clients], checked(group, names, **options))
        consumers.join(self._settings.timeout)
        self._consumers.add(consumers)
        return consumers

    def register_checker(self, name: str, checker: Checker) -> None:
        """Lets this process answer for transactions of that checker, at every broker."""
        for client in self.clients:
            client.register_checker(name, checker)

    def close(self, timeout: float = CLOSE_S) -> None:
        """Ends all clients, their consumers first."""
        together([partial(consumers.close, timeout) for consumers in list(self._consumers)])
        together([partial(client.close, timeout) for client in self.clients])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _picked(places: Iterable[int], column: Sequence[T]) -> list[T]:
    return [column[place] for place in places]
