"""Consuming, blocking: messages come out of an iterator, or go to handlers in threads
(`Consumer.run`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Unpack

from txmq.client.blocking.consumer.base import ConsumerBase
from txmq.client.blocking.consumer.runner import Runs
from txmq.client.blocking.core import Core
from txmq.client.protocol.consumer.fetched import ReceivedBatch
from txmq.client.protocol.consumer.operations import NO_ACK, Delivered, came_too_late
from txmq.client.protocol.consumer.settings import Options, checked
from txmq.errors import NotLeased, RequestTimeout
from txmq.model.message import ReceivedMessage

ACK_S = 10.0  # how long `wait=True` waits


def consume(core: Core, group: str, topics: Iterable[str], **options: Unpack[Options]) -> Consumer:
    """A consumer that has joined its group, within the client's `timeout`.

    Raises LocalProtocolError for settings that cannot be meant, BrokerUnavailable, and
    why the broker refuses: UnknownTopic, GroupMismatch where the group has other
    settings.
    """
    names = topics if isinstance(topics, str) else list(topics)
    consumer = Consumer(core, checked(group, names, **options))
    consumer.join(core.settings.timeout)
    return consumer


class Consumer(ConsumerBase, Runs):
    """A member of a consumer group. For any number of threads, and for use with `with`.
    Made by `client.consumer`.

    It takes messages ahead and keeps them leased while they are here. A lost connection
    or a restarted broker is survived silently: what was not acked is delivered again. A
    process that dies loses nothing either, its messages go to others when its session
    lapses.

    In an ordered group the next message of a key comes only when the one before it was
    acked or nacked.
    """

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> None:
        """The message is processed. Returns at once: acks go out together, within 10
        ms.

        `wait` until the broker has it in its log; raises RequestTimeout where that
        takes too long, NotLeased where the message was not in hand any more, or its
        lease had run out. Without `wait` nobody is told: the message is simply
        delivered again.
        """
        with self._changed.lock:
            number = self._hands.ack(message, time.monotonic())
            if wait or self._acks.news or self._changed.waiting:
                self._settled(wait=wait)
            if wait:
                self._confirmed(number, message)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> None:
        """All messages of the batch are processed, but for those that were acked or
        nacked alone.
        """
        with self._changed:
            number = self._hands.ack_batch(batch, time.monotonic())
            self._settled(wait=wait)
            if wait:
                self._confirmed(number, batch)

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        """All of these messages are processed; as `ack` of each, at once."""
        with self._changed.lock:
            self._hands.ack_many(messages, time.monotonic())
            self._settled()

    def _settled(self, *, wait: bool = False) -> None:
        """Acks were taken in. `wait`: they are to go out at once."""
        settling = self._member.settling
        if self._changed.waiting and self.settings.ordered:
            self._changed.notify_all()  # the next message of the key may be taken
        if wait or self._acks.news:
            settling.hurry |= wait
            self._acks.news = False
            self._thread.poke()

    def _confirmed(self, number: int, delivered: Delivered) -> None:
        """Waits until the broker has the ack of that number."""
        if number == NO_ACK:
            raise NotLeased(
                "the message is not in hand", hint="it was acked or nacked before, or given back"
            )
        self._changed.wait_for(lambda: self._acks.confirmed(number) or self._gone, ACK_S)
        if not self._acks.confirmed(number):
            raise self._member.failure or RequestTimeout("the broker did not confirm the ack")
        if self._hands.refused(number, delivered):
            raise came_too_late()

    def nack(
        self,
        message: ReceivedMessage,
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """The message failed; it comes again after `delay` seconds, or by the policy of
        the group.

        `error` is kept with it. Later messages of its key wait for it in an ordered
        group. Raises NotLeased where it is not in hand.
        """
        with self._changed:
            self._hands.nack(message, delay, error)
            self._thread.poke()

    def nack_batch(
        self,
        batch: ReceivedBatch,
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """All messages of the batch failed, but for those that were acked or nacked
        alone.
        """
        self.nack_many(batch.messages(), delay, error)

    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """All of these messages failed, in this order, but for those that are not in
        hand any more.
        """
        with self._changed:
            self._hands.nack_many(messages, delay, error)
            self._thread.poke()

    def dead_letter(self, message: ReceivedMessage, reason: str) -> None:
        """The message goes to the dead letters at once. Raises NotLeased where it is
        not in hand.
        """
        with self._changed:
            self._hands.nack(message, None, reason, dead=True)
            self._thread.poke()

    def postpone(self, message: ReceivedMessage, delay: float | None = None) -> None:
        """The message cannot be processed yet, and that is no failure: it comes again
        after `delay` seconds (None = the first delay of the group's policy), and this
        delivery does not count.

        In an ordered group later messages of its key wait for it. Raises NotLeased
        where it is not in hand.
        """
        with self._changed:
            self._hands.postpone(message, delay)
            self._thread.poke()

    def extend(self, message: ReceivedMessage, seconds: float | None = None) -> None:
        """The message's handler needs longer: `seconds` from now on, None = as long as
        `consume_timeout_s` again.

        Raises NotLeased where it is not in hand, so that its handler may stop.
        """
        with self._changed:
            self._hands.extend(message, seconds, time.monotonic())

    def give_back(self, messages: Iterable[ReceivedMessage]) -> None:
        """Hands messages back as if they had never been taken.

        In an ordered group only after a nack of an earlier message of their key, or
        before `close`: else later ones could overtake them.
        """
        with self._changed:
            for message in messages:
                self._hands.give_back(message, time.monotonic())
            self._changed.notify_all()
            self._thread.poke()
