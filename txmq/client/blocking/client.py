"""The blocking client: a call returns when it is done, on the thread of its caller."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, Unpack
from uuid import UUID
from weakref import WeakSet

from txmq.client.blocking.at_once import ClientAtOnce
from txmq.client.blocking.consumer.consumer import Consumer, consume
from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.messages import BlockingMessageCalls
from txmq.client.blocking.reader import Reader, open_reader
from txmq.client.blocking.sender.producer import BlockingProducer
from txmq.client.blocking.transaction.calls import TransactionCalls
from txmq.client.blocking.transaction.checkers import Checker, Checkers
from txmq.client.blocking.transaction.xa_resource import XaResource
from txmq.client.blocking.typed import TypedTopicCalls
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.foreign_branch import ForeignBranch
from txmq.client.protocol.awaited.xa_resource import no_owner
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.conversation import client_closed
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import Found, ReaderStart, found_in, read_payload
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.sender.multi_send import SenderStats
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.settings import CLOSE_S, no_spool
from txmq.client.protocol.transaction.decision import is_published
from txmq.client.protocol.transaction.half_message import HalfBundle, HalfMessage
from txmq.client.protocol.transaction.options import CHECK_AFTER_S
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import RequestTimeout, TxmqError
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import Decision, Message, Receipt
from txmq.tx.xid import Xid
from txmq.wire.data_requests import Opcode

if TYPE_CHECKING:  # psycopg2 is for those who have a database, the spool for others
    from txmq.client.blocking.spool import ClientSpool

log = get_logger()


class Client(BlockingProducer, TransactionCalls, BlockingMessageCalls, TypedTopicCalls):
    """A client of one broker, for any number of threads. Made by `txmq.connect`.

    A `with` block closes the client at its end. Every call raises BrokerUnavailable
    where no broker answers in time, and ClientClosed after `close`. It raises a kind of
    RequestRejected where the broker refuses. Without an answer it raises ConnectionLost
    or RequestTimeout: whether the request was carried out is then unknown.
    """

    _awaited: ClientAtOnce

    def __init__(self, core: BlockingCore) -> None:
        settings = core.settings
        super().__init__(core.pool, core.topics, timeout=settings.timeout, retries=settings.retries)
        self._core, self._cores = core, (core,)
        self._awaited = ClientAtOnce(core)
        self._checkers = Checkers(core)
        core.answer_checks = self._checkers.start
        self._consumers = WeakSet[Consumer]()
        self._branches: dict[Xid, ForeignBranch] = {}

    @property
    def service(self) -> str | None:
        """The service that this process is part of."""
        return self._core.settings.service

    @property
    def log_id(self) -> UUID:
        """The identity of the broker's log. Its first use may connect to the broker."""
        return self._core.log_id

    @property
    def spool(self) -> ClientSpool:
        """The messages on local disk of a client made with `spool=`.

        Raises ConfigError for any other client.
        """
        raise no_spool()

    @property
    def stats(self) -> SenderStats:
        """Counters of `send_async`.

        `stats.coalesced` counts messages that shared a frame with others.
        """
        return self._core.stats

    def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Future[Receipt]:
        """Send a message and return the future of its receipt, without waiting.

        Messages of one key keep their order. While the window of unconfirmed messages
        is full, the call waits up to `timeout` seconds, and then raises Throttled. The
        future fails with what `send` would raise. Its callbacks run on a thread of the
        client, so they should be short.
        """
        core = self._core
        patience = core.settings.timeout if timeout is None else seconds_of(timeout, "timeout")
        return core.sender.send(topic, Message(body, **fields), partition, patience)

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
        """Store a half message and return its future, without waiting.

        The local work follows once the future is done, and then `commit()` or
        `rollback()` of its result, which do not wait either. Many half messages at once
        cost much less than as many blocks. Without a decision within `check_after`
        seconds the broker asks the `checker`, as for `transaction(checker=…)`. The call
        waits and raises as `send_async`. The futures fail with what `transaction` would
        raise.
        """
        core = self._core
        patience = core.settings.timeout if timeout is None else seconds_of(timeout, "timeout")
        message = Message(body, **fields)
        bundle = HalfBundle.of(
            core.topics, core.settings, checker, topic, message, partition, check_after
        )

        def decide(outcome: Decision) -> Future[bool]:
            return core.sender.request(
                SideRequest(Opcode.DECIDE, bundle.decide_request(outcome), is_published)
            )

        core.answer_checks()

        def stored(payload: bytes) -> HalfMessage[Future[bool]]:
            bundle.require_stored(payload)
            return bundle.half_message(decide)

        core.topics.get(topic)
        return core.sender.request(
            SideRequest(Opcode.GROUP, bundle.store_request(), stored, bundle.store_request),
            patience,
        )

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message without a receipt.

        The message is lost where the broker is away or the window is full. Raises only
        for an invalid message, or ClientClosed.
        """
        try:
            self.send_async(topic, body, partition=partition, timeout=0.0, **fields)
        except TxmqError as error:
            if not error.retriable:
                raise
            log.warning("send.dropped", topic=topic, error=str(error))

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until each message of `send_async` has its receipt or has failed.

        Raises RequestTimeout.
        """
        patience = seconds_of(timeout, "timeout")
        if patience is None:
            patience = self._core.settings.delivery_timeout
        if self._core.closed:
            raise client_closed()
        deadline = time.monotonic() + patience
        self._core.decision_pipeline.flush(patience)
        if not self._core.sender.flush(max(0.0, deadline - time.monotonic())):
            raise RequestTimeout(f"not everything had its receipt within {patience:.3g} s")

    def consumer(self, group: str, topics: Topics, **options: Unpack[ConsumerOptions]) -> Consumer:
        """Join a consumer group and return its new member.

        `txmq.ConsumerOptions` describes the options.
        Raises UnknownTopic, GroupMismatch where the group exists with other settings,
        and LocalProtocolError for invalid options.
        """
        consumer = consume(self._core, group, topics, **options)
        self._consumers.add(consumer)
        return consumer

    def read(self, topic: str, partition: int, offset: int, *, wait: Duration = 0.0) -> Found:
        """Read published messages from an offset on, without a consumer group.

        Waits up to `wait` seconds for the first message.
        """
        seconds = seconds_of(wait, "wait")
        wanted = read_payload(topic, partition, offset, seconds)
        patience = self._core.settings.timeout + seconds
        return found_in(
            self._core.request(Opcode.READ, wanted, timeout=patience, repeat=True), offset
        )

    def reader(
        self,
        name: str,
        topics: Topics,
        offsets: OffsetStore,
        *,
        start: ReaderStart = "first",
    ) -> Reader:
        """Return a reader of all messages of topics, without a consumer group.

        `offsets` keeps the positions under the `name`; `txmq.FileOffsets(directory)`
        keeps them in files. `start` is for partitions without a position: "first",
        "last", a time, or a timedelta before now. Raises UnknownTopic, LogChanged, and
        ConfigError where another process reads under that name.
        """
        reader = Reader(self._core, name, topics, offsets, start)
        open_reader(reader)
        return reader

    def xa_resource(self, owner: str | None = None) -> XaResource:
        """Return the broker as a resource of another transaction manager.

        Branches are listed under the `owner`, by default the client's service. Raises
        ConfigError where there is neither.
        """
        named = owner or self.service
        if named is None:
            raise no_owner()
        return XaResource(self._core, self._branches, named)

    def register_checker(self, name: str, checker: Checker) -> None:
        """Let this process decide the half transactions of a checker.

        The checker gets a Half and answers COMMIT, ROLLBACK or UNKNOWN. It runs on a
        thread of the client, one question at a time. If it raises, the broker asks
        again later, this process or another one of the service.
        """
        self._checkers.register(name, checker)

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        """Make a control call and return its reply (docs/FORMATS.md 2.3).

        A long poll may take its `wait_ms` longer than other calls.
        """
        wait_ms = args.get("wait_ms", 0)
        longer = wait_ms / 1_000 if isinstance(wait_ms, int) else 0
        return self._core.call(name, args, timeout=self._core.settings.timeout + longer)

    def close(self, timeout: Duration = CLOSE_S) -> None:
        """Close the client, its consumers first, each for up to `timeout` seconds.

        Messages of `send_async` without a receipt may be sent for up to `timeout`
        seconds; the others fail.
        """
        for consumer in list(self._consumers):
            consumer.close(timeout)
        self._checkers.close()
        self._core.close(seconds_of(timeout, "timeout"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
