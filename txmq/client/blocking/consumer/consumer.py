"""Blocking consumers: messages come out of an iterator, or go to handlers in
threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, overload

from txmq.client.blocking.consumer.group_member import ThreadedMember
from txmq.client.blocking.consumer.members import ThreadedMembers
from txmq.client.blocking.consumer.runner import run_plain
from txmq.client.blocking.core import BlockingCore
from txmq.client.protocol.consumer.checked_operations import operations_type
from txmq.client.protocol.consumer.consumer_calls import ConsumerCalls, SingleConsumer
from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
from txmq.client.protocol.consumer.handlers import D, handler_options, require_handler
from txmq.client.protocol.consumer.settings import (
    ConsumerOptions,
    consumer_settings,
)
from txmq.client.protocol.settings import CLOSE_S
from txmq.client.protocol.typed.bodies import Topics
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import ReceivedMessage

if TYPE_CHECKING:
    from txmq.tx.postgres.driver import BlockingConnection

B = TypeVar("B", bound="BlockingConnection")


def consume(
    core: BlockingCore, group: str, topics: Topics, **options: Unpack[ConsumerOptions]
) -> Consumer:
    """Return a consumer that has joined its group, within the client's `timeout`.

    Raises LocalProtocolError for invalid settings, BrokerUnavailable, and the broker's
    refusal: UnknownTopic, or GroupMismatch where the group has other settings.
    """
    members = ThreadedMembers([core], consumer_settings(group, topics, **options))
    members.join(core.settings.timeout)
    return Consumer(members)


def consume_cluster(
    cores: Sequence[BlockingCore],
    group: str,
    topics: Topics,
    timeout: float,
    **options: Unpack[ConsumerOptions],
) -> Consumers:
    """Return a consumer that has joined its group at each broker that answers within
    `timeout`. Raises as `consume` does.
    """
    members = ThreadedMembers(cores, consumer_settings(group, topics, **options), of_several=True)
    members.join(timeout)
    return Consumers(members)


class BlockingConsumer(ConsumerCalls[ThreadedMember]):
    """A consumer of one broker or of several. For any number of threads, and for use
    with `with`.
    """

    _members: ThreadedMembers

    def __init__(self, members: ThreadedMembers) -> None:
        self.settings = members.settings
        self._members = members
        self._single = members.single
        self._operations = operations_type(self.settings)

    def __iter__(self) -> Iterator[DeliveredMessage]:
        """Yield messages until the consumer is closed."""
        while (message := self.receive()) is not None:
            yield message

    def batches(self) -> Iterator[ReceivedBatch]:
        """Yield messages as they came together, until the consumer is closed.

        The fast path for volumes: the columns of a batch (`bodies`, `keys`, `offsets`
        ...) are decoded at once. In an ordered group a partition's next batch comes
        when the one before it is settled.
        """
        while (batch := self.receive_batch()) is not None:
            yield batch

    def receive(self, timeout: Duration | None = None) -> DeliveredMessage | None:
        """Return the next message; None after `timeout` seconds without one, and once
        the consumer is closed.

        Raises the error that ended the consumer, such as another process with the name
        of its member.
        """
        return self._members.receive(self._operations.receive, seconds_of(timeout, "timeout"))

    def receive_many(
        self, most: int, timeout: Duration | None = None, *, batch_wait: Duration = 0.0
    ) -> list[DeliveredMessage]:
        """Wait as `receive` does for a first message, and return it with others that
        are there, at most so many.

        `batch_wait`: seconds to wait for more. In an ordered group several messages may
        be of one key, and are to be processed in their order.
        """
        return self._members.receive_many(
            most,
            seconds_of(timeout, "timeout"),
            batch_wait=seconds_of(batch_wait, "batch_wait"),
        )

    def receive_batch(self, timeout: Duration | None = None) -> ReceivedBatch | None:
        """Return the next batch; otherwise as `receive`."""
        return self._members.receive(self._operations.receive_batch, seconds_of(timeout, "timeout"))

    def tell(self, told: Callable[[], object]) -> None:
        """Have `told` called by any thread whenever messages may have come, for an
        event loop that then calls `receive(0)`. It must not wait.
        """
        with self._members.changed:
            self._members.changed.told = told

    @property
    def settled(self) -> bool:
        """True if the broker has confirmed all acks, nacks and returned messages."""
        with self._members.changed:
            return all(member.member.settlement.idle for member in self._members.members)

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> None:
        """Ack a processed message. Returns at once: acks are sent together, within
        10 ms.

        An ack that is lost or too late means that the message is delivered again. With
        `wait`, return when the broker has the ack in its log. Then it raises
        RequestTimeout where that takes too long, and NotLeased where the message was
        settled already or its lease had run out.
        """
        member = self._single or self._members.member_of(message)
        with member.changed.lock:
            number = member.operations.ack(message, time.monotonic())
            if wait or member.acks.needs_wakeup or member.changed.waiting:
                member.acks_added(wait=wait)
            if wait:
                member.wait_confirmed(number, message)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> None:
        """Ack all messages of the batch that are not settled yet. `wait` as in
        `ack`.
        """
        member = self._single or self._members.member_of(batch)
        with member.changed:
            number = member.operations.ack_batch(batch, time.monotonic())
            member.acks_added(wait=wait)
            if wait:
                member.wait_confirmed(number, batch)

    @overload
    def run(
        self,
        handler: Callable[[DeliveredMessage], None],
        *,
        inbox: None = None,
        workers: int = 1,
        batch: None = None,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
        stop: Event | None = None,
    ) -> None: ...

    @overload
    def run(
        self,
        handler: Callable[[list[D]], None],
        *,
        inbox: None = None,
        workers: int = 1,
        batch: int,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
        stop: Event | None = None,
    ) -> None: ...

    @overload
    def run(
        self,
        handler: Callable[[DeliveredMessage, B], None],
        *,
        inbox: Callable[[], B],
        workers: int = 1,
        batch: None = None,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
        stop: Event | None = None,
    ) -> None: ...

    @overload
    def run(
        self,
        handler: Callable[[list[D], B], None],
        *,
        inbox: Callable[[], B],
        workers: int = 1,
        batch: int,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
        stop: Event | None = None,
    ) -> None: ...

    def run(
        self,
        handler: Callable[..., None],
        *,
        inbox: Callable[[], BlockingConnection] | None = None,
        workers: int = 1,
        batch: int | None = None,
        batch_wait: Duration = 0.0,
        idle_exit: Duration | None = None,
        stop: Event | None = None,
    ) -> None:
        """Call the handler for each message, until `stop` is set or the consumer is
        closed. `workers`: in so many threads.

        `handler(message)`: a message is acked when the handler returns. When it raises,
        the message is nacked, and retried by the group's policy. So it is where the
        handler returns a coroutine, generator or future, whose work may not be done.
        Raises LocalProtocolError for a coroutine function or a generator function.

        `inbox`, a function that connects to PostgreSQL: then `handler(message,
        connection)` runs in a transaction that also records the message, and its effect
        comes exactly once, however often the message is delivered. The transaction is
        committed here. Serialization failures and deadlocks are run again in place.

        `batch`: the handler gets lists of up to so many messages instead, and
        `batch_wait` is the time in seconds for a list to fill. A list that fails with
        an inbox is split, so that only the messages at fault fail. Where the handler
        nacks messages itself, its transaction is rolled back, and it is called once
        more with the rest. `idle_exit`: seconds without a message after which to
        return.
        """
        options = handler_options(workers, batch, batch_wait, idle_exit)
        require_handler(handler, inbox)
        self._members.set_workers(workers * (batch or 1))
        if inbox is None:
            run_plain(self._members, handler, options, stop or Event())
            return
        # psycopg2 is for those who have a database.
        from txmq.client.blocking.consumer.inbox import run_with_inbox  # noqa: PLC0415

        run_with_inbox(self._members, handler, inbox, options, stop or Event())

    def close(self, timeout: Duration = CLOSE_S) -> None:
        """Leave the group: handlers may finish, what waits locally is returned, acks
        reach the broker.

        After `timeout` seconds the rest is left to the leases. Outstanding messages are
        then delivered to other members. Called by a handler, or by the handler of a
        signal on its thread, it returns at once: `run` leaves the group when it ends.
        """
        self._members.close(seconds_of(timeout, "timeout"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Consumer(BlockingConsumer, SingleConsumer[ThreadedMember]):
    """A member of a consumer group. For any number of threads, and for use with `with`.
    Made by `client.consumer`.

    It fetches messages ahead, and keeps them leased while they wait locally. Lost
    connections and restarts of the broker are survived silently: what was not acked is
    delivered again. When a process dies, its messages go to other members as soon as
    its session lapses.

    In an ordered group the next message of a key comes only when the one before it was
    acked or nacked.
    """


class Consumers(BlockingConsumer):
    """A member of one group at each of several brokers. For any number of threads, and
    for use with `with`. Made by `consumer` of a client of several brokers.

    Messages of all brokers come out of it, and are settled at their own. A broker that
    is away stops only its own partitions. One that is found later is joined as well.
    """

    def _join_at(self, core: BlockingCore) -> None:
        """Join the group at another broker, beside, unless it is joined there."""
        name = f"txmq-{self.settings.group}-joins"
        Thread(target=self._members.join_at, args=(core,), name=name, daemon=True).start()
