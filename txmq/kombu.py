"""A transport of Kombu: Celery's tasks are messages of txmq (extra `celery`).

    import txmq.kombu                                   # knows URLs that begin with txmq://
    app = Celery("shop", broker="txmq://127.0.0.1:7650")

A queue is a topic with a consumer group, both named `kombu.QUEUE`. A message stays
leased to the worker that has it, and goes to another one when that worker dies, within
seconds, however long its tasks take. `acks_late`, retries, `reject` and the result
backend work as Celery documents them. A task with a countdown or an eta waits at the
broker, not in a worker. A task that is rejected without requeue is a dead letter, which
`txmq dlq` shows.

Remote control, events and replies are for those who listen now: they go through one
topic that everybody reads from its end, and each process takes what its own queues are
bound to. Priorities are ignored.
"""

from __future__ import annotations

import socket
import time
from base64 import b64decode
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from queue import Empty
from typing import TYPE_CHECKING, Any, Final, Unpack, cast
from urllib.parse import quote, urlencode

from txmq.errors.extras import require

require("celery", "kombu")

from kombu.exceptions import OperationalError
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.utils.json import dumps, loads

import txmq
from txmq.client.blocking.after_fork import tell_after_fork
from txmq.client.protocol.sender.rows import Fields
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConnectionLost,
    RequestTimeout,
    TxmqError,
    UnknownGroup,
    UnknownTopic,
)

if TYPE_CHECKING:
    from txmq.client.protocol.consumer.fetched import DeliveredMessage
    from txmq.client.protocol.sender.promise import Promise
PREFIX: Final = "kombu."
CONTROL: Final = "kombu.control"  # no queue's topic: encoded names end with their queue's
PORT: Final = 7650
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-")
POLL_S = 0.01  # of a queue, while others may have messages
NOT_KOMBU: Final = "it is not readable"
VISIBILITY_S = 12 * 3600.0  # after which a task that is still held has failed

TRANSPORT_ALIASES["txmq"] = "txmq.kombu:Transport"


def topic_of(queue: str) -> str:
    """Return the topic of a queue: other characters than letters, digits, '.' and '-'
    become `_` and their code, so that no two queues share one.
    """
    return (
        PREFIX
        + "q."
        + "".join(
            char if char in PLAIN else "".join(f"_{byte:02x}" for byte in char.encode())
            for char in queue
        )
    )


def due_at(message: dict[str, Any]) -> datetime | None:
    """Return when a task of Celery's is due; None = now."""
    eta = (message.get("headers") or {}).get("eta")
    if not isinstance(eta, str):
        return None
    at = datetime.fromisoformat(eta)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def address_of(client: Any) -> str:  # noqa: ANN401  # Kombu's connection
    """Return the URL for txmq: with the connection's user, and TLS where `ssl` is set.

    Of its options `ca_certs` goes along; the names of txmq's own are those of its URLs.
    """
    options = dict(client.ssl) if isinstance(client.ssl, dict) else {}
    if "ca_certs" in options:
        options["ca"] = options.pop("ca_certs")
    user = quote(client.userid or "", safe="")
    if user and client.password:
        user += ":" + quote(client.password, safe="")
    host = client.hostname or "127.0.0.1"
    if ":" in host:  # an address of IPv6, which Kombu gives without its brackets
        host = f"[{host}]"
    place = f"{user}{'@' * bool(user)}{host}:{client.port or PORT}"
    query = "?" + urlencode(options) if options else ""
    return f"txmq{'s' * bool(client.ssl)}://{place}{query}"


def read(body: bytes) -> dict[str, Any]:
    """Return a message of Kombu's. Raises ValueError for anything else."""
    try:
        message: dict[str, Any] = loads(body)  # if it is one
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    match message:
        case {"body": str(text), "headers": dict(), "properties": {"delivery_info": dict()}}:
            encoding = message["properties"].get("body_encoding")
            if encoding == "base64":
                b64decode(text)
            elif encoding not in (None, "utf-8"):
                raise ValueError(f"its body has the encoding {encoding!r}")
            return message
    raise ValueError("it is no message of Kombu's")


class Channel(virtual.Channel):  # type: ignore[misc]  # Kombu has no types
    """A channel: consumers of the queues that it consumes from."""

    supports_fanout = True
    do_restore = True

    def __init__(self, connection: Transport, **options: Any) -> None:  # noqa: ANN401  # Kombu's
        super().__init__(connection, **options)
        self._queues: dict[str, txmq.Consumer] = {}
        self._control: txmq.Consumer | None = None
        self._heard: list[tuple[dict[str, Any], str]] = []  # control messages for own queues
        self._held: dict[str, tuple[txmq.Consumer, DeliveredMessage]] = {}
        self._transient: set[str] = set()

    # --- queues

    def queue_declare(self, queue: str | None = None, passive: bool = False, **options: Any) -> Any:  # noqa: ANN401, FBT001, FBT002  # Kombu's signature
        found = super().queue_declare(queue, passive=passive, **options)
        if options.get("auto_delete") or options.get("exclusive"):
            self._transient.add(found.queue)
        return found

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        """Listen to what is said now, if the queue is one of this process's own."""
        if queue in self._transient or self._is_fanout(exchange):
            self._transient.add(queue)
            self._listen()

    def _is_fanout(self, exchange: str) -> bool:
        return bool(self.typeof(exchange).type == "fanout")

    def _listen(self) -> None:
        if self._control is None:
            self._control = self._client.consumer(CONTROL, [CONTROL], mode="broadcast")

    def _size(self, queue: str) -> int:
        try:
            shown = self._client.call("group.show", group=topic_of(queue))
        except UnknownGroup:
            return self._stored(queue)
        return int(shown["unsettled"])

    def _stored(self, queue: str) -> int:
        try:
            shown = self._client.call("topic.show", name=topic_of(queue))
        except UnknownTopic:
            return 0
        return int(sum(shown["ends"]) - sum(shown["firsts"]))

    def _purge(self, queue: str) -> int:
        waiting = self._size(queue)
        if waiting:
            topic, consumer = topic_of(queue), self._consumer(queue)  # so the group exists
            if all(holder is not consumer for holder, _message in self._held.values()):
                self._queues.pop(queue).close()  # it gives back what it has fetched
            self._client.call("group.reset", group=topic, topic=topic, to="last")
        return waiting

    def _delete(self, queue: str, *_meta: Any, **_options: Any) -> None:  # noqa: ANN401  # Kombu's
        self._transient.discard(queue)
        consumer = self._queues.pop(queue, None)
        if consumer is not None:
            consumer.close()
        try:
            self._client.call("group.delete", group=topic_of(queue), operator="kombu", reason="")
            self._client.call("topic.delete", name=topic_of(queue), operator="kombu", reason="")
        except (UnknownGroup, UnknownTopic):
            pass

    # --- sends

    def _put(self, queue: str, message: dict[str, Any], **_options: Any) -> None:  # noqa: ANN401  # Kombu's
        self._send(topic_of(queue), message, deliver_at=due_at(message))

    def _put_fanout(
        self,
        exchange: str,
        message: dict[str, Any],
        routing_key: str,
        **_options: Any,  # noqa: ANN401  # Kombu's
    ) -> None:
        self._say(exchange, routing_key, message)

    def basic_publish(
        self,
        message: dict[str, Any],
        exchange: str,
        routing_key: str,
        **options: Any,  # noqa: ANN401  # Kombu's
    ) -> None:
        """Send to the queues that are bound here; else to those who listen now."""
        if exchange and not self._is_fanout(exchange) and not self._bound(exchange, routing_key):
            self._inplace_augment_message(message, exchange, routing_key)
            self._say(exchange, routing_key, message)
            return
        super().basic_publish(message, exchange, routing_key, **options)

    def _bound(self, exchange: str, routing_key: str) -> list[str]:
        """Return the lasting queues of an exchange that this process knows."""
        try:
            table = self.get_table(exchange)
        except KeyError:
            return []
        found = self.typeof(exchange).lookup(table, exchange, routing_key, None)
        return [queue for queue in found if queue not in self._transient]

    def _say(self, exchange: str, routing_key: str, message: dict[str, Any]) -> None:
        headers = {"exchange": exchange, "routing-key": routing_key or ""}
        self._send(CONTROL, message, headers=headers, ttl=3600)

    def _send(self, topic: str, message: dict[str, Any], **fields: Unpack[Fields]) -> None:
        self.connection.publishing.send(topic, dumps(message).encode(), **fields)

    # --- deliveries

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        consumer = self._consumer(queue)
        delivered = consumer.receive(timeout or 0)
        if delivered is None:
            raise Empty
        try:
            message = read(delivered.body)
        except ValueError as error:
            consumer.dead_letter(delivered, f"{NOT_KOMBU}: {error}")
            raise Empty from error
        properties = message["properties"]
        # Not the sender's tag: a message that comes once more has another one, so that
        # a late word about the first delivery settles nothing of the second.
        properties["delivery_tag"] = tag = self._next_delivery_tag()
        properties["delivery_info"]["redelivered"] = (
            delivered.attempt > 1 or delivered.fetched.moved
        )
        self._held[tag] = (consumer, delivered)
        return message

    def _consumer(self, queue: str) -> txmq.Consumer:
        consumer = self._queues.get(queue)
        if consumer is None:
            held = self.connection.client.transport_options.get("visibility_timeout", VISIBILITY_S)
            consumer = self._queues[queue] = self._client.consumer(
                topic_of(queue), [topic_of(queue)], consume_timeout=held, prefetch_messages=64
            )
        return consumer

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:  # noqa: ANN401  # Kombu's
        """Deliver one message; raises Empty where there is none within `timeout`."""
        deliver = callback or self.connection._deliver  # noqa: SLF001  # Kombu's own way
        if not self._consumers or not self.qos.can_consume():
            raise Empty
        self._hear()
        for number, (message, queue) in enumerate(self._heard):
            if queue in self._active_queues:
                del self._heard[number]
                deliver(message, queue)
                return
        lasting = [queue for queue in self._active_queues if queue not in self._transient]
        lasting += [queue for queue in self._transient if self._is_addressed(queue)]
        for number, queue in enumerate(lasting):
            wait = timeout if number == len(lasting) - 1 else 0
            try:
                message = self._get(queue, wait)
            except Empty:
                continue
            self._active_queues.append(self._active_queues.pop(0))  # the next one's turn
            deliver(message, queue)
            return
        raise Empty

    def _is_addressed(self, queue: str) -> bool:
        """Return whether others send to a queue by its name, as results are sent."""
        return queue in self._active_queues and not self.state.queue_index.get(queue)

    def _hear(self) -> None:
        """Take what was said to the queues of this channel."""
        while self._control is not None:
            said = self._control.receive(0)
            if said is None:
                return
            self._control.ack(said)
            exchange, routing_key = said.headers.get("exchange"), said.headers.get("routing-key")
            if exchange is None or routing_key is None:
                continue  # somebody else's
            with suppress(ValueError):  # no message of Kombu's
                for queue in self._listeners(exchange, routing_key):
                    self._heard.append((read(said.body), queue))

    def _listeners(self, exchange: str, routing_key: str) -> list[str]:
        try:
            table = self.get_table(exchange)
        except KeyError:
            return []  # nobody here has declared it
        if self._is_fanout(exchange):
            bound = {queue for _key, _pattern, queue in table}
        else:
            bound = set(self.typeof(exchange).lookup(table, exchange, routing_key, None))
        return [queue for queue in bound if queue in self._transient]

    # --- outcomes

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:  # noqa: FBT001, FBT002  # Kombu's signature
        held = self._taken(delivery_tag)
        if held is not None:
            consumer, delivered = held
            consumer.ack(delivered)
        super().basic_ack(delivery_tag, multiple)

    def _taken(self, delivery_tag: str) -> tuple[txmq.Consumer, DeliveredMessage] | None:
        """Return a message that is to be settled; None where others have it by now."""
        held = self._held.pop(delivery_tag, None)
        return held if held is not None and held[1].in_hand else None

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:  # noqa: FBT001, FBT002  # Kombu's signature
        """Give a message back, or (without `requeue`) make it a dead letter."""
        held = self._taken(delivery_tag)
        if held is not None:
            consumer, delivered = held
            if requeue:
                consumer.postpone(delivered, 0)
            else:
                consumer.dead_letter(delivered, "rejected by the worker")
        super().basic_ack(delivery_tag)

    def _restore(self, message: Any) -> None:  # noqa: ANN401  # Kombu's message
        """Give back what is not acked when the channel closes."""
        held = self._taken(message.delivery_tag)
        if held is not None:
            consumer, delivered = held
            consumer.postpone(delivered, 0)

    @property
    def _client(self) -> txmq.Client:
        client: txmq.Client = self.connection.txmq_client
        return client

    def close(self) -> None:
        if self.closed:
            return
        super().close()  # gives back what is held
        for consumer in (*self._queues.values(), self._control):
            if consumer is not None:
                consumer.close()
        self._queues.clear()
        self._control = None


class Publishing:
    """The messages that a connection sends.

    Each is stored on return. With the option `confirm_publish=False` it is on its way,
    and the client sends it again by itself where a connection is lost. What fails in
    the end is told by a later call.
    """

    def __init__(self, client: txmq.Client, *, confirmed: bool) -> None:
        self._client, self._confirmed = client, confirmed
        self._on_its_way: deque[Promise[txmq.Receipt]] = deque()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Leave to the parent what it has sent."""
        self._on_its_way = deque()

    def send(self, topic: str, body: bytes, **fields: Unpack[Fields]) -> None:
        """Send a message. Raises OperationalError where earlier ones are not stored:
        then this one is not sent.
        """
        if self._confirmed:
            self._client.send(topic, body, **fields)
            return
        self.check()
        sent = self._client.send_async(topic, body, **fields)
        self._on_its_way.append(cast("Promise[txmq.Receipt]", sent))  # to ask costs nothing

    def check(self) -> None:
        """Raise OperationalError where messages are not stored."""
        failed: list[TxmqError] = []
        while self._on_its_way and self._on_its_way[0].resolved:
            try:
                self._on_its_way.popleft().result()
            except TxmqError as error:
                failed.append(error)
        if failed:
            count = f"{len(failed)} messages that were sent before"
            raise OperationalError(f"{count} have no receipt: {failed[0]}") from failed[0]


class Transport(virtual.Transport):  # type: ignore[misc]  # Kombu has no types
    """A connection of Kombu's: one client of a broker."""

    Channel = Channel
    default_port = PORT
    polling_interval = None  # a channel waits by itself
    driver_type = driver_name = "txmq"
    connection_errors = (
        *virtual.Transport.connection_errors,
        BrokerUnavailable,
        ConnectionLost,
        ClientClosed,
        RequestTimeout,
    )
    channel_errors = (*virtual.Transport.channel_errors, TxmqError)
    # Without these Kombu takes refusals for lost connections, too: a task that is too
    # large would close the connection and be sent once more.
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = virtual.Transport.channel_errors
    implements = virtual.Transport.implements.extend(
        exchange_type=frozenset(["direct", "topic", "fanout"])
    )

    def __init__(self, client: Any, **options: Any) -> None:  # noqa: ANN401  # Kombu's
        super().__init__(client, **options)
        self.txmq_client = txmq.connect(
            address_of(client), service="celery", timeout=client.connect_timeout or 10.0
        )
        confirmed = client.transport_options.get("confirm_publish", True)
        self.publishing = Publishing(self.txmq_client, confirmed=bool(confirmed))

    def driver_version(self) -> str:
        return txmq.__version__

    def establish_connection(self) -> Transport:
        """Connect; raises BrokerUnavailable."""
        self.txmq_client.call("broker.show")
        super().establish_connection()
        return self

    def drain_events(self, connection: object, timeout: float | None = None) -> None:
        """Deliver a message of any channel; raises TimeoutError after `timeout`."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            for channel in list(self.channels):
                try:
                    channel.drain_events(POLL_S, self._deliver)
                except Empty:
                    continue
                return
            if until is not None and time.monotonic() >= until:
                raise socket.timeout  # noqa: UP041  # what Kombu's callers catch
            if not any(channel._consumers for channel in self.channels):  # noqa: SLF001  # Kombu's
                time.sleep(POLL_S)

    def close_connection(self, connection: object) -> None:
        try:
            super().close_connection(connection)
        finally:
            self.txmq_client.close()
        self.publishing.check()
