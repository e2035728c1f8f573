"""The Twisted face of the client: every call gives a Deferred, all on the reactor's thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, overload
from uuid import uuid4

from twisted.internet.defer import Deferred, DeferredList, FirstError, gatherResults
from twisted.internet.task import deferLater

from txmq.client.address import parse_url
from txmq.client.blocking import Client as BlockingClient
from txmq.client.consuming.parcels import Parcel
from txmq.client.consuming.settings import Options as ConsumerOptions
from txmq.client.consuming.settings import checked
from txmq.client.conversation import Conversation, LogPin, Payload, returned
from txmq.client.core import Core
from txmq.client.delivery import FIRST_PAUSE_S, LONGEST_PAUSE_S, Piece, Stored, cut, receipt_of
from txmq.client.half import HalfTransaction
from txmq.client.options import TransactionOptions, XaOptions, begin, begin_xa
from txmq.client.producer import Fields, StoredBatch, checked_messages, micros_now, stored_batch
from txmq.client.rows import Rows, columns
from txmq.client.settings import Settings
from txmq.client.topics import Shape, Topics
from txmq.client.transaction import Transaction as BlockingTransaction
from txmq.client.twisted_consumer import Consumer
from txmq.client.twisted_link import Connected, Link, timed, too_late
from txmq.client.twisted_messages import MessageCalls
from txmq.client.twisted_seams import Reactor
from txmq.client.twisted_sending import Sending
from txmq.client.twisted_threads import AnyChecker, ThreadedHalf, ThreadedTransaction, ThreadedXa, Threads, on_reactor
from txmq.client.twisted_transaction import Transaction
from txmq.errors import ClientClosed, ConnectionLost, StaleTopic, Throttled
from txmq.message import Message, Receipt, ReceivedMessage
from txmq.wire.calls import encode_call
from txmq.wire.chunks import unpack_chunks
from txmq.wire.headers import Opcode, Read, pack_read, send_header

if TYPE_CHECKING:  # psycopg2 is for those who have a database
    from txmq.tx.postgres.session import Connection

T = TypeVar("T")
READ_BYTES = 1 << 20
PIECES_AHEAD = 32  # of one `send_many` under way: the broker remembers the receipts of 256


def closed() -> ClientClosed:
    """The error for every call after `close`."""
    return ClientClosed("the client was closed", hint="make a new one with txmq.twisted.connect")


class Found(NamedTuple):
    """What a read found, and where to read on."""

    messages: list[ReceivedMessage]
    next_offset: int


class Client(MessageCalls):
    """A client of one broker, for the reactor's thread. Made by `txmq.twisted.connect`.

    Deferreds fail as the blocking client's calls raise: BrokerUnavailable where no broker answers in time, ClientClosed
    after `close`, RequestRejected in one of its kinds where the broker refuses, ConnectionLost or RequestTimeout, whose
    outcome is unknown, where an answer is missing. To cancel a Deferred is to wait no longer; what was sent stays sent.
    """

    def __init__(self, reactor: Reactor, url: str, settings: Settings) -> None:
        self.reactor, self.settings = reactor, settings
        self._url, self._addresses, self._pin = url, parse_url(url), LogPin()
        self._incarnation = settings.incarnation()
        self._threads = Threads(reactor, settings.connections)
        self._blocking: BlockingClient | None = None
        self._shapes: dict[str, dict[str, Any]] = {}
        self.topics = Topics(self._shapes.pop, settings.partitioner)
        self._sending = Sending(reactor, self.topics, settings, self._refresh)
        self._connected: Connected | None = None
        self._consumers: set[Consumer] = set()
        self._closed = False

    def link(self) -> Link:
        """A new connection, not yet made; replies that nobody waits for go to the sends."""
        conversation = Conversation(self.settings.service, self._pin, self._incarnation)
        return Link(self.reactor, conversation, self._sending.received)

    def connected(self) -> Connected:
        """The connection of this client, made at the first use."""
        if self._closed:
            raise closed()
        if self._connected is None:
            self._connected = Connected(self.reactor, self._addresses, self.link, self._sending.attach)
        return self._connected

    def connect_apart(self, attach: Callable[[Link], None]) -> Connected:
        """A connection of its own, for a consumer."""
        return Connected(self.reactor, self._addresses, self.link, attach)

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Deferred[Receipt]:
        """Sends one message. Messages of one key keep their order; what is sent in one turn shares a frame."""
        return self._begun(self._send(topic, [Message(body, **fields)], partition)).addCallback(lambda found: found[0])

    def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> Deferred[list[Receipt]]:
        """Sends messages together, for their receipts in their order. It is not all or nothing: see `transaction`."""
        return self._begun(self._send(topic, checked_messages(messages), partition))

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> Deferred[list[StoredBatch]]:
        """Sends messages given as columns, the fast path for volumes. Otherwise as `send_batch`."""
        return self._begun(self._send_columns(topic, columns(bodies, keys, tags, micros_now()), partition))

    def call(self, name: str, /, **args: object) -> Deferred[dict[str, Any]]:
        """What a control call returns (docs/FORMATS.md 2.3). A long poll may take its `wait_ms` longer."""
        wait_ms = args.get("wait_ms", 0)
        longer = wait_ms / 1_000 if isinstance(wait_ms, int) else 0
        return self._begun(self.asked(name, args, longer=longer))

    def read(self, topic: str, partition: int, offset: int, *, wait: float = 0.0) -> Deferred[Found]:
        """Published messages from an offset on, without a consumer group; waits up to `wait` seconds for the first."""
        return self._begun(self._read(Read(partition, offset, round(wait * 1_000), READ_BYTES, topic)))

    def consumer(self, group: str, topics: Iterable[str], **options: Unpack[ConsumerOptions]) -> Deferred[Consumer]:
        """Joins a consumer group. For the `options` see `consuming.settings.Options`."""
        names = topics if isinstance(topics, str) else list(topics)
        consumer = Consumer(self, checked(group, names, **options))
        self._consumers.add(consumer)
        return self._begun(consumer.joined(self.settings.timeout))

    @overload
    def transaction(self) -> Transaction: ...

    @overload
    def transaction(self, *, checker: str, **options: Unpack[TransactionOptions]) -> ThreadedHalf: ...

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
        """An `async with` block whose sends and acks take effect together, or not at all.

        With a psycopg2 `connection`, together with the rows written on it, in functions that `tx.run` calls in a
        thread; with the name of a registered `checker`, together with local work of any other kind. With neither, by
        themselves: the broker alone decides.
        """
        if connection is None and checker is None:
            return Transaction(self)
        begun = begin(self.blocking.core, connection, checker, options)
        if isinstance(begun, HalfTransaction):
            return ThreadedHalf(self.reactor, self._threads, begun)
        return ThreadedTransaction(self.reactor, self._threads, begun)

    def xa(self, *connections: Connection, **options: Unpack[XaOptions]) -> ThreadedXa:
        """An `async with` block whose rows on all of the psycopg2 connections, sends and acks take effect together.

        Two-phase commit; the statements are in functions that `tx.run` calls in a thread.
        """
        return ThreadedXa(self.reactor, self._threads, begin_xa(self.blocking.core, connections, options))

    def register_checker(self, name: str, checker: AnyChecker) -> None:
        """Lets this process answer for transactions of that checker: COMMIT, ROLLBACK or UNKNOWN for a Half, or a
        Deferred of it. Called on the reactor's thread; otherwise as the blocking client's.
        """
        self.blocking.register_checker(name, on_reactor(self.reactor, checker))

    @property
    def blocking(self) -> BlockingClient:
        """The blocking client that works for this one in threads, made at the first use."""
        if self._closed:
            raise closed()
        if self._blocking is None:
            self._blocking = BlockingClient(Core(self._url, self.settings, self._incarnation))
        return self._blocking

    def close(self) -> Deferred[None]:
        """Ends the client: consumers leave their groups, what has no receipt yet may still get it for a while."""
        return Deferred.fromCoroutine(self._close())

    def _begun(self, work: Coroutine[Deferred[Any], Any, T]) -> Deferred[T]:
        return Deferred.fromCoroutine(work)

    async def request(self, opcode: int, payload: Payload = b"", *, longer: float = 0.0, repeat: bool = False) -> bytes:
        """The payload of the reply, `longer` than usual if need be; `repeat` = it does no harm to ask again."""
        patience = self.settings.timeout + longer
        ends = self.reactor.seconds() + patience
        left = self.settings.retries if repeat else 0
        while True:
            link = await self.connected().link(ends - self.reactor.seconds())
            try:
                reply = link.request(opcode, payload)
                return await timed(self.reactor, reply, ends - self.reactor.seconds(), too_late(patience))
            except ConnectionLost:
                if not left:
                    raise
                left -= 1

    async def asked(
        self, name: str, args: dict[str, Any], *, longer: float = 0.0, repeat: bool = False
    ) -> dict[str, Any]:
        """What a control call returns."""
        return returned(await self.request(Opcode.CALL, encode_call(name, args), longer=longer, repeat=repeat))

    async def carried(self, opcode: int, payload: Payload) -> bytes:
        """The reply to a request that does no harm twice, over as many connections as it takes."""
        self.connected()
        return await self._sending.carry(opcode, payload)

    async def shape(self, topic: str) -> Shape:
        """The topic as last seen; the first look asks the broker."""
        return self.topics.known(topic) or await self._refresh(topic)

    async def _refresh(self, topic: str) -> Shape:
        self._shapes[topic] = await self.asked("topic.describe", {"names": [topic], "create": True}, repeat=True)
        return self.topics.refresh(topic)

    async def _send(self, topic: str, messages: Sequence[Message], partition: int | None) -> list[Receipt]:
        self.connected()
        await self.shape(topic)
        receipts = [self._sending.put(topic, message, partition) for message in messages]
        try:
            return list(await gatherResults(receipts, consumeErrors=True))
        except FirstError as first:  # what it wraps is what the caller is promised
            error: Any = first.subFailure.value
            raise error from None

    async def _send_columns(self, topic: str, rows: Rows, partition: int | None) -> list[StoredBatch]:
        await self.shape(topic)
        todo = list(cut(self.topics, topic, rows, partition, range(len(rows))))
        stored: list[StoredBatch] = []
        pause = FIRST_PAUSE_S
        while todo:
            done, error = await self._send_pieces(todo[:PIECES_AHEAD])
            stored += map(stored_batch, done)
            del todo[: len(done)]
            if isinstance(error, Throttled) and pause < LONGEST_PAUSE_S:
                await deferLater(self.reactor, pause)
                pause *= 2
            elif isinstance(error, StaleTopic):
                await self._refresh(topic)
                todo = [new for old in todo for new in cut(self.topics, topic, old.rows, old.asked, old.places)]
            elif error is not None:
                raise error
        return stored

    async def _send_pieces(self, pieces: Sequence[Piece]) -> tuple[list[Stored], BaseException | None]:
        """One producing session: what is stored, and why the rest, if any, is not, or not known to be."""
        producer, sequence = uuid4().bytes, 0
        replies: list[Deferred[bytes]] = []
        sequences: list[int] = []
        for piece in pieces:
            header = send_header(piece.topic, piece.partition, piece.epoch)
            batch = piece.rows.encode(producer, sequence)
            replies.append(self._begun(self.carried(Opcode.SEND, (header, batch))))
            sequences.append(sequence)
            sequence += len(piece.rows)
        stored: list[Stored] = []
        answers: list[tuple[bool, Any]] = await DeferredList(replies, consumeErrors=True)
        for piece, first, (is_there, answer) in zip(pieces, sequences, answers, strict=True):
            if not is_there:  # nor is any behind it: a session has no gaps
                return stored, answer.value
            stored.append(Stored(piece, f"{producer.hex()}-", first, receipt_of(answer)))
        return stored, None

    async def _read(self, wanted: Read) -> Found:
        payload = await self.request(Opcode.READ, pack_read(wanted), longer=wanted.max_wait_ms / 1_000, repeat=True)
        found = unpack_chunks(payload)
        messages: list[ReceivedMessage] = []
        for chunk in found.chunks:
            parcel = Parcel(chunk, owner=None, epoch=0, now=0.0)
            messages += [parcel.message(offset) for offset in range(max(parcel.start, wanted.offset), parcel.end)]
        return Found(messages, found.next_offset)

    async def _close(self) -> None:
        if self._closed:
            return
        for consumer in list(self._consumers):
            await consumer.close()
        self._closed = True
        ends = self.reactor.seconds() + self.settings.timeout
        while not self._sending.idle and self._connected is not None and self.reactor.seconds() < ends:
            await deferLater(self.reactor, 0.01)
        self._sending.close()
        if self._connected is not None:
            await self._connected.stop()
        if self._blocking is not None:
            await self._threads.run(self._blocking.close, self.settings.timeout)
        await self._threads.stop()
