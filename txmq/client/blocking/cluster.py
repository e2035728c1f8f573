"""The blocking client of several brokers that have topics in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields as fields_of
from functools import partial
from threading import Thread
from typing import Any, NoReturn, Self, TypeVar, Unpack
from uuid import UUID
from weakref import WeakSet

from txmq.client.blocking.after_fork import tell_after_fork
from txmq.client.blocking.at_once import ClientAtOnce, CoreAtOnce
from txmq.client.blocking.client import Client
from txmq.client.blocking.concurrently import run_concurrently
from txmq.client.blocking.consumer.consumer import Consumers, consume_cluster
from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.plans import ReplayPlan
from txmq.client.blocking.reader import Readers, open_reader
from txmq.client.blocking.transaction.calls import TransactionCalls
from txmq.client.blocking.transaction.checkers import Checker
from txmq.client.blocking.typed import TypedTopicCalls
from txmq.client.protocol.address import Addresses
from txmq.client.protocol.awaited.cluster_calls import (
    ClusterCalls,
    OneBrokerCalls,
    wait_answer,
)
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import Found, ReaderStart
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.brokers import Brokers
from txmq.client.protocol.sender.multi_send import SenderStats
from txmq.client.protocol.sender.routing import (
    Counts,
    Routing,
    RowsByRoute,
    SendRoute,
    can_fail_over,
    merge_receipts,
    of_one_broker,
    select_rows,
)
from txmq.client.protocol.sender.rows import Fields, check_columns, checked_messages
from txmq.client.protocol.sender.topics import TopicMetadata
from txmq.client.protocol.settings import CLOSE_S, ClientSettings
from txmq.client.protocol.transaction.half_message import HalfMessage
from txmq.client.protocol.transaction.options import CHECK_AFTER_S
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import ClientClosed, TxmqError
from txmq.faces import blocking, iterating, run
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import Message, Receipt

T = TypeVar("T")
Send = Callable[[Client, int | None, float], T]  # at a broker, to a partition, within seconds


class _Awaited(ClusterCalls[ClientAtOnce]):
    """The calls as all faces have them."""

    def __init__(self, cluster: Cluster, routing: Routing) -> None:
        self._cluster, self._routing = cluster, routing

    @property
    def clients(self) -> tuple[ClientAtOnce, ...]:  # type: ignore[override]  # nobody sets it
        return tuple(client._awaited for client in self._cluster.clients)  # noqa: SLF001  # of this face

    async def _route(self, topic: str, key: str | None, partition: int | None) -> SendRoute:
        route = self._routing.required_route(topic, key, partition)
        assert route is not None, "a partition is at one broker"
        return route


class Cluster(TransactionCalls, TypedTopicCalls, OneBrokerCalls):
    """A client of several brokers, for any number of threads.

    `txmq.connect` makes it from a sequence of URLs. A `with` block closes it at its
    end. Each broker has a log of its own. The partitions of a topic are numbered
    through, those of the first broker first, and a key always has the same partition.
    Messages without a key go to a broker that is there. Receipts and messages have the
    number that the partition has at its broker.

    A log that operators add to those of the URLs is found while the client runs: it
    gets messages without a key, and keys of topics that are made later, and consumers
    read it, too.

    The calls are those of Client. Some concern one broker only and raise
    LocalProtocolError here; `clients` has the client of each broker for them, in the
    order of the URLs, and then of those that were found.
    """

    _routing: Routing

    def __init__(
        self,
        urls: Sequence[str],
        settings: ClientSettings,
        partition_map: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._settings = settings
        self._routing = Routing(urls, settings, self._look_up, partition_map)
        self._checkers: dict[str, Checker] = {}
        self._consumers = WeakSet[Consumers]()
        self._brokers = self._routing.brokers = Brokers(
            [self._new_core(url) for url in urls], self._new_core, self._found
        )
        self._cores = self._brokers.cores
        self.clients = tuple(map(Client, self._cores))
        self._awaited = _Awaited(self, self._routing)
        tell_after_fork(self._brokers)

    def _new_core(self, url: str | Addresses) -> BlockingCore:
        return BlockingCore(url, self._routing.broker_settings)

    def _look_up(self, topic: str) -> Counts:
        async def describe(broker: int, topic: str) -> TopicMetadata:
            return self._cores[broker].topics.get(topic)

        return run(self._routing.look_up(topic, describe))

    def _found(self, broker: int) -> None:
        """Make the client of a broker that was found; wait beside for its answer."""
        if broker == len(self.clients):
            self.clients = (*self.clients, Client(self._cores[broker]))
        Thread(target=self._begin_at, args=(broker,), name="txmq-log", daemon=True).start()

    def _begin_at(self, broker: int) -> None:
        """Use a broker that was found, once it has answered."""
        core = self._cores[broker]
        with suppress(ClientClosed):
            run(wait_answer(CoreAtOnce(core), broker))
            self._brokers.note_answer(broker)
            for name, checker in self._checkers.copy().items():
                self.clients[broker].register_checker(name, checker)
            for consumers in list(self._consumers):
                consumers._join_at(core)  # noqa: SLF001  # not the user's call

    @property
    def service(self) -> str | None:
        """The service that this process is part of."""
        return self._settings.service

    @property
    def stats(self) -> SenderStats:
        """Counters of `send_async`, of all brokers together."""
        each = [client.stats for client in self.clients]
        return SenderStats(
            **{
                field.name: sum(getattr(stats, field.name) for stats in each)
                for field in fields_of(SenderStats)
            }
        )

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Receipt:
        """Send a message and return its receipt once it is stored.

        A message without key and partition goes to another broker where one certainly
        did not store it. All attempts together take up to `timeout` seconds.
        """
        required = self._routing.required_route(topic, fields.get("key"), partition)
        return self._send(
            required,
            timeout,
            lambda client, number, left: client.send(
                topic, body, partition=number, timeout=left, **fields
            ),
        )

    def _send(self, required: SendRoute | None, timeout: Duration | None, send: Send[T]) -> T:
        """Send by the required route, or to the first broker that stores it.

        Each broker has its part of the time. Raises the last refusal, and at once an
        error whose outcome is unknown.
        """
        patience = seconds_of(timeout, "timeout")
        if patience is None:
            patience = self._settings.timeout
        routes = [required] if required else self._any_routes()
        refusal: TxmqError | None = None
        for broker, number in routes:
            try:
                return send(self.clients[broker], number, patience / len(routes))
            except TxmqError as error:
                self._avoid(broker, error)
                if not can_fail_over(error):
                    raise
                refusal = error
        assert refusal is not None, "there is at least one broker"
        raise refusal

    def _any_routes(self) -> list[SendRoute]:
        turn = self._routing.brokers_in_turn(time.monotonic())
        return [SendRoute(broker, None) for broker in turn]

    def _avoid(self, broker: int, error: BaseException | None) -> None:
        self._routing.avoid(broker, error, time.monotonic())

    def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Future[Receipt]:
        """Send a message and return the future of its receipt; see `Client.send_async`.

        Where its broker fails, the future fails. Messages without a key then go to
        other brokers for a while.
        """
        key = fields.get("key")
        broker, number = self._routing.choose_route(topic, key, partition, time.monotonic())
        future = self.clients[broker].send_async(
            topic, body, partition=number, timeout=timeout, **fields
        )
        future.add_done_callback(partial(self._avoid_after, broker))
        return future

    def _avoid_after(self, broker: int, done: Future[Any]) -> None:
        if not done.cancelled():
            self._avoid(broker, done.exception())

    def half_async(
        self,
        topic: str,
        body: bytes,
        *,
        checker: str,
        partition: int | None = None,
        check_after: Duration = CHECK_AFTER_S,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Future[HalfMessage[Future[bool]]]:
        """Store a half message and return its future; see `Client.half_async`.

        The message goes to one broker as for `send_async`, and that broker asks the
        checker.
        """
        key = fields.get("key")
        broker, number = self._routing.choose_route(topic, key, partition, time.monotonic())
        future = self.clients[broker].half_async(
            topic,
            body,
            checker=checker,
            partition=number,
            check_after=check_after,
            timeout=timeout,
            **fields,
        )
        future.add_done_callback(partial(self._avoid_after, broker))
        return future

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message without a receipt; see `Client.send_one_way`."""
        key = fields.get("key")
        broker, number = self._routing.choose_route(topic, key, partition, time.monotonic())
        self.clients[broker].send_one_way(topic, body, partition=number, **fields)

    def send_batch(
        self,
        topic: str,
        messages: Iterable[Message],
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
    ) -> list[Receipt]:
        """Send messages and return their receipts in order once all are stored.

        It is not all or nothing: see `transaction`. The messages without a key go to
        one broker together.
        """
        listed = checked_messages(messages)
        routes = self._routing.rows_by_route(topic, [message.key for message in listed], partition)
        return merge_receipts(
            self._send_by_route(
                routes,
                timeout,
                lambda rows: partial(_send_batch, topic, [listed[row] for row in rows]),
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
        timeout: Duration | None = None,
    ) -> list[StoredBatch]:
        """Send messages that are given as columns; see `Client.send_many`.

        The messages without a key go to one broker together.
        """
        check_columns(bodies, keys, tags)
        routes = self._routing.rows_by_route(topic, keys or [None] * len(bodies), partition)
        columns = (bodies, keys, tags)
        parts = self._send_by_route(
            routes, timeout, lambda rows: partial(_send_many, topic, select_rows(rows, columns))
        )
        return [batch for _rows, batches in parts for batch in batches]

    def _send_by_route(
        self,
        routes: RowsByRoute,
        timeout: Duration | None,
        send_rows: Callable[[Sequence[int]], Send[T]],
    ) -> list[tuple[Sequence[int], T]]:
        """Return the rows of each route with the answer of their broker."""
        done: list[tuple[Sequence[int], T]] = []
        try:
            for required, rows in routes.items():
                done.append((rows, self._send(required, timeout, send_rows(rows))))
        except TxmqError as error:
            if done:  # sent again as a whole, these would be stored twice
                error.outcome = "unknown"
            raise
        return done

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until each message of `send_async` has its receipt or has failed.

        Raises RequestTimeout.
        """
        run_concurrently([partial(client.flush, timeout) for client in self.clients])

    def _home(self) -> BlockingCore:
        """Return the first broker in turn whose log is known or that answers."""
        refusal: TxmqError | None = None
        for broker, _partition in self._any_routes():
            core = self._cores[broker]
            try:
                core.require_reachable()
            except TxmqError as error:
                self._avoid(broker, error)
                refusal = error
            else:
                return core
        assert refusal is not None, "there is at least one broker"
        raise refusal

    def xa_resource(self, owner: str | None = None) -> NoReturn:
        """Each broker is a resource of its own: `client.xa_resource` of `clients`."""
        raise of_one_broker("xa_resource(…)")

    def consumer(self, group: str, topics: Topics, **options: Unpack[ConsumerOptions]) -> Consumers:
        """Join a consumer group at each broker; see `Client.consumer`.

        A broker that is away is joined when it is back. Raises BrokerUnavailable where
        no broker answers.
        """
        cores = self._brokers.answered
        consumers = consume_cluster(cores, group, topics, self._settings.timeout, **options)
        self._consumers.add(consumers)
        for core in self._brokers.answered:
            if core not in cores:  # found meanwhile
                consumers._join_at(core)  # noqa: SLF001  # not the user's call
        return consumers

    def reader(
        self,
        name: str,
        topics: Topics,
        offsets: OffsetStore,
        *,
        start: ReaderStart = "first",
    ) -> Readers:
        """Return a reader of the topics at all brokers; see `Client.reader`.

        `offsets` keeps the positions of each broker under the `name` followed by a dot
        and the identity of the broker's log. A log that operators add meanwhile is read
        from its first message on. Raises BrokerUnavailable where a broker is away at
        the beginning.
        """
        names = topics if isinstance(topics, str) else list(topics)
        readers = Readers(self._brokers, name, names, offsets, start)
        open_reader(readers)
        return readers

    def read(self, topic: str, partition: int, offset: int, *, wait: Duration = 0.0) -> Found:
        """Read published messages of a partition; see `Client.read`."""
        route = self._routing.required_route(topic, None, partition)
        assert route is not None, "a partition is at one broker"
        assert route.partition is not None, "a partition was named"
        return self.clients[route.broker].read(topic, route.partition, offset, wait=wait)

    letters = iterating(ClusterCalls.letters)
    audit = iterating(ClusterCalls.audit)
    trace = blocking(ClusterCalls.trace)
    find = iterating(ClusterCalls.find)
    recall = blocking(ClusterCalls.recall)

    def plan(self, name: str, broker: int = 0) -> ReplayPlan:
        """Return a replay plan of one of the brokers, by its number in the URLs: each
        has plans of its own letters.
        """
        return self.clients[broker].plan(name)

    def register_checker(self, name: str, checker: Checker) -> None:
        """Let this process decide half transactions of all brokers.

        See `Client.register_checker`.
        """
        self._checkers[name] = checker
        for client in self.clients:
            client.register_checker(name, checker)

    @property
    def log_id(self) -> UUID:
        """Each broker has a log of its own: `client.log_id` of each of `clients`."""
        raise of_one_broker("log_id")

    def close(self, timeout: float = CLOSE_S) -> None:
        """Close the clients of all brokers, their consumers first."""
        run_concurrently([partial(consumers.close, timeout) for consumers in list(self._consumers)])
        run_concurrently([partial(client.close, timeout) for client in self.clients])

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
