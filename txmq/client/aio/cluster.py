"""The client of several brokers that have topics in common, for programs on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Unpack
from weakref import WeakSet

from txmq.client.aio.client import Client
from txmq.client.aio.closing import AsyncCloseable
from txmq.client.aio.consumer.consumer import Consumers, join_group
from txmq.client.aio.consumer.members import LoopMembers
from txmq.client.aio.core import AioCore, finish
from txmq.client.aio.loop import gather
from txmq.client.aio.readers import Readers
from txmq.client.aio.routed_sends import RoutedSends
from txmq.client.aio.transaction.calls import TransactionCalls
from txmq.client.aio.transaction.checkers import Checker
from txmq.client.aio.typed import TypedTopicCalls
from txmq.client.log import get_logger
from txmq.client.protocol.address import Addresses
from txmq.client.protocol.awaited.cluster_calls import (
    ClusterCalls,
    OneBrokerCalls,
    wait_answer,
)
from txmq.client.protocol.awaited.plans import ReplayPlan
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import Found, ReaderStart
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.brokers import Brokers
from txmq.client.protocol.sender.routing import Routing, of_one_broker
from txmq.client.protocol.sender.rows import Fields, check_columns, checked_messages
from txmq.client.protocol.settings import ClientSettings
from txmq.client.protocol.transaction.half_message import HalfMessage
from txmq.client.protocol.transaction.options import CHECK_AFTER_S
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import TxmqError
from txmq.model.durations import Duration
from txmq.model.message import Message, Receipt

log = get_logger()


class Cluster(
    RoutedSends,
    TransactionCalls,
    TypedTopicCalls,
    ClusterCalls[Client],
    OneBrokerCalls,
    AsyncCloseable,
):
    """A client of several brokers, for the event loop that uses it first.

    `txmq.aio.connect` makes it from a sequence of URLs. Each broker has a log of its
    own. The partitions of a topic are numbered through, those of the first broker
    first, and a key always has the same partition. Messages without a key go to a
    broker that is there. Receipts and messages have the number that the partition has
    at its broker.

    A log that operators add to those of the URLs is found while the client runs: it
    gets messages without a key, and keys of topics that are made later, and consumers
    read it, too.

    The calls are those of Client. Some concern one broker only and raise
    LocalProtocolError here; `clients` has the client of each broker for them, in the
    order of the URLs, and then of those that were found.
    """

    _cores: Sequence[AioCore]
    _routing: Routing

    def __init__(
        self,
        urls: Sequence[str],
        settings: ClientSettings,
        partition_map: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._route_by(urls, settings, partition_map)
        self._failover_after = settings.timeout / len(urls)
        self._checkers: dict[str, Checker] = {}
        self._consumers = WeakSet[LoopMembers]()  # live on without the object of their user
        self._readers = WeakSet[Readers]()
        self._closing: asyncio.Task[None] | None = None
        self._beginnings = set[asyncio.Task[None]]()  # at brokers that were found
        self._brokers = self._routing.brokers = Brokers(
            [self._new_core(url) for url in urls], self._new_core, self._found
        )
        self._cores = self._brokers.cores
        self.clients = tuple(map(Client, self._cores))

    def _new_core(self, url: str | Addresses) -> AioCore:
        settings = self._routing.broker_settings
        return AioCore(url, settings, failover_after=self._failover_after)

    def _found(self, broker: int) -> None:
        """Make the client of a broker that was found; wait beside for its answer."""
        self.clients = (*self.clients, Client(self._cores[broker]))
        self._begin(self._begin_at(broker))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._cores[0].loop.create_task(work, name="txmq-log")
        self._beginnings.add(task)
        task.add_done_callback(self._beginnings.discard)

    async def _begin_at(self, broker: int) -> None:
        """Use a broker that was found, once it has answered."""
        await wait_answer(self._cores[broker], broker)
        self._brokers.note_answer(broker)
        for name, checker in self._checkers.items():
            self.clients[broker].register_checker(name, checker)
        for members in self._consumers:
            self._begin(members.join_at(self._cores[broker]))
        for readers in self._readers:
            self._begin(readers.join_at(self._cores[broker]))

    async def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Receipt:
        """Send a message and return its receipt.

        A message without key and partition goes to another broker where one certainly
        did not store it.
        """
        return await self._send_one(
            topic,
            fields.get("key"),
            partition,
            lambda client, number: client.send(topic, body, partition=number, **fields),
        )

    async def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # as of the other faces
        **fields: Unpack[Fields],
    ) -> asyncio.Future[Receipt]:
        """Send a message and return the future of its receipt; see
        `Client.send_async`.

        The broker is chosen by this call: the future fails where that broker does.
        """
        return await self._send_one(
            topic,
            fields.get("key"),
            partition,
            lambda client, number: client.send_async(
                topic, body, partition=number, timeout=timeout, **fields
            ),
        )

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message without a receipt; see `Client.send_one_way`."""

        async def send() -> None:
            try:
                broker, number = await self._route(topic, fields.get("key"), partition)
                self.clients[broker].send_one_way(topic, body, partition=number, **fields)
            except TxmqError as error:
                log.warning("send.dropped", topic=topic, error=error.message)

        self._cores[0].connection()
        self._cores[0].start(send())

    async def half(
        self,
        topic: str,
        body: bytes,
        *,
        checker: str,
        partition: int | None = None,
        check_after: Duration = CHECK_AFTER_S,
        **fields: Unpack[Fields],
    ) -> HalfMessage[Awaitable[bool]]:
        """Store a half message at the broker of its key; see `Client.half`.

        That broker asks the checker.
        """
        broker, number = await self._route(topic, fields.get("key"), partition)
        return await self.clients[broker].half(
            topic, body, checker=checker, partition=number, check_after=check_after, **fields
        )

    async def half_async(
        self,
        topic: str,
        body: bytes,
        *,
        checker: str,
        partition: int | None = None,
        check_after: Duration = CHECK_AFTER_S,
        timeout: Duration | None = None,  # noqa: ASYNC109  # as of the other faces
        **fields: Unpack[Fields],
    ) -> asyncio.Future[HalfMessage[Awaitable[bool]]]:
        """Store a half message and return the future of it; see `Client.half_async`.

        The broker is chosen by this call, and that broker asks the checker.
        """
        broker, number = await self._route(topic, fields.get("key"), partition)
        return await self.clients[broker].half_async(
            topic,
            body,
            checker=checker,
            partition=number,
            check_after=check_after,
            timeout=timeout,
            **fields,
        )

    async def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> list[Receipt]:
        """Send messages and return their receipts in order.

        It is not all or nothing: see `transaction`. The messages without a key go to
        one broker together.
        """
        return await self._send_listed(topic, checked_messages(messages), partition)

    async def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> list[StoredBatch]:
        """Send messages that are given as columns; see `Client.send_many`.

        The messages without a key go to one broker together.
        """
        check_columns(bodies, keys, tags)
        return await self._send_columns(topic, (bodies, keys, tags), partition)

    async def flush(self, timeout: Duration | None = None) -> None:  # noqa: ASYNC109  # as of the other faces
        """Wait until each message has its receipt or has failed.

        Raises RequestTimeout.
        """
        _raise_first(await gather(client.flush(timeout) for client in self.clients))

    def _home(self) -> AioCore:
        return self._cores[self._any_routes()[0].broker]

    def xa_resource(self, owner: str | None = None) -> NoReturn:
        """Each broker is a resource of its own: `client.xa_resource` of `clients`."""
        raise of_one_broker("xa_resource(…)")

    async def consumer(
        self, group: str, topics: Topics, **options: Unpack[ConsumerOptions]
    ) -> Consumers:
        """Join a consumer group at each broker; see `Client.consumer`.

        A broker that is away is joined when it is back. Raises BrokerUnavailable where
        no broker answers.
        """
        cores = self._brokers.answered
        consumers = await join_group(
            Consumers, cores, group, topics, self._settings.timeout, **options
        )
        members = consumers._members  # noqa: SLF001  # of this face
        self._consumers.add(members)
        for core in self._brokers.answered:
            if core not in cores:  # found meanwhile
                self._begin(members.join_at(core))
        return consumers

    async def reader(
        self,
        name: str,
        topics: Topics,
        offsets: OffsetStore,
        *,
        start: ReaderStart = "first",
    ) -> Readers:
        """Open a reader of the topics at all brokers; see `Client.reader`.

        `offsets` keeps the positions of each broker under the `name` followed by a dot
        and the identity of the broker's log. A log that operators add meanwhile is read
        from its first message on. Raises BrokerUnavailable where a broker is away at
        the beginning.
        """
        readers = Readers(self._brokers, name, topics, offsets, start)
        await readers.open()
        self._readers.add(readers)
        for core in self._brokers.answered:  # one may have been found meanwhile
            self._begin(readers.join_at(core))
        return readers

    def plan(self, name: str, broker: int = 0) -> ReplayPlan:
        """Return a replay plan of one of the brokers, by its number in the URLs: each
        has plans of its own letters.
        """
        return self.clients[broker].plan(name)

    def log_id(self) -> NoReturn:
        """Each broker has a log of its own: `client.log_id` of each of `clients`."""
        raise of_one_broker("log_id()")

    async def read(self, topic: str, partition: int, offset: int, *, wait: Duration = 0.0) -> Found:
        """Read published messages of a partition; see `Client.read`."""
        broker, number = await self._route(topic, None, partition)
        assert number is not None, "a partition was named"
        return await self.clients[broker].read(topic, number, offset, wait=wait)

    def register_checker(self, name: str, checker: Checker) -> None:
        """Let this process decide half transactions of all brokers.

        See `Client.register_checker`.
        """
        self._checkers[name] = checker
        for client in self.clients:
            client.register_checker(name, checker)

    async def close(self) -> None:
        """Close the clients of all brokers, their consumers and readers first."""
        if self._closing is None:
            self._closing = self._cores[0].loop.create_task(self._close(), name="txmq-close")
        await finish(self._closing)

    async def _close(self) -> None:
        for beginning in self._beginnings:
            beginning.cancel()
        await asyncio.gather(*self._beginnings, return_exceptions=True)
        consumers = [members.close() for members in self._consumers]
        ends = await gather([*consumers, *(reader.close() for reader in self._readers)])
        ends += await gather(client.close() for client in self.clients)
        _raise_first(ends)


def _raise_first(ends: Iterable[Exception | None]) -> None:
    for end in ends:
        if end is not None:
            raise end
