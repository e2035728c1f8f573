"""The state that all parts of an asyncio client share: connection, topics, sender."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar
from uuid import UUID

from txmq.client.aio.connection import (
    AioConnection,
    Connector,
    PersistentConnection,
    request_timeout,
)
from txmq.client.aio.loop import ClientLoop, cancelled, expire
from txmq.client.aio.sender import AioSender
from txmq.client.protocol.address import Addresses, parse_url
from txmq.client.protocol.conversation import (
    Conversation,
    LogIdentity,
    MeetsLog,
    Payload,
    client_closed,
    pause_before_repeat,
)
from txmq.client.protocol.identity import ProducerInstance
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.sender.topics import TopicCache, TopicMetadata
from txmq.client.protocol.settings import ClientSettings
from txmq.client.protocol.transaction.outbox_stamp import KnownStamp
from txmq.errors import ConnectionLost, Throttled, TxmqError
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.json import parse_result

T = TypeVar("T")


class AioCore(MeetsLog):
    """The shared state of one client, for the loop that uses it first."""

    def __init__(
        self,
        url: str | Addresses,
        settings: ClientSettings,
        *,
        failover_after: float | None = None,
    ) -> None:
        """See AioSender for `failover_after`. Raises ConfigError."""
        self.settings = settings
        self.topics = TopicCache(
            self._described, settings.partitioner, settings.body_compression, settings.telemetry
        )
        self.closed = False
        self._failover_after = failover_after
        self._url, self._addresses = url, parse_url(url)
        self._log = LogIdentity(settings.log_id)
        self._connector = Connector(self._addresses, self._log)
        self._instance = settings.producer_instance()
        self._descriptions: dict[str, dict[str, Any]] = {}
        self._loop = ClientLoop()
        self._sender: AioSender | None = None
        self._connection: PersistentConnection | None = None
        self._tasks = set[asyncio.Task[object]]()  # that nobody waits for before `close`
        self._closing: asyncio.Task[None] | None = None
        # Answers the broker's questions about half messages from now on. A core without
        # a client is asked nothing.
        self.answer_checks: Callable[[], None] = lambda: None
        # Of the databases, by system identifier and oid: see awaited/outbox.py.
        self.outbox_stamps = defaultdict[tuple[int, int], KnownStamp](KnownStamp)

    @property
    def loop(self) -> AbstractEventLoop:
        """The client's loop. Raises LocalProtocolError outside it."""
        return self._loop.running()

    def seconds(self) -> float:
        """Return the time of the loop's clock."""
        return self._loop.running().time()

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""
        await asyncio.sleep(seconds)

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin work that nobody waits for before `close`. A TxmqError of it is
        dropped.
        """

        async def run() -> None:
            with suppress(TxmqError):
                await work

        task: asyncio.Task[object] = self.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _described(self, topic: str, within: float | None) -> dict[str, Any]:
        """Return the description that `refresh` has just received."""
        del within
        return self._descriptions.pop(topic)

    @property
    def identity(
        self,
    ) -> tuple[str | Addresses, ClientSettings, ProducerInstance | None, LogIdentity]:
        """URL, settings, instance and log of this client, for a blocking core."""
        return self._url, self.settings, self._instance, self._log

    async def log_id(self, within: float | None = None) -> UUID:
        """Return the id of the broker's log. Ask the broker where it is not known."""
        if self._log.log_id is None:
            await self.request(Opcode.PING, repeat=True, within=within)
        assert self._log.log_id is not None, "the welcome has it"
        return self._log.log_id

    @property
    def sender(self) -> AioSender:
        """The sender of this client, created at its first use."""
        loop = self._loop.running()
        if self.closed:
            raise client_closed()
        if self._sender is None:
            self._sender = AioSender(
                loop, self.topics, self.settings, self.refresh, self._failover_after
            )
        return self._sender

    def new_connection(self) -> AioConnection:
        """Return a protocol for a new connection. Replies without a waiting caller go
        to the sender.
        """
        return self._greeting(Conversation(self.settings.service, self._log, self._instance))

    def _greeting(self, conversation: Conversation) -> AioConnection:
        conversation.log_in(self._addresses.login)
        return AioConnection(self._loop.running(), conversation, self.sender.receive)

    def connection(self) -> PersistentConnection:
        """Return the connection of this client, created at its first use."""
        sender = self.sender
        if self._connection is None:
            self._connection = PersistentConnection(
                self._loop.running(), self._connector, self.new_connection, sender.attach
            )
        return self._connection

    @property
    def is_disconnected(self) -> bool:
        """True while there is no connection, so that another broker is a better
        choice.
        """
        return self._connection is not None and not self.sender.connected

    async def wait_connected(self, seconds: float) -> AioConnection:
        """Connect, within so many seconds. Raises BrokerUnavailable."""
        return await self.connection().wait_connected(seconds)

    def open_connection(
        self,
        attach: Callable[[AioConnection], None],
        refused: Callable[[TxmqError], None] | None = None,
    ) -> PersistentConnection:
        """Return another connection, for a consumer, a reader or checkers.

        See PersistentConnection for the arguments.
        """
        loop = self._loop.running()
        if self.closed:
            raise client_closed()
        return PersistentConnection(loop, self._connector, self.new_connection, attach, refused)

    async def request(
        self,
        opcode: int,
        payload: Payload = b"",
        *,
        longer: float = 0.0,
        repeat: bool = False,
        within: float | None = None,
    ) -> bytes:
        """Return the payload of the reply, `within` so many seconds and `longer`. A
        request that was refused with a pause is sent again after it.

        `repeat`: send the request again after a lost connection; this must do no harm.
        """
        loop = self._loop.running()
        seconds = (self.settings.timeout if within is None else within) + longer
        deadline = loop.time() + seconds
        left = self.settings.retries if repeat else 0
        sent = False
        try:
            while True:
                connection = await self.connection().wait_connected(deadline - loop.time())
                try:
                    reply, sent = connection.request(opcode, payload), True
                    connection.doubt_after(longer + self.settings.attempt_s, reply)
                    return await expire(
                        loop, reply, deadline - loop.time(), request_timeout(seconds)
                    )
                except ConnectionLost:
                    if not left:
                        raise
                    left -= 1
                except Throttled as refused:
                    sent = False
                    await asyncio.sleep(pause_before_repeat(refused, deadline - loop.time()))
        except asyncio.CancelledError as error:
            cancelled(error, "unknown" if sent else "not done", "a request to the broker")
            raise

    async def call(
        self,
        name: str,
        args: dict[str, Any],
        *,
        longer: float = 0.0,
        repeat: bool = False,
        within: float | None = None,
    ) -> dict[str, Any]:
        """Return the result of a control call. Raises as `request`."""
        return parse_result(
            await self.request(
                Opcode.CALL,
                encode_call(name, args),
                longer=longer,
                repeat=repeat,
                within=within,
            )
        )

    async def ask_any_node(
        self, name: str, args: dict[str, Any], deadline: float
    ) -> dict[str, Any]:
        """Return the result of a control call that each node of a cluster answers."""
        loop = self._loop.running()
        seconds = deadline - self.seconds()

        def asking() -> AioConnection:
            return self._greeting(Conversation(None, self._log, any_node=True))

        connection = PersistentConnection(loop, self._connector, asking, lambda _link: None)
        try:
            link = await connection.wait_connected(seconds)
            reply = link.request(Opcode.CALL, encode_call(name, args))
            return parse_result(await expire(loop, reply, seconds, request_timeout(seconds)))
        finally:
            await connection.stop()

    async def send_request(self, request: SideRequest[T]) -> T:
        """Return the decoded reply to a request, repeated after each lost connection.

        See SideRequest. To cancel it only ends the wait.
        """
        self.connection()
        try:
            return await self.sender.send_request(request)
        except asyncio.CancelledError as error:
            cancelled(error, "unknown", "a request to the broker")
            raise

    async def topic(self, topic: str) -> TopicMetadata:
        """Return a topic from the cache, or else from the broker."""
        return self.topics.cached(topic) or await self.refresh(topic)

    async def refresh(self, topic: str, within: float | None = None) -> TopicMetadata:
        """Return the topic as the broker describes it now, `within` so many seconds."""
        self._descriptions[topic] = await self.call(
            "topic.describe", {"names": [topic], "create": True}, repeat=True, within=within
        )
        return self.topics.refresh(topic)

    async def flush(self, seconds: float) -> bool:
        """Wait until every request has its answer. Return False after so
        many `seconds`.
        """
        return self._sender is None or await self._sender.flush(seconds)

    async def close(self) -> None:
        """Let sends finish for a while, then end all connections and tasks.

        A cancelled call goes on to its end: it has closed everything when it raises.
        """
        if self._closing is None:
            self._closing = self.loop.create_task(self._close(), name="txmq-close")
        await finish(self._closing)

    async def _close(self) -> None:
        if self._sender is not None and self._connection is not None:
            await self._sender.flush(self.settings.timeout)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.settings.timeout)
        self.closed = True
        if self._sender is not None:
            await self._sender.close()
        if self._connection is not None:
            await self._connection.stop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def finish(task: asyncio.Future[T]) -> T:
    """Wait for a task, or a future of it, that must not end half done.

    A cancellation of the wait is raised once the task has ended.
    """
    interrupt: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interrupt = interrupt or error
    if interrupt is not None:
        if not task.cancelled() and task.exception() is not None:
            raise interrupt from task.exception()
        raise interrupt
    return task.result()
