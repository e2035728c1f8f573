"""The client for programs on Twisted: each call returns a Deferred."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload
from weakref import WeakSet

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from txmq.client.blocking.core import core_of
from txmq.client.blocking.transaction.begin import begin, begin_xa
from txmq.client.blocking.transaction.transaction import Transaction as BlockingTransaction
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.columns import send_columns
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import Found, ReaderStart, found_in, read_payload
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.rows import Fields, checked_messages, column_rows, micros_now
from txmq.client.protocol.settings import no_spool
from txmq.client.protocol.transaction.options import (
    NO_CONNECTION,
    Nobody,
    TransactionOptions,
    XaOptions,
)
from txmq.client.protocol.typed.bodies import Topics
from txmq.client.twisted.consumer.consumer import Consumer, join_group
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.messages import TwistedHalfCalls, TwistedMessageCalls
from txmq.client.twisted.protocols import AsyncCloseable
from txmq.client.twisted.reader import Reader, open_reader
from txmq.client.twisted.threaded_transaction import (
    AnyChecker,
    ThreadedHalf,
    ThreadedTransaction,
    ThreadedXa,
    threaded,
    threaded_checker,
)
from txmq.client.twisted.transaction import Transaction
from txmq.client.twisted.typed import TypedTopicCalls
from txmq.errors import RequestTimeout, TxmqError
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import Message, Receipt
from txmq.wire.data_requests import Opcode

if TYPE_CHECKING:  # psycopg2 is for programs that have a database
    from uuid import UUID

    from txmq.client.twisted.spool import TwistedSpool
    from txmq.tx.postgres.driver import BlockingConnection

T = TypeVar("T")
log = get_logger()


class Client(TypedTopicCalls, TwistedMessageCalls, TwistedHalfCalls, AsyncCloseable):
    """A client of one broker, for the reactor's thread. Made by `txmq.twisted.connect`.

    An `async with` block closes it at its end. Deferreds fail as the calls of the
    blocking client raise. They fail with BrokerUnavailable where no broker answers in
    time, and with ClientClosed after `close`. They fail with a kind of RequestRejected
    where the broker refuses. Without an answer they fail with ConnectionLost or
    RequestTimeout: whether the request was carried out is then unknown. A cancelled
    Deferred only ends the wait; the request may still be carried out.
    """

    def __init__(self, core: TwistedCore) -> None:
        self._core = core
        self._consumers = WeakSet[Consumer]()
        self._readers = WeakSet[Reader]()

    @property
    def spool(self) -> TwistedSpool:
        """The messages on local disk of a client made with `spool=`.

        Raises ConfigError for any other client.
        """
        raise no_spool()

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Deferred[Receipt]:
        """Send a message, for its receipt.

        Messages of one key keep their order. The messages of one turn of the reactor
        share a frame.
        """
        return _start(self._send(topic, [Message(body, **fields)], partition)).addCallback(
            lambda found: found[0]
        )

    def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> Deferred[list[Receipt]]:
        """Send messages together, for their receipts in order.

        It is not all or nothing: see `transaction`.
        """
        return _start(self._send(topic, checked_messages(messages), partition))

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> Deferred[list[StoredBatch]]:
        """Send messages that are given as columns, the fast path for volumes.

        The rest is as for `send_batch`.
        """
        return _start(
            send_columns(
                self._core, topic, column_rows(bodies, keys, tags, micros_now()), partition
            )
        )

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message without a receipt.

        The message is lost where the broker is away or the window is full. Raises only
        for an invalid message, or ClientClosed.
        """
        self._core.connection()
        sent = self._send(topic, [Message(body, **fields)], partition)
        _start(sent).addErrback(log_dropped, topic)

    def flush(self, timeout: Duration | None = None) -> Deferred[None]:
        """Wait until each message has its receipt or has failed.

        Fails with RequestTimeout.
        """
        return _start(
            self._flush(
                self._core.settings.delivery_timeout
                if timeout is None
                else seconds_of(timeout, "timeout")
            )
        )

    async def _flush(self, patience: float) -> None:
        self._core.connection()
        if not await self._core.flush(patience):
            raise RequestTimeout(f"not everything had its receipt within {patience:.3g} s")

    def log_id(self) -> Deferred[UUID]:
        """Return the identity of the broker's log. Its first use may connect to the
        broker.
        """
        return _start(self._core.log_id())

    def call(self, name: str, /, **args: object) -> Deferred[dict[str, Any]]:
        """Make a control call, for its reply (docs/FORMATS.md 2.3).

        A long poll may take its `wait_ms` longer than other calls.
        """
        wait_ms = args.get("wait_ms", 0)
        longer = wait_ms / 1_000 if isinstance(wait_ms, int) else 0
        return _start(self._core.call(name, args, longer=longer))

    def read(
        self, topic: str, partition: int, offset: int, *, wait: Duration = 0.0
    ) -> Deferred[Found]:
        """Read published messages from an offset on, without a consumer group.

        Waits up to `wait` seconds for the first message.
        """
        seconds = seconds_of(wait, "wait")

        async def read() -> Found:
            wanted = read_payload(topic, partition, offset, seconds)
            return found_in(
                await self._core.request(Opcode.READ, wanted, longer=seconds, repeat=True), offset
            )

        return _start(read())

    def consumer(
        self, group: str, topics: Topics, **options: Unpack[ConsumerOptions]
    ) -> Deferred[Consumer]:
        """Join a consumer group, for its new member.

        `txmq.client.protocol.consumer.settings.ConsumerOptions` describes the options.
        """
        consumer, joined = join_group(
            Consumer, [self._core], group, topics, self._core.settings.timeout, **options
        )
        self._consumers.add(consumer)
        return joined

    def reader(
        self,
        name: str,
        topics: Topics,
        offsets: OffsetStore,
        *,
        start: ReaderStart = "first",
    ) -> Deferred[Reader]:
        """Open a reader of all messages of topics, without a consumer group.

        `offsets` keeps the positions under the `name`; `txmq.FileOffsets(directory)`
        keeps them in files. It is called in a thread, one call at a time. The rest is
        as for the blocking client.
        """
        reader = Reader(self._core, name, topics, offsets, start)
        self._readers.add(reader)
        return open_reader(reader)

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

        With a psycopg2 `connection` they take effect together with the rows written on
        it, by functions that `tx.run` calls in a thread. With the name of a registered
        `checker` they do so together with other local work. With neither, the broker
        decides alone.
        """
        if connection is NO_CONNECTION and checker is None:
            return Transaction(self._core)
        begun = begin(core_of(self._core.blocking), connection, checker, options)
        return threaded(self._core.reactor, self._core.threads, begun)

    def xa(self, *connections: BlockingConnection, **options: Unpack[XaOptions]) -> ThreadedXa:
        """Return an `async with` block over several databases, committed in two phases.

        The rows on all psycopg2 connections, the sends and the acks take effect
        together. Functions that `tx.run` calls in a thread write the rows.
        """
        return ThreadedXa(
            self._core.reactor,
            self._core.threads,
            begin_xa(core_of(self._core.blocking), connections, options),
        )

    def register_checker(self, name: str, checker: AnyChecker) -> None:
        """Let this process decide the half transactions of a checker.

        The checker gets a Half and returns COMMIT, ROLLBACK or UNKNOWN, or a Deferred
        of it. It is called on the reactor's thread. The rest is as for the blocking
        client.
        """
        checked = threaded_checker(self._core.reactor, checker)
        self._core.blocking.register_checker(name, checked)

    def close(self) -> Deferred[None]:
        """Close the client: its consumers leave their groups.

        Messages without a receipt may still get it for a while.
        """
        return Deferred.fromCoroutine(self._close())

    async def _send(
        self, topic: str, messages: Sequence[Message], partition: int | None
    ) -> list[Receipt]:
        self._core.connection()
        await self._core.topic(topic)
        receipts = list[Deferred[Receipt]]()
        try:
            for message in messages:
                receipts.append(self._core.sender.send(topic, message, partition))
        except TxmqError as refused:
            for receipt in receipts:
                receipt.addErrback(lambda _failure: None)
            if receipts:  # sent again as a whole, these would be stored twice
                refused.outcome = "unknown"
            raise
        answers: list[tuple[bool, Any]] = await DeferredList(receipts, consumeErrors=True)
        return receipts_of(answers)

    async def _close(self) -> None:
        for closeable in (*self._consumers, *self._readers):
            await closeable.close()
        await self._core.close()


def _start(work: Coroutine[Deferred[Any], Any, T]) -> Deferred[T]:
    return Deferred.fromCoroutine(work)


def receipts_of(answers: Sequence[tuple[bool, Any]]) -> list[Receipt]:
    """Return the receipts. Raises an error if one is missing.

    Its outcome is unknown where other messages are stored.
    """
    errors = [answer.value for is_stored, answer in answers if not is_stored]
    if not errors:
        return [answer for _is_stored, answer in answers]
    error = next((error for error in errors if error.outcome == "unknown"), errors[0])
    if len(errors) < len(answers):
        error.outcome = "unknown"
    raise error


def log_dropped(failure: Failure, topic: str) -> None:
    """Log that a message of `send_one_way` is lost."""
    log.warning("send.dropped", topic=topic, error=failure.getErrorMessage())
