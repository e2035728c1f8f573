"""The client of several brokers that have topics in common, for programs on Twisted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload
from weakref import WeakSet

from twisted.internet.defer import Deferred, gatherResults

from txmq.client.blocking.core import core_of
from txmq.client.blocking.transaction.begin import begin, begin_xa
from txmq.client.blocking.transaction.transaction import Transaction as BlockingTransaction
from txmq.client.protocol.awaited.cluster import AwaitedCluster
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import Found, ReaderStart
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.rows import Fields, check_columns, checked_messages
from txmq.client.protocol.settings import ClientSettings
from txmq.client.protocol.transaction.half_message import HalfMessage
from txmq.client.protocol.transaction.options import (
    CHECK_AFTER_S,
    NO_CONNECTION,
    Nobody,
    TransactionOptions,
    XaOptions,
)
from txmq.client.protocol.typed.bodies import Topics
from txmq.client.twisted.client import Client, log_dropped
from txmq.client.twisted.consumer.consumer import Consumers, join_group
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import AsyncCloseable, Reactor
from txmq.client.twisted.reader import Readers, open_reader
from txmq.client.twisted.threaded_transaction import (
    AnyChecker,
    ThreadedHalf,
    ThreadedTransaction,
    ThreadedXa,
    threaded,
)
from txmq.client.twisted.transaction import ClusterTransaction, Transaction
from txmq.client.twisted.typed import TypedTopicCalls
from txmq.model.durations import Duration
from txmq.model.message import Message, Receipt

if TYPE_CHECKING:  # psycopg2 is for programs that have a database
    from txmq.tx.postgres.driver import BlockingConnection

T = TypeVar("T")
Work = Coroutine[Deferred[Any], Any, T]


class Cluster(TypedTopicCalls, AwaitedCluster[Client, TwistedCore], AsyncCloseable):
    """A client of several brokers, for the reactor's thread.

    `txmq.twisted.connect` makes it from a sequence of URLs. Each broker has a log of
    its own. The partitions of a topic are numbered through, those of the first broker
    first, and a key always has the same partition. Messages without a key go to a
    broker that is there. Receipts and messages have the number that the partition has
    at its broker.

    The calls are those of Client. Some concern one broker only and raise
    LocalProtocolError here; `clients` has the client of each broker for them, in the
    order of the URLs.
    """

    def __init__(
        self,
        reactor: Reactor,
        urls: Sequence[str],
        settings: ClientSettings,
        partition_map: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._reactor = reactor
        self._route_by(urls, settings, partition_map)
        failover_after = settings.timeout / len(urls)
        self._cores = tuple(
            TwistedCore(reactor, url, self._routing.broker_settings, failover_after=failover_after)
            for url in urls
        )
        self.clients = tuple(map(Client, self._cores))
        self._consumers = WeakSet[Consumers]()
        self._readers = WeakSet[Readers]()

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Deferred[Receipt]:
        """Send a message, for its receipt.

        A message without key and partition goes to another broker where one certainly
        did not store it.
        """
        return _start(
            self._send_one(
                topic,
                fields.get("key"),
                partition,
                lambda client, number: client.send(topic, body, partition=number, **fields),
            )
        )

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message without a receipt; see `Client.send_one_way`."""

        async def send() -> None:
            broker, number = await self._route(topic, fields.get("key"), partition)
            self.clients[broker].send_one_way(topic, body, partition=number, **fields)

        self._cores[0].connection()
        _start(send()).addErrback(log_dropped, topic)

    def half(
        self,
        topic: str,
        body: bytes,
        *,
        checker: str,
        partition: int | None = None,
        check_after: Duration = CHECK_AFTER_S,
        **fields: Unpack[Fields],
    ) -> Deferred[HalfMessage[Deferred[bool]]]:
        """Store a half message at the broker of its key; see `Client.half`.

        That broker asks the checker.
        """

        async def store() -> HalfMessage[Deferred[bool]]:
            broker, number = await self._route(topic, fields.get("key"), partition)
            return await self.clients[broker].half(
                topic,
                body,
                checker=checker,
                partition=number,
                check_after=check_after,
                **fields,
            )

        return _start(store())

    def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> Deferred[list[Receipt]]:
        """Send messages, for their receipts in order.

        It is not all or nothing: see `transaction`. The messages without a key go to
        one broker together.
        """
        return _start(self._send_listed(topic, checked_messages(messages), partition))

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> Deferred[list[StoredBatch]]:
        """Send messages that are given as columns; see `Client.send_many`.

        The messages without a key go to one broker together.
        """
        check_columns(bodies, keys, tags)

        return _start(self._send_columns(topic, (bodies, keys, tags), partition))

    def flush(self, timeout: Duration | None = None) -> Deferred[None]:
        """Wait until each message has its receipt or has failed.

        Fails with RequestTimeout.
        """
        flushes = gatherResults(
            [client.flush(timeout) for client in self.clients], consumeErrors=True
        )
        return flushes.addCallbacks(lambda _all: None, lambda failure: failure.value.subFailure)

    @overload
    def transaction(self) -> Transaction: ...

    @overload
    def transaction(
        self, *, checker: str, **options: Unpack[TransactionOptions]
    ) -> ThreadedHalf: ...

    @overload
    def transaction(
        self, connection: BlockingConnection, **options: Unpack[TransactionOptions]
    ) -> ThreadedTransaction[BlockingTransaction]: ...

    def transaction(
        self,
        connection: BlockingConnection | Nobody = NO_CONNECTION,
        *,
        checker: str | None = None,
        **options: Unpack[TransactionOptions],
    ) -> Transaction | ThreadedTransaction[Any]:
        """Return an `async with` block whose sends and acks take effect together.

        At the end of the block each message goes to the broker of its key or partition,
        each ack to the broker that delivered the message. Messages without a key go to
        a broker that the transaction uses anyway.

        With a psycopg2 `connection` there may be several brokers, and one COMMIT
        decides for all. Without it one broker decides: the block raises
        LocalProtocolError where its messages and acks belong to several brokers. The
        rest is as for `Client.transaction`.
        """
        if connection is NO_CONNECTION and checker is None:
            return ClusterTransaction(self._cores, self._routing, self._look_up)
        cores = [core_of(core.blocking) for core in self._cores]
        begun = begin(cores[0], connection, checker, options)
        look_up = self._spread(begun)
        return threaded(self._reactor, self._cores[0].threads, begun, look_up)

    def xa(self, *connections: BlockingConnection, **options: Unpack[XaOptions]) -> ThreadedXa:
        """Return an `async with` block over several databases, committed in two phases.

        Messages and acks go to their brokers as in `transaction`. One broker, which has
        to be there, decides in its log. The rest is as for `Client.xa`.
        """
        home = self._cores[self._any_routes()[0].broker]
        begun = begin_xa(core_of(home.blocking), connections, options)
        return ThreadedXa(self._reactor, self._cores[0].threads, begun, self._spread(begun))

    def _spread(self, transaction: BlockingTransaction) -> Callable[[], Work[None]]:
        """Route the messages of a transaction, and return the lookup that goes
        before.
        """
        cores = [core_of(core.blocking) for core in self._cores]
        unrouted = transaction._spread(cores, self._routing)  # noqa: SLF001  # not the user's

        async def look_up() -> None:
            await self._look_up(unrouted.topics_to_look_up)

        return look_up

    def consumer(
        self, group: str, topics: Topics, **options: Unpack[ConsumerOptions]
    ) -> Deferred[Consumers]:
        """Join a consumer group at each broker; see `Client.consumer`.

        A broker that is away is joined when it is back. Fails with BrokerUnavailable
        where no broker answers.
        """
        consumers, joined = join_group(
            Consumers, self._cores, group, topics, self._settings.timeout, **options
        )
        self._consumers.add(consumers)
        return joined

    def reader(
        self,
        name: str,
        topics: Topics,
        offsets: OffsetStore,
        *,
        start: ReaderStart = "first",
    ) -> Deferred[Readers]:
        """Open a reader of the topics at all brokers; see `Client.reader`.

        `offsets` keeps the positions of each broker under the `name` followed by a dot
        and the identity of the broker's log. Fails with BrokerUnavailable where a
        broker is away at the beginning.
        """
        names = topics if isinstance(topics, str) else list(topics)
        readers = Readers(self._cores, name, names, offsets, start)
        self._readers.add(readers)
        return open_reader(readers)

    def read(
        self, topic: str, partition: int, offset: int, *, wait: Duration = 0.0
    ) -> Deferred[Found]:
        """Read published messages of a partition; see `Client.read`."""

        async def read() -> Found:
            broker, number = await self._route(topic, None, partition)
            assert number is not None, "a partition was named"
            return await self.clients[broker].read(topic, number, offset, wait=wait)

        return _start(read())

    def recall(self, message: Receipt | str) -> Deferred[None]:  # type: ignore[override]  # begins at once
        """Take back a message that was sent with a time of delivery.

        See `recall` of the blocking Cluster.
        """
        return _start(super().recall(message))

    def register_checker(self, name: str, checker: AnyChecker) -> None:
        """Let this process decide half transactions of all brokers.

        See `Client.register_checker`.
        """
        for client in self.clients:
            client.register_checker(name, checker)

    def close(self) -> Deferred[None]:
        """Close the clients of all brokers, their consumers and readers first."""
        return _start(self._close())

    async def _close(self) -> None:
        await gatherResults([consumers.close() for consumers in self._consumers])
        await gatherResults([readers.close() for readers in self._readers])
        await gatherResults([client.close() for client in self.clients])


def _start(work: Work[T]) -> Deferred[T]:
    return Deferred.fromCoroutine(work)
