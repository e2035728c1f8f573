"""The Twisted face of the client: every call gives a Deferred, all on the reactor's
thread.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, overload
from weakref import WeakSet

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from txmq.client.blocking.client import Client as BlockingClient
from txmq.client.blocking.sender.producer import Fields, StoredBatch, checked_messages, micros_now
from txmq.client.blocking.transaction.half import HalfTransaction
from txmq.client.blocking.transaction.options import TransactionOptions, XaOptions, begin, begin_xa
from txmq.client.blocking.transaction.transaction import Transaction as BlockingTransaction
from txmq.client.log import get_logger
from txmq.client.protocol.consumer.settings import Options as ConsumerOptions
from txmq.client.protocol.consumer.settings import checked
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import READ_BYTES, messages_of
from txmq.client.protocol.reader import Start as ReaderStart
from txmq.client.protocol.sender.rows import columns
from txmq.client.protocol.settings import Settings
from txmq.client.twisted.columns import send_columns
from txmq.client.twisted.consumer import Consumer
from txmq.client.twisted.core import Core
from txmq.client.twisted.halves import HalfCalls
from txmq.client.twisted.messages import MessageCalls
from txmq.client.twisted.protocols import Closing, Reactor
from txmq.client.twisted.reader import Reader
from txmq.client.twisted.threads import (
    AnyChecker,
    ThreadedHalf,
    ThreadedTransaction,
    ThreadedXa,
    on_reactor,
)
from txmq.client.twisted.transaction import Transaction
from txmq.errors import RequestTimeout, TxmqError
from txmq.model.message import Message, Receipt, ReceivedMessage
from txmq.wire.chunks import unpack_chunks
from txmq.wire.headers import Opcode, Read, pack_read

if TYPE_CHECKING:  # psycopg2 is for those who have a database
    from uuid import UUID

    from txmq.tx.postgres.session import Connection

T = TypeVar("T")
log = get_logger()


class Found(NamedTuple):
    """What a read found, and where to read on."""

    messages: list[ReceivedMessage]
    next_offset: int


class Client(MessageCalls, HalfCalls, Closing):
    """A client of one broker, for the reactor's thread. Made by `txmq.twisted.connect`.

    Deferreds fail as the blocking client's calls raise: BrokerUnavailable where no
    broker answers in time, ClientClosed after `close`, RequestRejected in one of its
    kinds where the broker refuses, ConnectionLost or RequestTimeout, whose outcome is
    unknown, where an answer is missing. To cancel a Deferred is to wait no longer; what
    was sent stays sent.
    """

    def __init__(
        self,
        reactor: Reactor,
        url: str,
        settings: Settings,
        *,
        elsewhere_after: float | None = None,
    ) -> None:
        """`elsewhere_after`: see Sending."""
        self.core = Core(reactor, url, settings, elsewhere_after=elsewhere_after)
        self._consumers = WeakSet[Consumer]()
        self._readers = WeakSet[Reader]()

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Deferred[Receipt]:
        """Sends one message. Messages of one key keep their order; what is sent in one
        turn shares a frame.
        """
        return _begun(self._send(topic, [Message(body, **fields)], partition)).addCallback(
            lambda found: found[0]
        )

    def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> Deferred[list[Receipt]]:
        """Sends messages together, for their receipts in their order. It is not all or
        nothing: see `transaction`.
        """
        return _begun(self._send(topic, checked_messages(messages), partition))

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> Deferred[list[StoredBatch]]:
        """Sends messages given as columns, the fast path for volumes. Otherwise as
        `send_batch`.
        """
        return _begun(
            send_columns(self.core, topic, columns(bodies, keys, tags, micros_now()), partition)
        )

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Sends one message and forgets it: nobody is told whether it was stored, and a
        full window drops it.

        Raises only what is wrong with the message, or ClientClosed.
        """
        self.core.connected()
        sent = self._send(topic, [Message(body, **fields)], partition)
        _begun(sent).addErrback(dropped, topic)

    def flush(self, timeout: float | None = None) -> Deferred[None]:
        """Fires once everything sent has its receipt, or has failed. Fails with
        RequestTimeout.
        """
        return _begun(
            self._flush(self.core.settings.delivery_timeout if timeout is None else timeout)
        )

    async def _flush(self, patience: float) -> None:
        self.core.connected()
        if not await self.core.flushed(patience):
            raise RequestTimeout(f"not everything had its receipt within {patience} s")

    def log_id(self) -> Deferred[UUID]:
        """The identity of the broker's log; asks for it if need be."""
        return _begun(self.core.log_id())

    def call(self, name: str, /, **args: object) -> Deferred[dict[str, Any]]:
        """What a control call returns (docs/FORMATS.md 2.3). A long poll may take its
        `wait_ms` longer.
        """
        wait_ms = args.get("wait_ms", 0)
        longer = wait_ms / 1_000 if isinstance(wait_ms, int) else 0
        return _begun(self.core.asked(name, args, longer=longer))

    def read(
        self, topic: str, partition: int, offset: int, *, wait: float = 0.0
    ) -> Deferred[Found]:
        """Published messages from an offset on, without a consumer group; waits up to
        `wait` seconds for the first.
        """
        return _begun(self._read(Read(partition, offset, round(wait * 1_000), READ_BYTES, topic)))

    def consumer(
        self, group: str, topics: Iterable[str], **options: Unpack[ConsumerOptions]
    ) -> Deferred[Consumer]:
        """Joins a consumer group. For the `options` see
        `consuming.settings.Options`.
        """
        names = topics if isinstance(topics, str) else list(topics)
        consumer = Consumer(self.core, checked(group, names, **options))
        self._consumers.add(consumer)
        return _begun(consumer.joined(self.core.settings.timeout))

    def reader(
        self,
        name: str,
        topics: Iterable[str],
        offsets: OffsetStore,
        *,
        start: ReaderStart = "first",
    ) -> Deferred[Reader]:
        """Reads all messages of topics without a group, from positions that `offsets`
        keeps for the `name`.

        `txmq.FileOffsets(directory)` keeps them in files; `offsets` is used in a thread
        of the client's, one call at a time. Otherwise as the blocking client's.
        """
        reader = Reader(self.core, name, topics, offsets, start)
        self._readers.add(reader)
        return _begun(reader.opened())

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
        """An `async with` block whose sends and acks take effect together, or not at
        all.

        With a psycopg2 `connection`, together with the rows written on it, in functions
        that `tx.run` calls in a thread; with the name of a registered `checker`,
        together with local work of any other kind. With neither, by themselves: the
        broker alone decides.
        """
        if connection is None and checker is None:
            return Transaction(self.core)
        begun = begin(self.blocking.core, connection, checker, options)
        if isinstance(begun, HalfTransaction):
            return ThreadedHalf(self.core.reactor, self.core.threads, begun)
        return ThreadedTransaction(self.core.reactor, self.core.threads, begun)

    def xa(self, *connections: Connection, **options: Unpack[XaOptions]) -> ThreadedXa:
        """An `async with` block whose rows on all of the psycopg2 connections, sends
        and acks take effect together.

        Two-phase commit; the statements are in functions that `tx.run` calls in a
        thread.
        """
        return ThreadedXa(
            self.core.reactor, self.core.threads, begin_xa(self.blocking.core, connections, options)
        )

    def register_checker(self, name: str, checker: AnyChecker) -> None:
        """Lets this process answer for transactions of that checker: COMMIT, ROLLBACK
        or UNKNOWN for a Half, or a Deferred of it. Called on the reactor's thread;
        otherwise as the blocking client's.
        """
        self.blocking.register_checker(name, on_reactor(self.core.reactor, checker))

    @property
    def blocking(self) -> BlockingClient:
        """The blocking client that works for this one in threads, made at the first
        use.
        """
        return self.core.blocking

    def close(self) -> Deferred[None]:
        """Ends the client: consumers leave their groups, what has no receipt yet may
        still get it for a while.
        """
        return Deferred.fromCoroutine(self._close())

    async def _send(
        self, topic: str, messages: Sequence[Message], partition: int | None
    ) -> list[Receipt]:
        self.core.connected()
        await self.core.shape(topic)
        receipts = list[Deferred[Receipt]]()
        try:
            for message in messages:
                receipts.append(self.core.sending.put(topic, message, partition))
        except TxmqError as refused:
            for receipt in receipts:
                receipt.addErrback(lambda _failure: None)
            if receipts:  # sent again as a whole, these would be there twice
                refused.outcome = "unknown"
            raise
        answers: list[tuple[bool, Any]] = await DeferredList(receipts, consumeErrors=True)
        return _all_of(answers)

    async def _read(self, wanted: Read) -> Found:
        longer = wanted.max_wait_ms / 1_000
        found = unpack_chunks(
            await self.core.request(Opcode.READ, pack_read(wanted), longer=longer, repeat=True)
        )
        messages = [
            message for chunk in found.chunks for message in messages_of(chunk, wanted.offset)
        ]
        return Found(messages, found.next_offset)

    async def _close(self) -> None:
        for one in (*self._consumers, *self._readers):
            await one.close()
        await self.core.close()


def _begun(work: Coroutine[Deferred[Any], Any, T]) -> Deferred[T]:
    return Deferred.fromCoroutine(work)


def _all_of(answers: Sequence[tuple[bool, Any]]) -> list[Receipt]:
    """The receipts. Raises why there is one missing; with others there, its outcome is
    that of the whole.
    """
    trouble = [answer.value for is_there, answer in answers if not is_there]
    if not trouble:
        return [answer for _is_there, answer in answers]
    error = next((error for error in trouble if error.outcome == "unknown"), trouble[0])
    if len(trouble) < len(answers):
        error.outcome = "unknown"
    raise error


def dropped(failure: Failure, topic: str) -> None:
    """Says that a message sent one way is lost."""
    log.warning("send.dropped", topic=topic, error=failure.getErrorMessage())
