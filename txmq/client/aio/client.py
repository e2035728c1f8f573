"""The client for programs on asyncio: each call is a coroutine."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import Any, NoReturn, Unpack
from uuid import UUID
from weakref import WeakSet

from txmq.client.aio.closing import AsyncCloseable
from txmq.client.aio.columns import send_columns
from txmq.client.aio.consumer.consumer import Consumer, join_group
from txmq.client.aio.consumer.members import LoopMembers
from txmq.client.aio.core import AioCore, finish
from txmq.client.aio.loop import cancelled, gather
from txmq.client.aio.reader import Reader
from txmq.client.aio.transaction.calls import TransactionCalls
from txmq.client.aio.transaction.checkers import Checker, Checkers
from txmq.client.aio.transaction.xa_resource import XaResource
from txmq.client.aio.typed import TypedTopicCalls
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.foreign_branch import ForeignBranch
from txmq.client.protocol.awaited.messages import AwaitedMessageCalls
from txmq.client.protocol.awaited.xa_resource import no_owner
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import Found, ReaderStart, found_in, read_payload
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.multi_send import SenderStats
from txmq.client.protocol.sender.rows import Fields, checked_messages, column_rows, micros_now
from txmq.client.protocol.settings import no_spool
from txmq.client.protocol.transaction.decision import is_published
from txmq.client.protocol.transaction.half_message import HalfBundle, HalfMessage
from txmq.client.protocol.transaction.options import CHECK_AFTER_S
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import RequestTimeout, TxmqError
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import Decision, Message, Receipt
from txmq.tx.xid import Xid
from txmq.wire.data_requests import Opcode

log = get_logger()


class Client(TransactionCalls, TypedTopicCalls, AwaitedMessageCalls, AsyncCloseable):
    """A client of one broker, for the event loop that uses it first. Made by
    `txmq.aio.connect`.

    An `async with` block closes it at its end. Calls raise as those of the blocking
    client: BrokerUnavailable where no broker answers in time, ClientClosed after
    `close`, a kind of RequestRejected where the broker refuses. Without an answer they
    raise ConnectionLost or RequestTimeout: whether the request was carried out is then
    unknown. `txmq.aio.outcome_of(error)` tells it of each error, that of a cancelled
    call included. In another loop, thread or process the client raises
    LocalProtocolError.
    """

    _core: AioCore

    def __init__(self, core: AioCore) -> None:
        self._core, self._cores = core, (core,)
        self._checkers = Checkers(core)
        core.answer_checks = self._checkers.start
        self._branches: dict[Xid, ForeignBranch] = {}  # of its XA resources
        self._consumers = WeakSet[LoopMembers]()  # live on without the object of their user
        self._readers = WeakSet[Reader]()
        self._closing: asyncio.Task[None] | None = None

    @property
    def spool(self) -> NoReturn:
        """A client on asyncio has no spool. Raises ConfigError."""
        raise no_spool()

    @property
    def stats(self) -> SenderStats:
        """The counters of sends."""
        return self._core.sender.stats

    async def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Receipt:
        """Send a message and return its receipt.

        Messages of one key keep their order. The messages of one turn of the loop share
        a frame. It waits while the window is full, up to the client's time-out.

        Where the call is cancelled before the message goes out, the message is taken
        back; later it may be stored. `txmq.aio.outcome_of(error)` tells which.
        """
        future = await self._accept(topic, Message(body, **fields), partition, None)
        try:
            return await future
        except asyncio.CancelledError as error:
            withdrawn = self._core.sender.withdraw(future)
            cancelled(error, "not done" if withdrawn else "unknown", "a send")
            raise

    async def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # as of the other faces
        **fields: Unpack[Fields],
    ) -> Future[Receipt]:
        """Send a message and return the future of its receipt.

        It waits only for room in the window, up to `timeout` seconds, and raises
        Throttled after them. To cancel the future ends the wait for the receipt; the
        message may be stored.
        """
        return await self._accept(
            topic, Message(body, **fields), partition, seconds_of(timeout, "timeout")
        )

    async def _accept(
        self, topic: str, message: Message, partition: int | None, patience: float | None
    ) -> Future[Receipt]:
        core = self._core
        core.connection()
        sender = core.sender
        if core.topics.cached(topic) is None or sender.full:
            try:
                await core.topic(topic)
                await sender.wait_for_room(core.settings.timeout if patience is None else patience)
            except asyncio.CancelledError as error:
                error.outcome = "not done"  # type: ignore[attr-defined]  # whatever the lookup said
                cancelled(error, "not done", "a send")
                raise
        return sender.send(topic, message, partition)

    async def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> list[Receipt]:
        """Send messages together and return their receipts in order.

        It is not all or nothing: see `transaction`.
        """
        futures: list[Future[Receipt]] = []
        try:
            for message in checked_messages(messages):
                # One by one: after an error those so far are known.
                futures.append(await self._accept(topic, message, partition, None))  # noqa: PERF401
            answers = await asyncio.gather(*futures, return_exceptions=True)
        except TxmqError as refused:
            for future in futures:
                future.add_done_callback(_retrieve)
            if futures:  # sent again as a whole, these would be stored twice
                refused.outcome = "unknown"
            raise
        except asyncio.CancelledError as error:
            withdrawn = [self._core.sender.withdraw(future) for future in futures]
            for future in futures:
                future.cancel()
            error.outcome = None  # type: ignore[attr-defined]  # of the last message
            cancelled(error, "not done" if all(withdrawn) else "unknown", "a batch of sends")
            raise
        return receipts_of(answers)

    async def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> list[StoredBatch]:
        """Send messages that are given as columns, the fast path for volumes.

        The rest is as for `send_batch`.
        """
        rows = column_rows(bodies, keys, tags, micros_now())
        return await send_columns(self._core, topic, rows, partition)

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message without a receipt.

        The message is lost where the broker is away or the window is full. Raises only
        for an invalid message, or ClientClosed.
        """
        self._core.connection()
        message = Message(body, **fields)

        async def send() -> None:
            try:
                future = await self._accept(topic, message, partition, 0.0)
                await future
            except TxmqError as error:
                log.warning("send.dropped", topic=topic, error=error.message)

        if self._core.topics.cached(topic) is None or self._core.sender.full:
            self._core.start(send())
            return
        future = self._core.sender.send(topic, message, partition)
        future.add_done_callback(lambda sent: log_dropped(sent, topic))

    async def flush(self, timeout: Duration | None = None) -> None:  # noqa: ASYNC109  # as of the other faces
        """Wait until each message has its receipt or has failed.

        Raises RequestTimeout.
        """
        patience = seconds_of(timeout, "timeout")
        if patience is None:
            patience = self._core.settings.delivery_timeout
        self._core.connection()
        if not await self._core.flush(patience):
            raise RequestTimeout(f"not everything had its receipt within {patience:.3g} s")

    async def log_id(self) -> UUID:
        """Return the identity of the broker's log. Its first use may connect to the
        broker.
        """
        return await self._core.log_id()

    def call(self, name: str, /, **args: object) -> Coroutine[Any, Any, dict[str, Any]]:
        """Make a control call and return its reply (docs/FORMATS.md 2.3).

        A long poll may take its `wait_ms` longer than other calls.
        """
        wait_ms = args.get("wait_ms", 0)
        longer = wait_ms / 1_000 if isinstance(wait_ms, int) else 0
        return self._core.call(name, args, longer=longer)

    async def read(self, topic: str, partition: int, offset: int, *, wait: Duration = 0.0) -> Found:
        """Read published messages from an offset on, without a consumer group.

        Waits up to `wait` seconds for the first message.
        """
        seconds = seconds_of(wait, "wait")
        wanted = read_payload(topic, partition, offset, seconds)
        return found_in(
            await self._core.request(Opcode.READ, wanted, longer=seconds, repeat=True), offset
        )

    async def consumer(
        self, group: str, topics: Topics, **options: Unpack[ConsumerOptions]
    ) -> Consumer:
        """Join a consumer group and return its new member.

        `txmq.ConsumerOptions` describes the options.
        """
        consumer = await join_group(
            Consumer, [self._core], group, topics, self._core.settings.timeout, **options
        )
        self._consumers.add(consumer._members)  # noqa: SLF001  # of this face
        return consumer

    async def reader(
        self,
        name: str,
        topics: Topics,
        offsets: OffsetStore,
        *,
        start: ReaderStart = "first",
    ) -> Reader:
        """Open a reader of all messages of topics, without a consumer group.

        `offsets` keeps the positions under the `name`; `txmq.FileOffsets(directory)`
        keeps them in files. It is called in a thread, one call at a time. The rest is
        as for the blocking client.
        """
        reader = Reader(self._core, name, topics, offsets, start)
        await reader.open()
        self._readers.add(reader)
        return reader

    def xa_resource(self, owner: str | None = None) -> XaResource:
        """Return the broker as a resource of another transaction manager.

        The rest is as for the blocking client; calls about a branch that has ended are
        coroutines.
        """
        named = owner or self._core.settings.service
        if named is None:
            raise no_owner()
        return XaResource(self._core, self._branches, named)

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
        """Store a half message: `half = await client.half(…)`.

        It returns once the message is durable. The local work follows, and then
        `await half.commit()` or `half.rollback()`. Half messages of one turn of the
        loop share a frame. The rest is as for `half_async` of the blocking client.
        """
        bundle = self._half_bundle(topic, Message(body, **fields), checker, partition, check_after)
        await self._core.topic(topic)
        return await self._store_half(bundle)

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
    ) -> Future[HalfMessage[Awaitable[bool]]]:
        """Store a half message and return the future of it; see `half`.

        It waits only for room in the window, as `send_async`. To cancel the future ends
        the wait for it; the checker then decides the message, where it is stored.
        """
        core = self._core
        bundle = self._half_bundle(topic, Message(body, **fields), checker, partition, check_after)
        core.connection()
        try:
            await core.topic(topic)
            patience = core.settings.timeout if timeout is None else seconds_of(timeout, "timeout")
            await core.sender.wait_for_room(patience)
        except asyncio.CancelledError as error:
            error.outcome = "not done"  # type: ignore[attr-defined]  # whatever the lookup said
            cancelled(error, "not done", "a half message")
            raise
        return core.loop.create_task(self._store_half(bundle))

    def _half_bundle(
        self,
        topic: str,
        message: Message,
        checker: str,
        partition: int | None,
        check_after: Duration,
    ) -> HalfBundle:
        core = self._core
        return HalfBundle.of(
            core.topics, core.settings, checker, topic, message, partition, check_after
        )

    async def _store_half(self, bundle: HalfBundle) -> HalfMessage[Awaitable[bool]]:
        core = self._core

        def decide(outcome: Decision) -> Awaitable[bool]:
            return core.send_request(
                SideRequest(Opcode.DECIDE, bundle.decide_request(outcome), is_published)
            )

        await core.send_request(
            SideRequest(
                Opcode.GROUP, bundle.store_request(), bundle.require_stored, bundle.store_request
            )
        )
        core.answer_checks()
        return bundle.half_message(decide)

    def register_checker(self, name: str, checker: Checker) -> None:
        """Let this process decide the half transactions of a checker.

        The checker gets a Half and returns COMMIT, ROLLBACK or UNKNOWN, or a coroutine
        of it. The rest is as for the blocking client.
        """
        self._checkers.register(name, checker)

    async def close(self) -> None:
        """Close the client: its consumers leave their groups.

        Messages without a receipt may still get it for a while. A cancelled call goes
        on to its end before it raises: no task of the client is left.
        """
        if self._closing is None:
            self._closing = self._core.loop.create_task(self._close(), name="txmq-close")
        await finish(self._closing)

    async def _close(self) -> None:
        consumers = [members.close() for members in self._consumers]
        ends = await gather([*consumers, *(reader.close() for reader in self._readers)])
        await self._checkers.close()
        await self._core.close()
        for end in ends:
            if isinstance(end, Exception):
                raise end


def receipts_of(answers: Sequence[Receipt | BaseException]) -> list[Receipt]:
    """Return the receipts. Raises an error if one is missing.

    Its outcome is unknown where other messages are stored.
    """
    receipts: list[Receipt] = []
    errors: list[TxmqError] = []
    for answer in answers:
        if isinstance(answer, TxmqError):
            errors.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            receipts.append(answer)
    if not errors:
        return receipts
    error = next((error for error in errors if error.outcome == "unknown"), errors[0])
    if receipts:
        error.outcome = "unknown"
    raise error


def log_dropped(sent: Future[Receipt], topic: str) -> None:
    """Log that a message of `send_one_way` is lost."""
    if not sent.cancelled() and (error := sent.exception()) is not None:
        log.warning("send.dropped", topic=topic, error=str(error))


def _retrieve(future: Future[Receipt]) -> None:
    """Take note of a failure that nobody will ask for."""
    if not future.cancelled():
        future.exception()
