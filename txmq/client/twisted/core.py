"""The state that all parts of a Twisted client share: connection, topics, sender."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar
from uuid import UUID

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.task import deferLater

from txmq.client.blocking.client import Client as BlockingClient
from txmq.client.blocking.core import BlockingCore
from txmq.client.protocol.address import parse_url
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
from txmq.client.protocol.sender.multi_send import warn_of_unsent
from txmq.client.protocol.sender.topics import TopicCache, TopicMetadata
from txmq.client.protocol.settings import EXIT_S, ClientSettings
from txmq.client.twisted.connection import (
    PersistentConnection,
    TwistedConnection,
    request_timeout,
    with_timeout,
)
from txmq.client.twisted.protocols import Reactor
from txmq.client.twisted.sender import TwistedSender
from txmq.client.twisted.threads import Threads
from txmq.errors import ConnectionLost, Throttled, TxmqError
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.json import parse_result

T = TypeVar("T")


class TwistedCore(MeetsLog):
    """The shared state of one client, for the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        url: str,
        settings: ClientSettings,
        *,
        failover_after: float | None = None,
        blocking_client: Callable[[TwistedCore], BlockingClient] | None = None,
    ) -> None:
        """See TwistedSender for `failover_after`, and `blocking` for
        `blocking_client`.
        """
        self._new_blocking = blocking_client or _blocking_client
        self.reactor, self.settings = reactor, settings
        self.threads = Threads(reactor, settings.connections)
        self.topics = TopicCache(
            self._described, settings.partitioner, settings.body_compression, settings.telemetry
        )
        self.sender = TwistedSender(reactor, self.topics, settings, self.refresh, failover_after)
        self.closed = False
        self._url, self._addresses = url, parse_url(url)
        self._log = LogIdentity(settings.log_id)
        self._instance = settings.producer_instance()
        self._descriptions: dict[str, dict[str, Any]] = {}
        self._blocking: BlockingClient | None = None
        self._connection: PersistentConnection | None = None
        self._at_shutdown: object = None

    def seconds(self) -> float:
        """Return the time of the reactor's clock."""
        now: float = self.reactor.seconds()
        return now

    def sleep(self, seconds: float) -> Deferred[None]:
        """Wait for so many seconds."""
        return deferLater(self.reactor, seconds)

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin work that nobody waits for. A TxmqError of it is dropped."""
        Deferred.fromCoroutine(work).addErrback(lambda failure: failure.trap(TxmqError))

    async def gather(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T | Exception]:
        """Begin all works at once, and wait until each has ended."""
        begun = [Deferred.fromCoroutine(work) for work in works]
        ends: list[tuple[bool, Any]] = await DeferredList(begun, consumeErrors=True)
        return [end if succeeded else end.value for succeeded, end in ends]

    def _described(self, topic: str) -> dict[str, Any]:
        """Return the description that `refresh` has just received."""
        return self._descriptions.pop(topic)

    async def log_id(self) -> UUID:
        """Return the id of the broker's log. Ask the broker where it is not known."""
        if self._log.log_id is None:
            await self.request(Opcode.PING, repeat=True)
        assert self._log.log_id is not None, "the welcome has it"
        return self._log.log_id

    @property
    def blocking(self) -> BlockingClient:
        """The blocking client that works for this one in threads, created at its first
        use.
        """
        if self.closed:
            raise client_closed("txmq.twisted.connect")
        if self._blocking is None:
            self._blocking = self._new_blocking(self)
        return self._blocking

    @property
    def identity(
        self,
    ) -> tuple[str, ClientSettings, ProducerInstance | None, LogIdentity]:
        """URL, settings, instance and log of this client, for a blocking core."""
        return self._url, self.settings, self._instance, self._log

    def new_connection(self) -> TwistedConnection:
        """Return a protocol for a new connection. Replies without a waiting caller go
        to the sender.
        """
        conversation = Conversation(self.settings.service, self._log, self._instance)
        conversation.log_in(self._addresses.login)
        return TwistedConnection(self.reactor, conversation, self.sender.receive)

    def connection(self) -> PersistentConnection:
        """Return the connection of this client, created at its first use."""
        if self.closed:
            raise client_closed("txmq.twisted.connect")
        if self._connection is None:
            self._at_shutdown = self.reactor.addSystemEventTrigger(
                "before", "shutdown", self._finish_at_shutdown
            )
            self._connection = PersistentConnection(
                self.reactor, self._addresses, self.new_connection, self.sender.attach
            )
        return self._connection

    @property
    def is_disconnected(self) -> bool:
        """True while there is no connection, so that another broker is a better
        choice.
        """
        return self._connection is not None and not self.sender.connected

    async def wait_connected(self, seconds: float) -> TwistedConnection:
        """Connect, within so many seconds. Raises BrokerUnavailable."""
        return await self.connection().wait_connected(seconds)

    def open_connection(
        self,
        attach: Callable[[TwistedConnection], None],
        refused: Callable[[TxmqError], None] | None = None,
    ) -> PersistentConnection:
        """Return another connection, for a consumer or a reader.

        See PersistentConnection for the arguments.
        """
        if self.closed:
            raise client_closed("txmq.twisted.connect")
        return PersistentConnection(
            self.reactor, self._addresses, self.new_connection, attach, refused
        )

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
        timeout = (self.settings.timeout if within is None else within) + longer
        deadline = self.reactor.seconds() + timeout
        while True:
            try:
                return await self._request(opcode, payload, timeout, deadline, repeat=repeat)
            except Throttled as refused:
                pause = pause_before_repeat(refused, deadline - self.reactor.seconds())
                await deferLater(self.reactor, pause)

    async def _request(
        self, opcode: int, payload: Payload, seconds: float, deadline: float, *, repeat: bool
    ) -> bytes:
        left = self.settings.retries if repeat else 0
        while True:
            connection = await self.connection().wait_connected(deadline - self.reactor.seconds())
            try:
                reply = connection.request(opcode, payload)
                return await with_timeout(
                    self.reactor, reply, deadline - self.reactor.seconds(), request_timeout(seconds)
                )
            except ConnectionLost:
                if not left:
                    raise
                left -= 1

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
        payload = encode_call(name, args)
        return parse_result(
            await self.request(Opcode.CALL, payload, longer=longer, repeat=repeat, within=within)
        )

    async def send_request(self, request: SideRequest[T]) -> T:
        """Return the decoded reply to a request, repeated after each lost connection.

        See SideRequest.
        """
        self.connection()
        return await self.sender.send_request(request)

    async def topic(self, topic: str) -> TopicMetadata:
        """Return a topic from the cache, or else from the broker."""
        return self.topics.cached(topic) or await self.refresh(topic)

    async def refresh(self, topic: str) -> TopicMetadata:
        """Return the topic as the broker describes it now."""
        self._descriptions[topic] = await self.call(
            "topic.describe", {"names": [topic], "create": True}, repeat=True
        )
        return self.topics.refresh(topic)

    async def flush(self, seconds: float) -> bool:
        """Wait until every request has its answer. Return False after so
        many `seconds`.
        """
        deadline = self.reactor.seconds() + seconds
        while not self.sender.idle and self.reactor.seconds() < deadline:
            await deferLater(self.reactor, 0.01)
        return self.sender.idle

    def _finish_at_shutdown(self) -> Deferred[None]:
        """Let sends finish for a while, because the reactor stops without `close`. Warn
        of messages without a receipt.
        """
        self._at_shutdown = None

        async def finish() -> None:
            if not self.closed and not await self.flush(EXIT_S):
                warn_of_unsent(self.sender.close())

        return Deferred.fromCoroutine(finish())

    async def close(self) -> None:
        """Let sends finish for a while, then end all connections and threads."""
        if self.closed:
            return
        self.closed = True
        if self._connection is not None:
            if self._at_shutdown is not None:
                self.reactor.removeSystemEventTrigger(self._at_shutdown)
            await self.flush(self.settings.timeout)
        self.sender.close()
        if self._connection is not None:
            await self._connection.stop()
        if self._blocking is not None:
            await self.threads.run(self._blocking.close, self.settings.timeout)
        await self.threads.stop()


def _blocking_client(core: TwistedCore) -> BlockingClient:
    return BlockingClient(BlockingCore(*core.identity))
