"""The client of several brokers that have topics in common, for programs on Twisted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack, overload
from weakref import WeakSet

from twisted.internet.defer import Deferred, gatherResults

from txmq.client.blocking.core import core_of
from txmq.client.blocking.transaction.begin import begin, begin_xa
from txmq.client.blocking.transaction.transaction import Transaction as BlockingTransaction
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.letters import DeadLetter, LetterOptions
from txmq.client.protocol.message_search import FoundMessage
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import ReaderStart
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.routing import (
    Routing,
    RowsByRoute,
    SendRoute,
    can_fail_over,
    merge_receipts,
    of_one_broker,
    recall_refusal,
    select_rows,
)
from txmq.client.protocol.sender.rows import Fields, check_columns, checked_messages
from txmq.client.protocol.settings import ClientSettings, no_spool
from txmq.client.protocol.transaction.half_message import HalfMessage
from txmq.client.protocol.transaction.options import CHECK_AFTER_S, TransactionOptions, XaOptions
from txmq.client.twisted.client import Client, Found, log_dropped
from txmq.client.twisted.consumer.consumer import Consumers, join_group
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.plans import ReplayPlan
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
from txmq.errors import TxmqError, UnknownGroup, UnknownTopic
from txmq.model.message import Message, Receipt

if TYPE_CHECKING:  # psycopg2 is for programs that have a database
    from txmq.tx.postgres.session import Connection

T = TypeVar("T")
Work = Coroutine[Deferred[Any], Any, T]
Send = Callable[[Client, int | None], Deferred[T]]  # at a broker, to a partition


class Cluster(AsyncCloseable):
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
        self._reactor, self._settings = reactor, settings
        self._routing = Routing(urls, settings, self._partitions, partition_map)
        failover_after = settings.timeout / len(urls)
        self._cores = tuple(
            TwistedCore(reactor, url, self._routing.broker_settings, failover_after=failover_after)
            for url in urls
        )
        self.clients = tuple(map(Client, self._cores))
        self._consumers = WeakSet[Consumers]()
        self._readers = WeakSet[Readers]()

    def _partitions(self, broker: int, topic: str) -> int:
        """Return the partitions of a topic, which `_look_up` has asked the broker
        for.
        """
        return self._cores[broker].topics.get(topic).partitions

    async def _look_up(self, topics: Iterable[str]) -> None:
        """Ask all brokers for their partitions of topics."""
        for topic in topics:
            for core in self._cores:
                await core.topic(topic)
            self._routing.map.partition_counts(topic)

    async def _look_up_for(
        self, topic: str, keys: Iterable[str | None], partition: int | None
    ) -> None:
        if any(self._routing.map.needs_lookup(topic, key, partition) for key in keys):
            await self._look_up([topic])

    async def _route(self, topic: str, key: str | None, partition: int | None) -> SendRoute:
        await self._look_up_for(topic, [key], partition)
        return self._routing.required_route(topic, key, partition) or self._any_routes()[0]

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Deferred[Receipt]:
        """Send a message, for its receipt.

        A message without key and partition goes to another broker where one certainly
        did not store it.
        """

        async def send() -> Receipt:
            key = fields.get("key")
            await self._look_up_for(topic, [key], partition)
            required = self._routing.required_route(topic, key, partition)
            return await self._send(
                required,
                lambda client, number: client.send(topic, body, partition=number, **fields),
            )

        return _start(send())

    async def _send(self, required: SendRoute | None, send: Send[T]) -> T:
        """Send by the required route, or to the first broker that stores it.

        Each broker has its part of the time-out to be connected in. A connected broker
        may take longer to answer. Raises the last refusal, and at once an error whose
        outcome is unknown.
        """
        routes = [required] if required else self._any_routes()
        refusal: TxmqError | None = None
        for broker, number in routes:
            try:
                connection = self._cores[broker].connection()
                await connection.wait_connected(self._settings.timeout / len(routes))
                return await send(self.clients[broker], number)
            except TxmqError as error:
                self._routing.avoid(broker, error, self._reactor.seconds())
                if not can_fail_over(error):
                    raise
                refusal = error
        assert refusal is not None, "there is at least one broker"
        raise refusal

    def _any_routes(self) -> list[SendRoute]:
        """Return all brokers in turn, those last that are away or to be avoided."""
        turn = self._routing.brokers_in_turn(self._reactor.seconds())
        return [
            SendRoute(broker, None)
            for broker in sorted(turn, key=lambda broker: self._cores[broker].is_disconnected)
        ]

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
        check_after: float = CHECK_AFTER_S,
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
        listed = checked_messages(messages)

        async def send() -> list[Receipt]:
            keys = [message.key for message in listed]
            routes = await self._rows_by_route(topic, keys, partition)
            send_rows = partial(_send_batch, topic, listed)
            return merge_receipts(
                await self._send_by_route(routes, lambda rows: partial(send_rows, rows))
            )

        return _start(send())

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

        async def send() -> list[StoredBatch]:
            routes = await self._rows_by_route(topic, keys or [None] * len(bodies), partition)
            send_rows = partial(_send_many, topic, (bodies, keys, tags))
            parts = await self._send_by_route(routes, lambda rows: partial(send_rows, rows))
            return [batch for _rows, batches in parts for batch in batches]

        return _start(send())

    async def _rows_by_route(
        self, topic: str, keys: Sequence[str | None], partition: int | None
    ) -> RowsByRoute:
        await self._look_up_for(topic, keys, partition)
        return self._routing.rows_by_route(topic, keys, partition)

    async def _send_by_route(
        self, routes: RowsByRoute, send_rows: Callable[[Sequence[int]], Send[T]]
    ) -> list[tuple[Sequence[int], T]]:
        """Return the rows of each route with the answer of their broker."""
        done: list[tuple[Sequence[int], T]] = []
        try:
            for required, rows in routes.items():
                done.append((rows, await self._send(required, send_rows(rows))))
        except TxmqError as error:
            if done:  # sent again as a whole, these would be stored twice
                error.outcome = "unknown"
            raise
        return done

    def flush(self, timeout: float | None = None) -> Deferred[None]:
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
        self, connection: Connection, **options: Unpack[TransactionOptions]
    ) -> ThreadedTransaction[BlockingTransaction]: ...

    def transaction(
        self,
        connection: Connection | None = None,
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
        if connection is None and checker is None:
            return ClusterTransaction(self._cores, self._routing, self._look_up)
        cores = [core_of(core.blocking) for core in self._cores]
        begun = begin(cores[0], connection, checker, options)
        look_up = self._spread(begun)
        return threaded(self._reactor, self._cores[0].threads, begun, look_up)

    def xa(self, *connections: Connection, **options: Unpack[XaOptions]) -> ThreadedXa:
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
        self, group: str, topics: Iterable[str], **options: Unpack[ConsumerOptions]
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
        topics: Iterable[str],
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
        self, topic: str, partition: int, offset: int, *, wait: float = 0.0
    ) -> Deferred[Found]:
        """Read published messages of a partition; see `Client.read`."""

        async def read() -> Found:
            broker, number = await self._route(topic, None, partition)
            assert number is not None, "a partition was named"
            return await self.clients[broker].read(topic, number, offset, wait=wait)

        return _start(read())

    async def letters(
        self,
        group: str,
        *,
        saved: str | None = None,
        bodies: bool = False,
        **selection: Unpack[LetterOptions],
    ) -> AsyncIterator[DeadLetter]:
        """Select the dead letters of a consumer group, one broker after the other.

        See `letters` of the blocking Cluster.
        """
        unknown = list[UnknownGroup | UnknownTopic]()
        for client in self.clients:
            try:
                async for letter in client.letters(group, saved=saved, bodies=bodies, **selection):
                    yield letter
            except (UnknownGroup, UnknownTopic) as error:
                unknown.append(error)
        if len(unknown) == len(self.clients):
            raise unknown[0]

    def plan(self, name: str, broker: int = 0) -> ReplayPlan:
        """Return a replay plan of one of the brokers, by its number in the URLs: each
        has plans of its own letters.
        """
        return self.clients[broker].plan(name)

    async def find(
        self,
        topic: str | None = None,
        *,
        message_id: Receipt | str | None = None,
        key: str | None = None,
        partition: int | None = None,
        offset: int = 0,
        start: datetime | int | None = None,
        end: datetime | int | None = None,
    ) -> AsyncIterator[FoundMessage]:
        """Find the messages that match all arguments, one broker after the other.

        See `find` of the blocking Cluster.
        """
        clients, number = self.clients, None
        if partition is not None and topic is not None:
            broker, number = await self._route(topic, None, partition)
            clients = (self.clients[broker],)
        unknown = list[UnknownTopic]()
        for client in clients:
            try:
                async for found in client.find(
                    topic,
                    message_id=message_id,
                    key=key,
                    partition=number,
                    offset=offset,
                    start=start,
                    end=end,
                ):
                    yield found
            except UnknownTopic as error:
                unknown.append(error)
        if len(unknown) == len(clients):
            raise unknown[0]

    def recall(self, message: Receipt | str) -> Deferred[None]:
        """Take back a message that was sent with a time of delivery.

        See `recall` of the blocking Cluster.
        """

        async def recall() -> None:
            refusals = list[TxmqError]()
            for client in self.clients:
                try:
                    await client.recall(message)
                except TxmqError as error:
                    refusals.append(error)
                else:
                    return
            raise recall_refusal(refusals)

        return _start(recall())

    def register_checker(self, name: str, checker: AnyChecker) -> None:
        """Let this process decide half transactions of all brokers.

        See `Client.register_checker`.
        """
        for client in self.clients:
            client.register_checker(name, checker)

    def log_id(self) -> NoReturn:
        """Each broker has a log of its own: `client.log_id` of each of `clients`."""
        raise of_one_broker("log_id()")

    @property
    def spool(self) -> NoReturn:
        """A cluster has no spool. Raises ConfigError."""
        raise no_spool()

    def call(self, name: str, /, **args: object) -> NoReturn:
        """Control calls concern one broker: `client.call` of one of `clients`."""
        raise of_one_broker(f"call({name!r}, …)")

    def edit_letter(self, letter: DeadLetter, **edit: object) -> NoReturn:
        """A letter is at one broker: `client.edit_letter` of one of `clients`."""
        raise of_one_broker("edit_letter(…)")

    def revert_letter(self, letter: DeadLetter, **edit: object) -> NoReturn:
        """A letter is at one broker: `client.revert_letter` of one of `clients`."""
        raise of_one_broker("revert_letter(…)")

    def close(self) -> Deferred[None]:
        """Close the clients of all brokers, their consumers and readers first."""
        return _start(self._close())

    async def _close(self) -> None:
        await gatherResults([consumers.close() for consumers in self._consumers])
        await gatherResults([readers.close() for readers in self._readers])
        await gatherResults([client.close() for client in self.clients])


def _start(work: Work[T]) -> Deferred[T]:
    return Deferred.fromCoroutine(work)


def _send_batch(
    topic: str,
    messages: Sequence[Message],
    rows: Sequence[int],
    client: Client,
    partition: int | None,
) -> Deferred[list[Receipt]]:
    return client.send_batch(topic, [messages[row] for row in rows], partition=partition)


def _send_many(
    topic: str, columns: Sequence[Any], rows: Sequence[int], client: Client, partition: int | None
) -> Deferred[list[StoredBatch]]:
    bodies, keys, tags = select_rows(rows, columns)
    assert bodies is not None, "bodies are no optional column"
    return client.send_many(topic, bodies, keys, tags, partition=partition)
