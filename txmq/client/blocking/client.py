"""The blocking face of the client: a call returns when it is done, on the caller's own
thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, Unpack, overload
from uuid import UUID
from weakref import WeakSet

from txmq.client.blocking.connections.pool import closed
from txmq.client.blocking.consumer.consumer import Consumer, consume
from txmq.client.blocking.core import Core
from txmq.client.blocking.messages import MessageCalls
from txmq.client.blocking.reader import Reader
from txmq.client.blocking.sender.producer import Fields, Producer
from txmq.client.blocking.transaction.checkers import Checker, Checkers
from txmq.client.blocking.transaction.foreign import ForeignBranch
from txmq.client.blocking.transaction.half import HalfTransaction
from txmq.client.blocking.transaction.half_message import HalfGroup, HalfMessage, is_published
from txmq.client.blocking.transaction.jobs import Job
from txmq.client.blocking.transaction.options import (
    CHECK_AFTER_S,
    TransactionOptions,
    XaOptions,
    begin,
    begin_xa,
)
from txmq.client.blocking.transaction.resource import XaResource
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.log import get_logger
from txmq.client.protocol.consumer.settings import Options as ConsumerOptions
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import Start as ReaderStart
from txmq.client.protocol.sender.stats import Stats
from txmq.client.protocol.settings import Options, Settings
from txmq.client.protocol.transaction.tokens import as_token, new_token
from txmq.errors import ConfigError, RequestTimeout, TxmqError
from txmq.model.message import Decision, Message, Receipt
from txmq.tx.xid import Xid
from txmq.wire.headers import Opcode

if TYPE_CHECKING:  # psycopg2 is for those who have a database
    from txmq.client.blocking.cluster import Cluster
    from txmq.client.blocking.transaction.xa import XaTransaction
    from txmq.tx.postgres.session import Connection

CLOSE_S = 10.0
log = get_logger()


@overload
def connect(url: str, *, service: str | None = None, **options: Unpack[Options]) -> Client: ...


@overload
def connect(
    url: list[str] | tuple[str, ...],
    *,
    service: str | None = None,
    partition_map: Mapping[str, Sequence[int]] | None = None,
    **options: Unpack[Options],
) -> Cluster: ...


def connect(
    url: str | list[str] | tuple[str, ...],
    *,
    service: str | None = None,
    partition_map: Mapping[str, Sequence[int]] | None = None,
    **options: Unpack[Options],
) -> Client | Cluster:
    """A client of the broker at `url`: `txmq://host:port`, or several addresses of it:
    `txmq://a:7650,b:7650`.

    A sequence of URLs are as many brokers, each with a log of its own: see Cluster.
    `partition_map` then gives the partitions of topics at each of them, in their order,
    for keys to find theirs whoever is away; else they are asked. Nothing is connected
    before it is needed. `service` names what this process is part of; checkers are
    registered, and transactions listed, under it. For the `options` see
    `txmq.client.protocol.settings.Options`. Raises ConfigError.
    """
    settings = Settings.of(service, **options)
    if not isinstance(url, str):
        from txmq.client.blocking.cluster import Cluster  # for those who have several brokers

        return Cluster(url, settings, partition_map)
    if partition_map is not None:
        raise ConfigError(
            "partition_map", "one broker knows its partitions", hint="it is for a sequence of URLs"
        )
    return Client(Core(url, settings))


class Client(Producer, MessageCalls):
    """A client of one broker. For any number of threads, and for use with `with`. Made
    by `txmq.connect`.

    Every call raises BrokerUnavailable where no broker answers in time, ClientClosed
    after `close`, RequestRejected in one of its kinds where the broker refuses, and
    ConnectionLost or RequestTimeout, whose outcome is unknown, where an answer is
    missing.
    """

    def __init__(self, core: Core) -> None:
        settings = core.settings
        super().__init__(core.pool, core.topics, timeout=settings.timeout, retries=settings.retries)
        self.core = core
        self._checkers = Checkers(core)
        self._consumers = WeakSet[Consumer]()
        self._branches: dict[Xid, ForeignBranch] = {}

    @property
    def service(self) -> str | None:
        """What this process is part of."""
        return self.core.settings.service

    @property
    def log_id(self) -> UUID:
        """The identity of the broker's log; asks for it if need be."""
        return self.core.log_id

    @property
    def stats(self) -> Stats:
        """What `send_async` has done so far, `stats.coalesced` of it in common
        frames.
        """
        return self.core.stats

    def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        **fields: Unpack[Fields],
    ) -> Future[Receipt]:
        """Sends one message without waiting, for the future of its receipt. Messages of
        one key keep their order.

        Waits up to `timeout` seconds while the window is full, then raises Throttled.
        The future fails with what `send` would raise; its callbacks run on the client's
        own thread, so they should be short.
        """
        core = self.core
        patience = core.settings.timeout if timeout is None else timeout
        return core.pipeline.send(topic, Message(body, **fields), partition, patience)

    def half_async(
        self,
        topic: str,
        body: bytes,
        *,
        checker: str,
        partition: int | None = None,
        check_after: float = CHECK_AFTER_S,
        timeout: float | None = None,
        **fields: Unpack[Fields],
    ) -> Future[HalfMessage[Future[bool]]]:
        """Stores a half message without waiting, for its future; then comes the local
        work, and the half's `commit()` or `rollback()`, which do not wait either. Many
        at once cost much less than as many blocks.

        Where neither comes within `check_after` seconds, the broker asks the `checker`,
        as in `transaction(checker=…)`. Waits and raises as `send_async` does; the
        futures fail with what `transaction` would raise.
        """
        core = self.core
        patience = core.settings.timeout if timeout is None else timeout
        message = Message(body, **fields)
        group = HalfGroup.of(
            core.topics, core.settings, checker, topic, message, partition, check_after
        )

        def decide(outcome: Decision) -> Future[bool]:
            return core.pipeline.submit(Opcode.DECIDE, group.decision(outcome), is_published)

        def stored(payload: bytes) -> HalfMessage[Future[bool]]:
            group.check_stored(payload)
            return HalfMessage(group.token, decide)

        core.topics.shape(topic)
        return core.pipeline.submit(Opcode.GROUP, group.payload(), stored, group.payload, patience)

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Sends one message and forgets it: nobody is told whether it was stored, and a
        full window drops it.

        Raises only what is wrong with the message, or ClientClosed.
        """
        try:
            self.send_async(topic, body, partition=partition, timeout=0.0, **fields)
        except TxmqError as error:
            if not error.retriable:
                raise
            log.warning("send.dropped", topic=topic, error=str(error))

    def flush(self, timeout: float | None = None) -> None:
        """Returns once everything sent with `send_async` has its receipt, or has
        failed. Raises RequestTimeout.
        """
        patience = self.core.settings.delivery_timeout if timeout is None else timeout
        if self.core.closed:
            raise closed()
        deadline = time.monotonic() + patience
        self.core.teller.settle(patience)
        if not self.core.pipeline.flush(max(0.0, deadline - time.monotonic())):
            raise RequestTimeout(f"not everything had its receipt within {patience} s")

    def consumer(
        self, group: str, topics: Iterable[str], **options: Unpack[ConsumerOptions]
    ) -> Consumer:
        """Joins a consumer group, for messages of these topics. For the `options` see
        `consuming.settings.Options`.

        Raises UnknownTopic, GroupMismatch where the group was made with other settings,
        LocalProtocolError.
        """
        consumer = consume(self.core, group, topics, **options)
        self._consumers.add(consumer)
        return consumer

    def reader(
        self,
        name: str,
        topics: Iterable[str],
        offsets: OffsetStore,
        *,
        start: ReaderStart = "first",
    ) -> Reader:
        """Reads all messages of topics without a group, from positions that `offsets`
        keeps for the `name`.

        `txmq.FileOffsets(directory)` keeps them in files. `start` is for partitions
        without a position: "first", "last", a time, or a timedelta ago. Raises
        UnknownTopic, LogChanged, ConfigError where another process reads by that name.
        """
        reader = Reader(self.core, name, topics, offsets, start)
        try:
            reader.open()
        except BaseException:
            reader.close()
            raise
        return reader

    @overload
    def transaction(
        self, *, checker: str, **options: Unpack[TransactionOptions]
    ) -> HalfTransaction: ...

    @overload
    def transaction(
        self,
        connection: Connection | None = None,
        *,
        checker: None = None,
        **options: Unpack[TransactionOptions],
    ) -> Transaction: ...

    def transaction(
        self,
        connection: Connection | None = None,
        *,
        checker: str | None = None,
        **options: Unpack[TransactionOptions],
    ) -> Transaction:
        """A `with` block whose sends and acks take effect together, or not at all.

        With a psycopg2 `connection`, together with the rows written on it: the block
        commits it. With the name of a registered `checker`, together with local work of
        any other kind: see HalfTransaction. With neither, by themselves. For the
        `options` see `txmq.client.blocking.transaction.options.TransactionOptions`.
        """
        return begin(self.core, connection, checker, options)

    def xa(self, *connections: Connection, **options: Unpack[XaOptions]) -> XaTransaction:
        """A `with` block whose rows on all of the psycopg2 connections, sends and acks
        take effect together.

        Two-phase commit: the block commits the connections, which may lead to different
        servers. For one database `transaction(connection)` is cheaper. For the
        `options` see `txmq.client.blocking.transaction.options.XaOptions`.
        """
        return begin_xa(self.core, connections, options)

    def xa_resource(self, owner: str | None = None) -> XaResource:
        """The broker as a resource under another transaction manager, for one thread.

        Its branches are listed under the `owner`, which is the client's service unless
        named: see XaResource. Raises ConfigError where there is neither.
        """
        named = owner or self.service
        if named is None:
            raise ConfigError("owner", "branches are listed under an owner", hint="such as: orders")
        return XaResource(self.core, self._branches, named)

    def job(self, token: UUID | bytes | str | None = None, *, expire_after: float = 0.0) -> Job:
        """The job of that token, or a new one: groups stored apart, and one decision.
        See Job.
        """
        named = new_token() if token is None else as_token(token)
        return Job(self.core, named, expire_after=expire_after)

    def register_checker(self, name: str, checker: Checker) -> None:
        """Lets this process answer for transactions of that checker: COMMIT, ROLLBACK
        or UNKNOWN for a Half.

        It is called on the client's own thread, one question after the other. An
        exception is no answer: the broker asks again later, this process or another one
        of the service.
        """
        self._checkers.register(name, checker)

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        """What a control call returns (docs/FORMATS.md 2.3). A long poll may take its
        `wait_ms` longer.
        """
        wait_ms = args.get("wait_ms", 0)
        longer = wait_ms / 1_000 if isinstance(wait_ms, int) else 0
        return self.core.call(name, args, timeout=self.core.settings.timeout + longer)

    def close(self, timeout: float = CLOSE_S) -> None:
        """Ends the client. What `send_async` took may go out for up to `timeout`
        seconds; the rest of it fails.

        Its consumers are closed first, each for up to `timeout` seconds.
        """
        for consumer in list(self._consumers):
            consumer.close(timeout)
        self._checkers.close()
        self.core.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
