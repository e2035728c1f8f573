"""A channel of Kombu's."""

from __future__ import annotations

import time
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING, Any, Final

from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual.base import BrokerState

from txmq.errors import TxmqError
from txmq.kombu.bindings import LISTENERS, Binding
from txmq.kombu.link import Link
from txmq.kombu.messages import read
from txmq.kombu.queues import Queue

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.client.protocol.consumer.fetched import DeliveredMessage

NOT_KOMBU: Final = "it is not readable"
VISIBILITY_S: Final = 12 * 3600.0  # after which a task that is still held has failed


class Channel(virtual.Channel):  # type: ignore[misc]  # Kombu has no types
    """A channel: consumers of the queues that it consumes from.

    A queue of one program, exclusive or one that expires with its last consumer, is a
    passing one once it is bound to an exchange: it lives in the memory of the
    connection (`Link.passing`). All others are topics.
    """

    supports_fanout = True
    do_restore = True

    def __init__(self, connection: Any, **options: Any) -> None:
        super().__init__(connection, **options)
        self._link: Link = connection.link
        self._declared: BrokerState = connection.state  # which a closed channel has not
        self._queues: dict[str, Queue] = {}
        self._held: dict[str, tuple[Queue, DeliveredMessage]] = {}  # by delivery tag
        self._unheld = set[str]()  # queues whose messages need no ack
        # Queues that end with the channel; whether others may share them.
        self._ending = dict[str, bool]()

    # --- exchanges and queues

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str = "direct",
        passive: bool = False,
        **options: Any,
    ) -> None:
        """Declare an exchange. Raises ChannelError where a passive one is not there, or
        it is of another type.
        """
        known = exchange and self._link.bindings.type_of(exchange)
        if passive and known and exchange not in self.state.exchanges:
            type, passive = known, False  # by another program
        if known and not passive and type != known:
            raise ChannelError(
                f"PRECONDITION_FAILED - exchange {exchange!r} has the type {known!r}",
                (40, 10),
                "Channel.exchange_declare",
                "406",
            )
        super().exchange_declare(exchange, type, passive=passive, **options)
        if exchange and not known:
            self._link.bindings.add(Binding(exchange, type or "direct"))

    def exchange_delete(self, exchange: str, *_arguments: Any, **_options: Any) -> None:
        """Delete an exchange with its bindings."""
        self.state.exchanges.pop(exchange, None)
        self._link.bindings.remove(exchange=exchange)

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        """Return the type of an exchange, whoever has declared it."""
        if exchange in self.state.exchanges:
            return super().typeof(exchange, default)
        return self.exchange_types[self._link.bindings.type_of(exchange) or default]

    def get_table(self, exchange: str) -> list[tuple[str, str | None, str]]:
        """Return the bindings of lasting queues to an exchange: as of now, or of a
        second ago where sends are not confirmed.
        """
        bindings = self._link.bindings
        (bindings.refresh if self._link.publishing.confirmed else bindings.look)()
        return bindings.table(exchange)

    def prepare_queue_arguments(
        self,
        arguments: dict[str, Any],
        **options: Any,
    ) -> dict[str, Any]:
        """Return the arguments with those that Kombu has names for."""
        prepared: dict[str, Any] = to_rabbitmq_queue_arguments(arguments, **options)
        return prepared

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        **options: Any,
    ) -> Any:
        """Declare a queue. Raises ChannelError where a passive one is not there."""
        exclusive, auto_delete = options.get("exclusive"), options.get("auto_delete")
        if queue and (exclusive or auto_delete) and not passive:
            expires = "x-expires" in (options.get("arguments") or ())
            self._ending[queue] = not (exclusive or expires)
        return super().queue_declare(queue, passive=passive, **options)

    def _has_queue(self, queue: str, **_options: Any) -> bool:
        return queue in self._link.passing or self._queue(queue).exists()

    def _new_queue(self, queue: str, arguments: Any = None, **_options: Any) -> None:
        ttl = (arguments or {}).get("x-message-ttl")
        if ttl is not None:
            self._link.ttls[queue] = ttl / 1_000
        if queue not in self._ending:  # others are made when they are sent to
            self._queue(queue).declare()

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        """Have the messages of an exchange come to a queue."""
        kind = self.typeof(exchange).type
        if queue in self._ending and (kind == "fanout" or not self._ending[queue]):
            self._link.listen(exchange, queue)
            self._link.bindings.add(Binding(exchange, kind, queue=LISTENERS))
        else:
            self._link.bindings.add(Binding(exchange, kind, routing_key, pattern, queue))

    def queue_unbind(
        self,
        queue: str,
        exchange: str,
        routing_key: str = "",
        arguments: Any = None,
        **_options: Any,
    ) -> None:
        """End a binding."""
        self.state.binding_delete(queue, exchange, routing_key)
        kind = self.typeof(exchange)
        meta = kind.prepare_bind(queue, exchange, routing_key, arguments)
        table = self.state.exchanges.get(exchange, {}).get("table", [])
        table[:] = [one for one in table if one != meta]
        self._link.bindings.unbind(Binding(exchange, kind.type, *meta))

    def queue_delete(
        self,
        queue: str,
        if_unused: bool = False,
        if_empty: bool = False,
        **_options: Any,
    ) -> None:
        """Delete a queue with its bindings and messages."""
        if (if_empty and self._size(queue)) or (if_unused and self._queue(queue).has_others()):
            return
        self._delete(queue)

    def _delete(self, queue: str, *_meta: Any, **_options: Any) -> None:
        self._declared.queue_bindings_delete(queue)
        for exchange in self._declared.exchanges.values():
            exchange["table"] = [one for one in exchange.get("table", ()) if one[2] != queue]
        self._ending.pop(queue, None)
        if self._link.passing.pop(queue, None) is None:
            self._link.bindings.remove(queue=queue)
            self._queue(queue).delete()
        self._queues.pop(queue, None)

    def _size(self, queue: str) -> int:
        if queue in self._link.passing:
            return len(self._link.passing[queue])
        return self._queue(queue).ready()

    def _purge(self, queue: str) -> int:
        passing = self._link.passing.get(queue)
        if passing is None:
            return self._queue(queue).purge()
        waiting = len(passing)
        passing.clear()
        return waiting

    def _queue(self, name: str) -> Queue:
        if name not in self._queues:
            link = self._link
            held = link.option("visibility_timeout", VISIBILITY_S)
            self._queues[name] = Queue(link.client, link.names.queue(name), held, link.wake)
        return self._queues[name]

    # --- sends

    def basic_publish(
        self,
        message: dict[str, Any],
        exchange: str,
        routing_key: str,
        **_options: Any,
    ) -> None:
        """Send to each queue that is bound, and to those who listen to the exchange."""
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            self._put(routing_key, message)
            return
        self._link.publishing.check()  # before a read of the bindings meets the same trouble
        table = self.get_table(exchange)
        queues = self.typeof(exchange).lookup(table, exchange, routing_key, None)
        listened = self._link.bindings.is_listened(exchange)
        if not queues and not listened and self.deadletter_queue:
            queues = [self.deadletter_queue]
        for queue in sorted(queues):
            self._put(queue, message)
        if listened:
            self._link.publishing.say(
                self._link.names.exchange(exchange), routing_key or "", message
            )

    def _put(self, queue: str, message: dict[str, Any], **_options: Any) -> None:
        link = self._link
        link.publishing.put(link.names.queue(queue), message, link.ttls.get(queue))

    # --- deliveries

    def basic_qos(
        self,
        prefetch_size: int = 0,
        prefetch_count: int = 0,
        apply_global: bool = False,
    ) -> None:
        """Let so many messages be in hand at a time; 0 = any number."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self._link.wake()

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], object],
        consumer_tag: str,
        **options: Any,
    ) -> None:
        """Have the messages of a queue delivered; with `no_ack` they need no ack."""
        (self._unheld.add if no_ack else self._unheld.discard)(queue)
        super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        if queue not in self._link.passing:
            self._queue(queue).consume(self.qos.prefetch_count)

    def basic_cancel(self, consumer_tag: str) -> None:
        """End a consumer."""
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue in self._queues and queue not in self._active_queues:
            self._queues[queue].cancel()

    def basic_get(self, queue: str, no_ack: bool = False, **_options: Any) -> Any:
        """Return a message that waits, or None."""
        raw = self._taken_from(queue, None, no_ack=no_ack)
        if raw is None:
            return None
        message = self.Message(raw, channel=self)
        if not no_ack:
            self.qos.append(message, message.delivery_tag)
        return message

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:
        """Deliver a message. Raises Empty."""
        del timeout  # the connection waits, for all of its channels
        if not self.deliver_one(callback or self.connection._deliver):  # noqa: SLF001  # Kombu's own way
            raise Empty

    def deliver_one(self, deliver: Callable[[Any, str], object]) -> bool:
        """Deliver a message that has come; return whether there was one."""
        if not self._consumers or not self.qos.can_consume():
            return False
        for queue in list(self._active_queues):
            used = self._queues.get(queue)
            if used is None and queue not in self._link.passing:
                continue  # it was deleted
            raw = self._taken_from(queue, used, no_ack=queue in self._unheld)
            if raw is not None:
                self._active_queues.remove(queue)  # the next one's turn
                self._active_queues.append(queue)
                deliver(raw, queue)
                return True
        return False

    def _taken_from(self, name: str, used: Queue | None, *, no_ack: bool) -> dict[str, Any] | None:
        """Return a message of a queue: of one that is `used`, what has come; else what
        waits.
        """
        passing = self._link.passing.get(name)
        if passing is not None:
            while passing:
                expires_at, raw = passing.popleft()
                if time.time() < expires_at:
                    raw["properties"]["delivery_tag"] = self._next_delivery_tag()
                    return raw
            return None
        queue = used or self._queue(name)
        while (message := queue.receive() if used else queue.get()) is not None:
            try:
                raw = read(message.body)
            except ValueError as error:
                queue.dead_letter(message, f"{NOT_KOMBU}: {error}")
                continue
            self._hold(raw, queue, message, no_ack=no_ack)
            return raw
        return None

    def _hold(
        self, raw: dict[str, Any], queue: Queue, message: DeliveredMessage, *, no_ack: bool
    ) -> None:
        # Not the sender's tag: a message that comes once more has another one, so that
        # a late word about the first delivery settles nothing of the second.
        raw["properties"]["delivery_tag"] = tag = self._next_delivery_tag()
        raw["properties"]["delivery_info"]["redelivered"] = message.fetched.redelivered
        if no_ack:
            queue.ack(message)
        else:
            self._held[tag] = (queue, message)

    # --- outcomes

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Ack a message."""
        held = self._taken(delivery_tag)
        if held is not None:
            queue, message = held
            queue.ack(message)
        super().basic_ack(delivery_tag, multiple)
        self._link.wake()  # its place is free

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give a message back, or (without `requeue`) make it a dead letter."""
        held = self._taken(delivery_tag)
        if held is not None:
            queue, message = held
            if requeue:
                queue.postpone(message)
            else:
                queue.dead_letter(message, "rejected by the worker")
        super().basic_ack(delivery_tag)
        self._link.wake()

    def _taken(self, delivery_tag: str) -> tuple[Queue, DeliveredMessage] | None:
        """Return a message that is to be settled; None where others have it by now."""
        queue, message = self._held.pop(delivery_tag, (None, None))
        if queue is None or message is None or not (message.in_hand and queue.is_joined):
            return None
        return queue, message

    def _restore(self, message: Any) -> None:
        """Give back what is not acked when the channel closes."""
        held = self._taken(message.delivery_tag)
        if held is not None:
            queue, delivered = held
            queue.postpone(delivered)

    def close(self) -> None:
        """Give back what is held, and delete the queues that end with the channel."""
        if self.closed:
            return
        super().close()
        with suppress(TxmqError):
            for name in list(self._ending):
                used = self._queues.get(name)
                unused = used is not None and used.was_consumed and not used.has_others()
                if unused or name in self._link.passing:
                    self._delete(name)
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()
