"""A client of several brokers that have topics in common, each of them with a log of
its own: see `routing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakSet

from txmq.client.blocking.client import Client
from txmq.client.blocking.concurrently import together
from txmq.client.blocking.consumer.cluster import Consumers
from txmq.client.blocking.core import Core
from txmq.client.blocking.sender.producer import Fields, StoredBatch, checked_messages
from txmq.client.blocking.transaction.checkers import Checker
from txmq.client.protocol.consumer.settings import Options as ConsumerOptions
from txmq.client.protocol.consumer.settings import checked
from txmq.client.protocol.sender.routing import (
    Routing,
    Spread,
    Way,
    in_order,
    may_go_elsewhere,
    picked,
)
from txmq.client.protocol.sender.rows import check_columns
from txmq.client.protocol.settings import Settings
from txmq.errors import TxmqError
from txmq.model.message import Message, Receipt

CLOSE_S = 10.0
T = TypeVar("T")
Send = Callable[[Client, int | None, float], T]  # at a broker, to a partition, in so many seconds


class Cluster:
    """For any number of threads, and for use with `with`. Made by `txmq.connect` with a
    sequence of URLs.

    `clients` are those of the single brokers, in the order of the URLs: transactions
    begin at one of them, and take others in with `tx.at(client)`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        settings: Settings,
        partition_map: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._settings = settings
        self._routing = Routing(urls, settings, self._partitions, partition_map)
        self.clients = tuple(Client(Core(url, self._routing.single)) for url in urls)
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
        """Sends one message and returns once it is stored, within `timeout` seconds.
        `partition` is numbered through.

        Without key and partition, it goes to another broker where one certainly did not
        take it. The receipt has the number that the partition has at its broker.
        """
        fixed = self._routing.fixed(topic, fields.get("key"), partition)
        return self._sent(
            fixed,
            timeout,
            lambda client, number, left: client.send(
                topic, body, partition=number, timeout=left, **fields
            ),
        )

    def _sent(self, fixed: Way | None, timeout: float | None, send: Send[T]) -> T:
        """Sends where it has to be, or else at the first broker that takes it, each of
        which has its share of the time.

        Raises the last refusal; at once where the outcome is unknown.
        """
        patience = self._settings.timeout if timeout is None else timeout
        ways = (
            [fixed]
            if fixed
            else [Way(broker, None) for broker in self._routing.in_turn(time.monotonic())]
        )
        failed: TxmqError | None = None
        for broker, number in ways:
            try:
                return send(self.clients[broker], number, patience / len(ways))
            except TxmqError as error:
                self._avoid(broker, error)
                if not may_go_elsewhere(error):
                    raise
                failed = error
        assert failed is not None, "there is at least one broker"
        raise failed

    def _avoid(self, broker: int, error: BaseException | None) -> None:
        self._routing.avoid(broker, error, time.monotonic())

    def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        **fields: Unpack[Fields],
    ) -> Future[Receipt]:
        """Sends one message without waiting, for the future of its receipt; as the one
        of Client otherwise.

        Where its broker fails, the future does; messages without a key then go
        elsewhere for a while.
        """
        broker, number = self._routing.way(topic, fields.get("key"), partition, time.monotonic())
        future = self.clients[broker].send_async(
            topic, body, partition=number, timeout=timeout, **fields
        )
        future.add_done_callback(
            lambda done: None if done.cancelled() else self._avoid(broker, done.exception())
        )
        return future

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Sends one message and forgets it; as the one of Client."""
        broker, number = self._routing.way(topic, fields.get("key"), partition, time.monotonic())
        self.clients[broker].send_one_way(topic, body, partition=number, **fields)

    def send_batch(
        self,
        topic: str,
        messages: Iterable[Message],
        *,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> list[Receipt]:
        """Sends messages and returns their receipts, in their order, once all are
        stored. It is not all or nothing.

        Those without a key go to one broker together.
        """
        listed = checked_messages(messages)
        spread = self._routing.spread(topic, [message.key for message in listed], partition)
        return in_order(
            self._sent_apart(
                spread,
                timeout,
                lambda mine: partial(_send_batch, topic, [listed[at] for at in mine]),
            )
        )

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> list[StoredBatch]:
        """Sends messages given as columns; as the one of Client, and as
        `send_batch`.
        """
        check_columns(bodies, keys, tags)
        spread = self._routing.spread(topic, keys or [None] * len(bodies), partition)
        columns = (bodies, keys, tags)
        parts = self._sent_apart(
            spread, timeout, lambda mine: partial(_send_many, topic, picked(mine, columns))
        )
        return [batch for _places, batches in parts for batch in batches]

    def _sent_apart(
        self, spread: Spread, timeout: float | None, sending: Callable[[Sequence[int]], Send[T]]
    ) -> list[tuple[Sequence[int], T]]:
        """What each broker says to its rows, with their places. `sending` makes what
        sends the rows at some places.
        """
        done: list[tuple[Sequence[int], T]] = []
        try:
            for fixed, places in spread.items():
                done.append((places, self._sent(fixed, timeout, sending(places))))
        except TxmqError as error:
            if done:  # sent again as a whole, these would be there twice
                error.outcome = "unknown"
            raise
        return done

    def flush(self, timeout: float | None = None) -> None:
        """Returns once everything sent with `send_async` has its receipt, or has
        failed. Raises RequestTimeout.
        """
        together([partial(client.flush, timeout) for client in self.clients])

    def consumer(
        self, group: str, topics: Iterable[str], **options: Unpack[ConsumerOptions]
    ) -> Consumers:
        """Joins a consumer group at each broker; one that is away is joined when it is
        back.

        Raises as `Client.consumer` does; BrokerUnavailable where no broker answers.
        """
        names = topics if isinstance(topics, str) else list(topics)
        consumers = Consumers(
            [client.core for client in self.clients], checked(group, names, **options)
        )
        consumers.join(self._settings.timeout)
        self._consumers.add(consumers)
        return consumers

    def register_checker(self, name: str, checker: Checker) -> None:
        """Lets this process answer for transactions of that checker, at every
        broker.
        """
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


def _send_batch(
    topic: str, messages: list[Message], client: Client, partition: int | None, timeout: float
) -> list[Receipt]:
    return client.send_batch(topic, messages, partition=partition, timeout=timeout)


def _send_many(
    topic: str, columns: Sequence[Any], client: Client, partition: int | None, timeout: float
) -> list[StoredBatch]:
    return client.send_many(topic, *columns, partition=partition, timeout=timeout)
