"""What users do with messages, the same for both faces of the client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.failure import Failure, failure_of
from txmq.client.protocol.consumer.fetched import (
    LENT,
    NACKED,
    STARTED,
    DeliveredMessage,
    ReceivedBatch,
)
from txmq.client.protocol.consumer.member import Member
from txmq.client.protocol.consumer.settling import ANY_LEASE, Nack, name_of
from txmq.errors import LocalProtocolError, NotLeased
from txmq.model.message import ReceivedMessage
from txmq.wire.headers import Acked

LONGEST_DELAY_S = 12 * 3_600
NO_ACK = 0  # a number that counts as confirmed
log = get_logger()


Delivered = ReceivedMessage | ReceivedBatch


class AckAction(NamedTuple):
    """What makes an ack a part of a transaction (docs/FORMATS.md)."""

    action: str
    group: str
    member: str
    generation: int
    topic: str
    partition: int
    start: int
    end: int


class Hands:
    """Takes messages from a member and settles them. Not thread-safe."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def take(self, most: int, now: float) -> list[DeliveredMessage]:
        """At most so many messages. Raises why the member cannot go on."""
        member = self._member
        if member.failure is not None:
            raise member.failure
        if not member.holdings.ready:
            return []
        messages = member.holdings.take(most, now=now)
        member.stats.delivered += len(messages)
        return messages

    def take_one(self, now: float) -> DeliveredMessage | None:
        """The next message. Raises why the member cannot go on."""
        member = self._member
        if member.failure is not None:
            raise member.failure
        if not member.holdings.ready:
            return None
        message = member.holdings.take_one(now=now)
        member.stats.delivered += message is not None
        return message

    def take_batch(self, now: float) -> ReceivedBatch | None:
        """The messages of one delivery. Raises why the member cannot go on."""
        member = self._member
        if member.failure is not None:
            raise member.failure
        batch = member.holdings.take_batch(now=now)
        member.stats.delivered += 0 if batch is None else len(batch)
        return batch

    def ack(self, message: ReceivedMessage, now: float) -> int:
        """The message is processed. Returns the number of its ack; `NO_ACK` where it is
        in nobody's hands any more.
        """
        member, (topic, partition, offset) = self._member, message[:3]
        if not isinstance(message, DeliveredMessage):
            count = member.holdings.settle(_place_of(message), now=now)
        elif member.holdings.settle_one(
            message, now=now
        ):  # without a further call, for the one case that is hot
            member.stats.acked += 1
            return member.settling.acks.add(topic, partition, offset, offset + 1, now)
        else:
            count = 0
        return self._acked(topic, partition, offset, offset + 1, count, now)

    def ack_batch(self, batch: ReceivedBatch, now: float) -> int:
        """All messages of the batch are processed, but for those that were acked or
        nacked alone.
        """
        number, parcel = NO_ACK, batch.parcel
        for run in list(parcel.runs(STARTED)):
            number = self._acked(*run, self._member.holdings.settle(run, parcel, now=now), now)
        return number

    def ack_many(self, messages: Iterable[ReceivedMessage], now: float) -> None:
        """All of the messages are processed; those that are in nobody's hands any more
        are passed over.
        """
        for message in messages:
            self.ack(message, now)

    def refused(self, number: int, delivered: Delivered) -> bool:
        """Whether the broker did not take the ack of that number, or not of all,
        because it came too late.
        """
        place = (
            _place_of(delivered) if isinstance(delivered, ReceivedMessage) else _all_of(delivered)
        )
        return self._member.settling.acks.refused(number, place)

    def _acked(
        self, topic: str, partition: int, start: int, end: int, count: int, now: float
    ) -> int:
        if count:
            self._member.stats.acked += count
            return self._member.settling.acks.add(topic, partition, start, end, now)
        done = Acked(topic, partition, start, end)
        if done in self._member.settling.given_up:
            log.warning(
                "message.ack_late",
                place=name_of(done),
                hint="it was given up, and is delivered again",
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
        """The message failed. `delay` is seconds until it comes again. Raises NotLeased
        where it is not in hand.
        """
        failure = failure_of(error)
        if dead and not failure.type:
            failure = Failure("dead-lettered", failure.text, failure.fingerprint)
        self._put_off(
            message,
            Nack(*_what(message), None if delay is None else _milliseconds(delay), failure, dead),
        )

    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None,
        error: BaseException | str | None,
    ) -> None:
        """All of the messages failed, in this order; those that are not in hand any
        more are passed over.
        """
        for message in filter(self.holds, messages):
            self.nack(message, delay, error)

    def postpone(self, message: ReceivedMessage, delay: float | None) -> None:
        """The message is to come again in `delay` seconds, as if it had not been
        delivered. Raises as `nack` does.
        """
        delay_ms = None if delay is None else _milliseconds(delay)
        self._put_off(message, Nack(*_what(message), delay_ms, Failure(), postpone=True))

    def _put_off(self, message: ReceivedMessage, nack: Nack) -> None:
        if not self._member.holdings.change(nack.place, STARTED, NACKED):
            raise _not_in_hand(message)
        self._member.settling.nack(nack)

    def extend(self, message: ReceivedMessage, seconds: float | None, now: float) -> None:
        """The message may be in hand for so long from now on, None = for its whole
        time. Raises as `nack` does.
        """
        seat = self._member.seat
        since = now if seconds is None or seat is None else now + seconds - seat.consume_timeout_s
        if not self._member.holdings.prolong(*message[:3], since):
            raise _not_in_hand(message)

    def give_back(self, message: ReceivedMessage, now: float) -> None:
        """Hands a message back as if it had not been taken. In an ordered group only
        behind a nack, or at the end.
        """
        self._require_in_hand(message)
        member = self._member
        if member.settings.ordered and message.key:
            member.settling.give_back(
                member.holdings.drop_key(message.topic, message.key, ANY_LEASE)
            )
        member.settling.give_back([_place_of(message)])
        member.holdings.settle(_place_of(message), now=now)

    def lend(self, delivered: Delivered) -> list[AckAction]:
        """Hands over to a transaction what is in hand of this. Returns the actions that
        ack it.
        """
        seat, holdings = self._member.seat, self._member.holdings
        places = _places_of(delivered, STARTED)
        if seat is None or not sum(holdings.change(place, STARTED, LENT) for place in places):
            raise _not_in_hand(delivered)
        return [
            AckAction("ack", seat.group, seat.member, seat.generation, *place) for place in places
        ]

    def lent(self, delivered: Delivered, now: float, *, committed: bool | None) -> None:
        """The transaction is over; True or None: the broker settles what it has got,
        False: all is in hand again.
        """
        holdings = self._member.holdings
        for place in _places_of(delivered, LENT):
            if committed is False:
                holdings.change(place, LENT, STARTED)
            else:
                self._member.stats.acked += holdings.settle(place, now=now, old=LENT)

    def holds(self, message: ReceivedMessage) -> bool:
        """Whether the message is in hand, neither acked nor nacked."""
        if isinstance(message, DeliveredMessage):
            return message.in_hand
        return self._member.holdings.in_hand(*message[:3])

    def _require_in_hand(self, message: ReceivedMessage) -> None:
        if not self.holds(message):
            raise _not_in_hand(message)


def came_too_late() -> NotLeased:
    """The error for an ack that the broker did not take."""
    return NotLeased(
        "the ack came too late",
        hint="the lease had run out: the message comes again, or is another member's",
    )


def _not_in_hand(delivered: Delivered) -> NotLeased:
    where = delivered.offset if isinstance(delivered, ReceivedMessage) else delivered.offsets[0]
    place = f"{delivered.topic}/{delivered.partition}/{where}"
    return NotLeased(
        f"message {place} is not in hand", hint="it was acked or nacked before, or given back"
    )


def _place_of(message: ReceivedMessage) -> Acked:
    topic, partition, offset = message[:3]
    return Acked(topic, partition, offset, offset + 1)


def _what(message: ReceivedMessage) -> tuple[Acked, str | None]:
    return _place_of(message), message.key


def _all_of(batch: ReceivedBatch) -> Acked:
    return Acked(batch.topic, batch.partition, batch.parcel.start, batch.parcel.end)


def _places_of(delivered: Delivered, state: int) -> list[Acked]:
    """A message, or the messages of a batch that are in this state."""
    if isinstance(delivered, ReceivedMessage):
        return [_place_of(delivered)]
    return list(delivered.parcel.runs(state))


def _milliseconds(seconds: float) -> int:
    if not 0 <= seconds <= LONGEST_DELAY_S:
        raise LocalProtocolError(
            f"a delay of {seconds!r} s", hint=f"0 to {LONGEST_DELAY_S} are possible"
        )
    return round(seconds * 1_000)
