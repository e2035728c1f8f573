"""A queue as one channel uses it: a topic, and a consumer group of the same name."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import txmq
from txmq.errors import UnknownGroup, UnknownTopic

if TYPE_CHECKING:
    from txmq.client.protocol.consumer.fetched import DeliveredMessage

PREFETCH: Final = 64
FOUND_S: Final = 5.0  # for a message that is known to wait
LOOK_S, SETTLED_S = 0.1, 0.002  # between two looks


class Queue:
    """A queue, with a consumer as soon as one is needed.

    While nobody consumes, the consumer holds no messages that others could have: it is
    paused, and leaves the group as soon as nothing is in hand and nothing was found,
    because a member keeps its partitions.
    """

    def __init__(
        self, client: txmq.Client, topic: str, held_s: float, wake: Callable[[], object]
    ) -> None:
        self._client, self._topic, self._held_s, self._wake = client, topic, held_s, wake
        self._consumer: txmq.Consumer | None = None
        self._consuming = self.was_consumed = False
        self._in_hand: dict[tuple[int, int], DeliveredMessage] = {}  # by partition and offset

    def consume(self, prefetch: int) -> None:
        """Have messages come, at most so many before they are taken; 0 = many."""
        if self._consumer is None:
            self._consumer = self._join(min(prefetch or PREFETCH, PREFETCH))
        elif not self._consuming:
            self._consumer.resume()
        self._consuming = self.was_consumed = True

    def cancel(self) -> None:
        """Have no more messages come."""
        self._consuming = False
        self._rest()

    def _rest(self) -> None:
        """Leave the others what they may have."""
        if self._consumer is None or self._consuming:
            return
        if any(message.in_hand for message in self._in_hand.values()):
            self._consumer.pause()
        else:
            self.close()

    def _join(self, prefetch: int) -> txmq.Consumer:
        consumer = self._client.consumer(
            self._topic,
            [self._topic],
            consume_timeout=self._held_s,
            prefetch_messages=prefetch,
        )
        consumer.tell(self._wake)
        return consumer

    def receive(self) -> DeliveredMessage | None:
        """Return the next message that has come."""
        return None if self._consumer is None else self._noted(self._consumer.receive(0))

    def get(self) -> DeliveredMessage | None:
        """Return a message if one waits where this consumer may take it."""
        if self._consumer is None:
            if not self.ready():
                return None
            self._consumer = self._join(1)
        elif not self._consuming:
            self._consumer.resume()
        try:
            return self._noted(self._find(self._consumer))
        finally:
            self._rest()

    def _find(self, consumer: txmq.Consumer) -> DeliveredMessage | None:
        until = time.monotonic() + FOUND_S
        while (message := consumer.receive(0)) is None and time.monotonic() < until:
            if not self._ready(consumer, only_own=True):
                return None
            if (message := consumer.receive(LOOK_S)) is not None:
                return message
        return message

    def _noted(self, message: DeliveredMessage | None) -> DeliveredMessage | None:
        if message is not None:
            self._in_hand[message[1:3]] = message
        return message

    def postpone(self, message: DeliveredMessage) -> None:
        """Give a message back."""
        self._settling(message).postpone(message, 0)

    def dead_letter(self, message: DeliveredMessage, reason: str) -> None:
        """Make a message a dead letter."""
        self._settling(message).dead_letter(message, reason)

    def ack(self, message: DeliveredMessage) -> None:
        """Ack a message."""
        self._settling(message).ack(message)

    def _settling(self, message: DeliveredMessage) -> txmq.Consumer:
        assert self._consumer is not None, "it has received the message"
        self._in_hand.pop(message[1:3], None)
        return self._consumer

    def ready(self) -> int:
        """Return how many messages wait: those that no consumer holds, and those that
        have come to this one and that its program has not taken.
        """
        return self._ready(self._consumer)

    def _ready(self, consumer: txmq.Consumer | None, *, only_own: bool = False) -> int:
        """Return how many messages wait; `only_own`: where this consumer may take
        them, which are its partitions, and failed messages.
        """
        until = time.monotonic() + FOUND_S
        while consumer and not consumer.settled and time.monotonic() < until:
            time.sleep(SETTLED_S)  # else what was settled would count
        try:
            shown = self._client.call("group.show", group=self._topic)
        except UnknownGroup:
            return self._stored()
        member = consumer and consumer.member
        mine = [one for one in shown["positions"] if not only_own or member in one["owners"]]
        free = sum(one["unsettled"] - one["leased"] - one["reserved"] for one in mine)
        fetched = sum(one["leased"] for one in shown["member_list"] if one["member"] == member)
        in_hand = sum(message.in_hand for message in self._in_hand.values())
        return int(free + shown["retrying"] + fetched - in_hand)

    def _stored(self) -> int:
        try:
            shown = self._client.call("topic.show", name=self._topic)
        except UnknownTopic:
            return 0
        return int(sum(shown["ends"]) - sum(shown["firsts"]))

    @property
    def is_joined(self) -> bool:
        """True while it has a consumer."""
        return self._consumer is not None

    def has_others(self) -> bool:
        """Return whether another program or channel consumes from the queue."""
        try:
            members = self._client.call("group.show", group=self._topic)["members"]
        except UnknownGroup:
            return False
        return bool(members > (self._consumer is not None))

    def exists(self) -> bool:
        """Return whether the queue was declared, or sent to."""
        try:
            self._client.call("topic.show", name=self._topic)
        except UnknownTopic:
            return False
        return True

    def declare(self) -> None:
        """Make the topic, if it is not there."""
        self._client.call("topic.describe", names=[self._topic], create=True)

    def purge(self) -> int:
        """Pass over all messages that wait; return their number."""
        waiting = self.ready()
        if waiting:
            if self._consumer is None:  # so that the group exists
                self._consumer = self._join(1)
            self._consumer.pause()
            self._client.call("group.reset", group=self._topic, topic=self._topic, to="last")
            if self._consuming:
                self._consumer.resume()
            self._rest()
        return waiting

    def delete(self) -> None:
        """Delete the topic and its group, with all messages."""
        self.close()
        for call, name in (("group.delete", "group"), ("topic.delete", "name")):
            with suppress(UnknownGroup, UnknownTopic):
                self._client.call(call, **{name: self._topic}, operator="kombu", reason="")

    def close(self) -> None:
        """Leave the group: what was fetched and not taken goes to others."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
            self._in_hand.clear()
