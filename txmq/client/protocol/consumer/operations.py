"""The operations of users on messages, for all faces of the client."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.failure import describe_failure
from txmq.client.protocol.consumer.fetched import (
    IN_TRANSACTION,
    NACKED,
    OUTSTANDING,
    DeliveredMessage,
    ReceivedBatch,
)
from txmq.client.protocol.consumer.member import Member
from txmq.client.protocol.consumer.pace import Pace
from txmq.client.protocol.consumer.settlement import PendingNack, place_name
from txmq.client.protocol.consumer.stored_delivery import stored_delivery
from txmq.errors import LocalProtocolError, NotLeased
from txmq.model.actions import AckAction
from txmq.model.message import ReceivedMessage
from txmq.model.retry import FailureReport
from txmq.wire.data_requests import AckedRange

MAX_DELAY_S = 12 * 3_600
NO_ACK = 0  # the number of an ack that changed nothing; it counts as confirmed
IN_STORE = -1  # and of the ack of a stored message, which the store takes care of
SETTLED_BEFORE = "it was acked, nacked or given back before"
Delivered = ReceivedMessage | ReceivedBatch
log = get_logger()


class Operations:
    """Receive and settle messages of a member. Not thread-safe.

    Operations that receive raise the failure of the member.
    """

    # Messages were dead-lettered at receipt: the broker is to be told.
    has_refused = False
    on_refused: Callable[[DeliveredMessage, BaseException], object] | None = None
    pace: Pace | None = None  # of all members of the consumer

    def __init__(self, member: Member) -> None:
        self._member = member

    def receive_many(self, most: int, now: float) -> list[DeliveredMessage]:
        """Return at most so many messages."""
        pace = self.pace
        if pace is None:
            return self._receive_many(most, now)
        messages = self._receive_many(pace.room(most, now), now)
        if messages:
            pace.took(len(messages), now)
        return messages

    def _receive_many(self, most: int, now: float) -> list[DeliveredMessage]:
        member = self._member
        if member.failure is not None:
            raise member.failure
        if not most:
            return []
        recovery = member.recovery
        if recovery is not None and recovery.ready and (stored := recovery.receive(most, now)):
            return stored
        if not member.queue.ready:
            return []
        messages = member.queue.pop_many(most, now=now)
        member.stats.delivered += len(messages)
        return messages

    def receive(self, now: float) -> DeliveredMessage | None:
        """Return the next message."""
        if self.pace is not None:
            return next(iter(self.receive_many(1, now)), None)
        member = self._member
        if member.failure is not None:
            raise member.failure
        recovery = member.recovery
        if recovery is not None and recovery.ready and (stored := recovery.receive(1, now)):
            return stored[0]
        if not member.queue.ready:
            return None
        message = member.queue.pop(now=now)
        member.stats.delivered += message is not None
        return message

    def receive_batch(self, now: float) -> ReceivedBatch | None:
        """Return the messages of one delivery."""
        member, pace = self._member, self.pace
        if member.failure is not None:
            raise member.failure
        if member.recovery is not None:
            raise LocalProtocolError(
                "a consumer with a local store receives messages, no batches of columns",
                hint="use receive_many(), or run(…, batch=50)",
            )
        if pace is not None and not pace.room(1, now):
            return None
        batch = member.queue.pop_batch(now=now)
        if batch is not None:
            member.stats.delivered += len(batch)
            if pace is not None:
                pace.took(len(batch), now)
        return batch

    def ack(self, message: ReceivedMessage, now: float) -> int:
        """Ack a message. Return the number of the ack; `NO_ACK` where the message is
        not outstanding.
        """
        member, (topic, partition, offset) = self._member, message[:3]
        recovery = member.recovery
        if recovery is not None and recovery.attempts:  # some message may be a stored one
            stored = stored_delivery(message)
            if stored is not None:
                return IN_STORE if recovery.ack(stored) else NO_ACK
        if not isinstance(message, DeliveredMessage):
            count = member.queue.settle(_place(message), now=now)
        elif member.queue.settle_one(message, now=now):  # the hot path, without a further call
            member.stats.acked += 1
            return member.settlement.acks.add(topic, partition, offset, offset + 1, now)
        else:
            count = 0
        return self._add_ack(topic, partition, offset, offset + 1, count, now)

    def ack_batch(self, batch: ReceivedBatch, now: float) -> int:
        """Ack the messages of a batch that are outstanding."""
        number, fetched, queue = NO_ACK, batch.fetched, self._member.queue
        for each in list(fetched.ranges(OUTSTANDING)):
            if not queue.redeliver(each):
                number = self._add_ack(*each, queue.settle(each, fetched, now=now), now)
        return number

    def ack_many(self, messages: Iterable[ReceivedMessage], now: float) -> None:
        """Ack the messages that are outstanding."""
        for message in messages:
            self.ack(message, now)

    def ack_refused(self, number: int, delivered: Delivered) -> bool:
        """Return whether the broker refused any of the ack of that number as too
        late.
        """
        place = _place(delivered) if isinstance(delivered, ReceivedMessage) else _whole(delivered)
        return self._member.settlement.acks.was_refused(number, place)

    def _add_ack(
        self, topic: str, partition: int, start: int, end: int, count: int, now: float
    ) -> int:
        if count:
            self._member.stats.acked += count
            return self._member.settlement.acks.add(topic, partition, start, end, now)
        place = AckedRange(topic, partition, start, end)
        if place in self._member.settlement.timed_out:
            log.warning(
                "message.ack_late",
                place=place_name(place),
                hint="it exceeded the consume timeout, and is delivered again",
            )
        return NO_ACK

    def nack(
        self,
        message: ReceivedMessage,
        delay: float | None,
        error: BaseException | str | None,
        *,
        dead: bool = False,
    ) -> None:
        """Nack a failed message. `delay`: seconds until it is delivered again.

        Raises NotLeased where the message is not outstanding.
        """
        failure = describe_failure(error)
        if dead and not failure.type:
            failure = FailureReport("dead-lettered", failure.text, failure.fingerprint)
        delay_ms = None if delay is None else _milliseconds(delay)
        self._nack(message, PendingNack(_place(message), message.key, delay_ms, failure, dead))

    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None,
        error: BaseException | str | None,
    ) -> None:
        """Nack the messages that are outstanding, in this order."""
        for message in filter(self.is_outstanding, messages):
            self.nack(message, delay, error)

    def postpone(self, message: ReceivedMessage, delay: float | None) -> None:
        """Have the message delivered again in `delay` seconds, as if this delivery had
        not been. Raises as `nack` does.
        """
        delay_ms = None if delay is None else _milliseconds(delay)
        nack = PendingNack(_place(message), message.key, delay_ms, FailureReport(), postpone=True)
        self._nack(message, nack)

    def _nack(self, message: ReceivedMessage, nack: PendingNack) -> None:
        recovery, queue = self._member.recovery, self._member.queue
        if recovery is not None and (stored := stored_delivery(message)) is not None:
            if not recovery.nack(stored, nack):
                raise _not_outstanding(message)
            return
        if not self.is_outstanding(message):
            raise _not_outstanding(message)
        if not queue.redeliver(nack.place) and queue.change(nack.place, OUTSTANDING, NACKED):
            self._member.settlement.nack(nack)

    def extend(self, message: ReceivedMessage, seconds: float | None, now: float) -> None:
        """Give the handler of a message so many seconds from now on, None: its whole
        timeout. Raises as `nack` does.
        """
        membership = self._member.membership
        start = now
        if seconds is not None and membership is not None:
            start = now + seconds - membership.consume_timeout_s
        queue, stored = self._member.queue, stored_delivery(message)
        if stored is not None and self.is_outstanding(message):
            stored.timed_from = start
            return
        if not (self.is_outstanding(message) and queue.restart_timeout(*message[:3], start)):
            raise _not_outstanding(message)

    def give_back(self, message: ReceivedMessage, now: float, *, rejoin: bool = False) -> None:
        """Return a message to the group as if it had not been delivered.

        In an ordered group only behind a nack of its key, or at the end, or with
        `rejoin`: the member joins anew, because a message that is on its way may be a
        later one of the key. Raises as `nack` does.
        """
        if not self.is_outstanding(message):
            raise _not_outstanding(message)
        member, stored = self._member, stored_delivery(message)
        if stored is not None:
            if member.recovery is not None:
                member.recovery.give_back(stored)
            return
        member.settlement.give_back(_place(message), message.key, now)
        if rejoin and member.settings.ordered:
            member.rejoin()

    def add_to_transaction(self, delivered: Delivered) -> list[AckAction]:
        """Leave the outstanding messages to a transaction. Return the actions that ack
        them in it.
        """
        if stored_delivery(delivered) is not None:
            raise LocalProtocolError(
                f"message {_name(delivered)} is in the local store: no transaction can ack it",
                hint="ack it by itself, or let run(…, inbox=connect) apply it",
            )
        membership, queue = self._member.membership, self._member.queue
        places = _places(delivered, OUTSTANDING)
        if isinstance(delivered, ReceivedMessage) and not self.is_outstanding(delivered):
            places = []
        places = [place for place in places if not queue.redeliver(place)]
        if membership is None or not sum(
            queue.change(place, OUTSTANDING, IN_TRANSACTION) for place in places
        ):
            raise _not_outstanding(delivered)
        group, member, generation = membership.group, membership.member, membership.generation
        return [AckAction(group, member, generation, *place) for place in places]

    def transaction_ended(
        self, delivered: Delivered, now: float, *, committed: bool | None
    ) -> None:
        """Settle the messages, or make them outstanding again where `committed` is
        False.

        None: the outcome is unknown, and the broker delivers them again if need be.
        """
        queue = self._member.queue
        for place in _places(delivered, IN_TRANSACTION):
            if committed is False:
                queue.change(place, IN_TRANSACTION, OUTSTANDING)
            else:
                self._member.stats.acked += queue.settle(place, now=now, old=IN_TRANSACTION)

    def is_outstanding(self, message: ReceivedMessage) -> bool:
        """Return whether the message is neither acked nor nacked."""
        if isinstance(message, DeliveredMessage):
            return message.in_hand
        return self._member.queue.is_outstanding(*message[:3])


def ack_error(operations: Operations, number: int, delivered: Delivered) -> NotLeased | None:
    """Return the error of an answered ack for a caller that waited for it, or None."""
    if number == NO_ACK:
        return _not_outstanding(delivered)
    if operations.ack_refused(number, delivered):
        return NotLeased(
            f"the ack of {_name(delivered)} came too late",
            hint="the lease had run out, and the message is delivered again",
        )
    return None


def _not_outstanding(delivered: Delivered) -> NotLeased:
    return NotLeased(f"message {_name(delivered)} is not outstanding", hint=SETTLED_BEFORE)


def _name(delivered: Delivered) -> str:
    return place_name(
        _place(delivered) if isinstance(delivered, ReceivedMessage) else _whole(delivered)
    )


def _place(message: ReceivedMessage) -> AckedRange:
    topic, partition, offset = message[:3]
    return AckedRange(topic, partition, offset, offset + 1)


def _whole(batch: ReceivedBatch) -> AckedRange:
    return AckedRange(batch.topic, batch.partition, batch.fetched.start, batch.fetched.end)


def _places(delivered: Delivered, state: int) -> list[AckedRange]:
    """Return a message, or the messages of a batch that are in this state."""
    if isinstance(delivered, ReceivedMessage):
        return [_place(delivered)]
    return list(delivered.fetched.ranges(state))


def _milliseconds(seconds: float) -> int:
    if not 0 <= seconds <= MAX_DELAY_S:
        raise LocalProtocolError(
            f"invalid delay of {seconds!r} s", hint=f"use 0 to {MAX_DELAY_S} seconds"
        )
    return round(seconds * 1_000)
