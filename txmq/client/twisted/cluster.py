"""A client of several brokers with Twisted, each of them with a log of its own: see
`routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack
from weakref import WeakSet

from twisted.internet.defer import Deferred, gatherResults

from txmq.client.blocking.sender.producer import Fields, StoredBatch, checked_messages
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
from txmq.client.twisted.client import Client, dropped
from txmq.client.twisted.consumer_cluster import Consumers
from txmq.client.twisted.protocols import Closing, Reactor
from txmq.client.twisted.threads import AnyChecker
from txmq.errors import TxmqError
from txmq.model.message import Message, Receipt

T = TypeVar("T")
Work = Coroutine[Deferred[Any], Any, T]
Send = Callable[[Client, int | None], Deferred[T]]  # at a broker, to a partition


class Cluster(Closing):
    """For the reactor's thread. Made by `txmq.twisted.connect` with a sequence of URLs.

    `clients` are those of the single brokers, in the order of the URLs: transactions
    begin at one of them, and take others in with `await tx.at(client)`.
    """

    def __init__(
        self,
        reactor: Reactor,
        urls: Sequence[str],
        settings: Settings,
        partition_map: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._reactor, self._settings = reactor, settings
        self._routing = Routing(urls, settings, self._partitions, partition_map)
        share = settings.timeout / len(urls)
        self.clients = tuple(
            Client(reactor, url, self._routing.single, elsewhere_after=share) for url in urls
        )
        self._consumers = WeakSet[Consumers]()

    def _partitions(self, broker: int, topic: str) -> int:
        """Of a topic that its broker was asked about: see `_learned`."""
        return self.clients[broker].core.topics.shape(topic).partitions

    async def _learned(self, topic: str, keys: Iterable[str | None], partition: int | None) -> None:
        """Asks all brokers for their partitions of the topic, if that matters and is
        not known.
        """
        if any(self._routing.map.has_to_ask(topic, key, partition) for key in keys):
            for client in self.clients:
                await client.core.shape(topic)

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Deferred[Receipt]:
        """Sends one message. `partition` is numbered through; the receipt has the
        number that it has at its broker.

        Without key and partition, it goes to another broker where one certainly did not
        take it.
        """

        async def sent() -> Receipt:
            key = fields.get("key")
            await self._learned(topic, [key], partition)
            fixed = self._routing.fixed(topic, key, partition)
            return await self._sent(
                fixed, lambda client, number: client.send(topic, body, partition=number, **fields)
            )

        return _begun(sent())

    async def _sent(self, fixed: Way | None, send: Send[T]) -> T:
        """Sends where it has to be, or else at the first broker that takes it.

        Each has its share of the time-out to be connected in: what is put in is sent,
        however long that takes. Raises the last refusal; at once where the outcome is
        unknown.
        """
        ways = [fixed] if fixed else self._anywhere()
        failed: TxmqError | None = None
        for broker, number in ways:
            client = self.clients[broker]
            try:
                await client.core.connected().link(self._settings.timeout / len(ways))
                return await send(client, number)
            except TxmqError as error:
                self._routing.avoid(broker, error, self._reactor.seconds())
                if not may_go_elsewhere(error):
                    raise
                failed = error
        assert failed is not None, "there is at least one broker"
        raise failed

    def _anywhere(self) -> list[Way]:
        """All brokers in turn, those last that are away or to be left alone."""
        turn = self._routing.in_turn(self._reactor.seconds())
        return [
            Way(broker, None)
            for broker in sorted(turn, key=lambda broker: self.clients[broker].core.is_away)
        ]

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Sends one message and forgets it; as the one of Client."""

        async def sent() -> None:
            key = fields.get("key")
            await self._learned(topic, [key], partition)
            broker, number = self._routing.fixed(topic, key, partition) or self._anywhere()[0]
            self.clients[broker].send_one_way(topic, body, partition=number, **fields)

        self.clients[0].core.connected()
        _begun(sent()).addErrback(dropped, topic)

    def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> Deferred[list[Receipt]]:
        """Sends messages, for their receipts in their order. It is not all or nothing.

        Those without a key go to one broker together.
        """
        listed = checked_messages(messages)

        async def sent() -> list[Receipt]:
            spread = await self._spread(topic, [message.key for message in listed], partition)
            sending = partial(_send_batch, topic, listed)
            return in_order(await self._sent_apart(spread, lambda mine: partial(sending, mine)))

        return _begun(sent())

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> Deferred[list[StoredBatch]]:
        """Sends messages given as columns; as the one of Client, and as
        `send_batch`.
        """
        check_columns(bodies, keys, tags)

        async def sent() -> list[StoredBatch]:
            spread = await self._spread(topic, keys or [None] * len(bodies), partition)
            sending = partial(_send_many, topic, (bodies, keys, tags))
            parts = await self._sent_apart(spread, lambda mine: partial(sending, mine))
            return [batch for _places, batches in parts for batch in batches]

        return _begun(sent())

    async def _spread(
        self, topic: str, keys: Sequence[str | None], partition: int | None
    ) -> Spread:
        await self._learned(topic, keys, partition)
        return self._routing.spread(topic, keys, partition)

    async def _sent_apart(
        self, spread: Spread, sending: Callable[[Sequence[int]], Send[T]]
    ) -> list[tuple[Sequence[int], T]]:
        """What each broker says to its rows, with their places. `sending` makes what
        sends the rows at some places.
        """
        done: list[tuple[Sequence[int], T]] = []
        try:
            for fixed, places in spread.items():
                done.append((places, await self._sent(fixed, sending(places))))
        except TxmqError as error:
            if done:  # sent again as a whole, these would be there twice
                error.outcome = "unknown"
            raise
        return done

    def flush(self, timeout: float | None = None) -> Deferred[None]:
        """Fires once everything sent has its receipt, or has failed. Fails with
        RequestTimeout.
        """
        flushes = gatherResults(
            [client.flush(timeout) for client in self.clients], consumeErrors=True
        )
        return flushes.addCallbacks(lambda _all: None, lambda failure: failure.value.subFailure)

    def consumer(
        self, group: str, topics: Iterable[str], **options: Unpack[ConsumerOptions]
    ) -> Deferred[Consumers]:
        """Joins a consumer group at each broker; one that is away is joined when it is
        back.

        Fails as `Client.consumer` does; with BrokerUnavailable where no broker answers.
        """
        names = topics if isinstance(topics, str) else list(topics)
        consumers = Consumers(
            [client.core for client in self.clients], checked(group, names, **options)
        )
        self._consumers.add(consumers)
        return _begun(consumers.joined(self._settings.timeout))

    def register_checker(self, name: str, checker: AnyChecker) -> None:
        """Lets this process answer for transactions of that checker, at every
        broker.
        """
        for client in self.clients:
            client.register_checker(name, checker)

    def close(self) -> Deferred[None]:
        """Ends all clients, their consumers first."""
        return _begun(self._close())

    async def _close(self) -> None:
        await gatherResults([consumers.close() for consumers in self._consumers])
        await gatherResults([client.close() for client in self.clients])


def _begun(work: Work[T]) -> Deferred[T]:
    return Deferred.fromCoroutine(work)


def _send_batch(
    topic: str,
    messages: Sequence[Message],
    mine: Sequence[int],
    client: Client,
    partition: int | None,
) -> Deferred[list[Receipt]]:
    return client.send_batch(topic, [messages[place] for place in mine], partition=partition)


def _send_many(
    topic: str, columns: Sequence[Any], mine: Sequence[int], client: Client, partition: int | None
) -> Deferred[list[StoredBatch]]:
    return client.send_many(topic, *picked(mine, columns), partition=partition)
