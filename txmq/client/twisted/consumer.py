"""Consuming with Twisted: an async iterator on the member without I/O that the blocking
face drives as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twisted.internet.defer import Deferred, fail, succeed

from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
from txmq.client.protocol.consumer.operations import NO_ACK, AckAction, Delivered, came_too_late
from txmq.client.twisted.consumer_base import ConsumerBase
from txmq.errors import NotLeased
from txmq.model.message import ReceivedMessage


class Consumer(ConsumerBase):
    """A member of a consumer group, for the reactor's thread. Made by
    `client.consumer`; as the blocking one otherwise.

    `async for message in consumer` gives messages until it is closed.
    """

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> Deferred[None]:
        """The message is processed. The Deferred fires at once, or if one is to `wait`,
        when the broker has it.
        """
        return self._acked(self._hands.ack(message, self._reactor.seconds()), message, wait=wait)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> Deferred[None]:
        """All messages of the batch are processed, but for those that were acked or
        nacked alone.
        """
        return self._acked(self._hands.ack_batch(batch, self._reactor.seconds()), batch, wait=wait)

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        """All of these messages are processed; as `ack` of each, without waiting."""
        self._hands.ack_many(messages, self._reactor.seconds())
        self._step()

    def _acked(self, number: int, delivered: Delivered, *, wait: bool) -> Deferred[None]:
        settling = self._member.settling
        settling.hurry |= wait
        self._step()
        if not wait:
            return succeed(None)
        if number == NO_ACK:
            return fail(
                NotLeased(
                    "the message is not in hand",
                    hint="it was acked or nacked before, or given back",
                )
            )

        def taken(_none: None) -> None:
            if self._hands.refused(number, delivered):
                raise came_too_late()

        return self._when(lambda: settling.acks.confirmed(number)).addCallback(taken)

    def nack(
        self,
        message: ReceivedMessage,
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """The message failed; it comes again after `delay` seconds, or by the policy of
        the group.
        """
        self._hands.nack(message, delay, error)
        self._step()

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
        self._hands.nack_many(messages, delay, error)
        self._step()

    def dead_letter(self, message: ReceivedMessage, reason: str) -> None:
        """The message goes to the dead letters at once."""
        self._hands.nack(message, None, reason, dead=True)
        self._step()

    def postpone(self, message: ReceivedMessage, delay: float | None = None) -> None:
        """The message comes again after `delay` seconds, as if it had not been
        delivered.
        """
        self._hands.postpone(message, delay)
        self._step()

    def extend(self, message: ReceivedMessage, seconds: float | None = None) -> None:
        """The message's handler needs longer; as `Consumer.extend` of the blocking
        face.
        """
        self._hands.extend(message, seconds, self._reactor.seconds())

    def give_back(self, messages: Iterable[ReceivedMessage]) -> None:
        """Hands messages back as if they had never been taken; in an ordered group,
        only behind a nack of their key.
        """
        for message in messages:
            self._hands.give_back(message, self._reactor.seconds())
        self._step()

    def epoch_of(self, message: ReceivedMessage) -> int:
        """The group's epoch when the message came."""
        return message.parcel.epoch if isinstance(message, DeliveredMessage) else self.epoch

    def ack_actions(self, delivered: Delivered) -> Sequence[AckAction]:
        """Hands a message, or what is in hand of a batch, over to a transaction;
        returns what acks it there.
        """
        return self._hands.lend(delivered)

    def transaction_over(self, delivered: Delivered, *, committed: bool | None) -> None:
        """The transaction has settled it; or it has not, and the message is in hand
        again; None = nobody knows.
        """
        self._hands.lent(delivered, self._reactor.seconds(), committed=committed)
        self._step()

    def pause(self, *topics: str) -> None:
        """Hands out nothing of these topics, or of any where none is named, until
        `resume`; what waits here of them goes back to the group, and its share stays
        its own. As `Consumer.pause` of the blocking face.
        """
        self._member.pause(topics, paused=True)
        self._step()

    def resume(self, *topics: str) -> None:
        """Goes on with these topics after `pause(*topics)`, with all after `pause()`;
        each undoes its own.
        """
        self._member.pause(topics, paused=False)
        self._step()

    @property
    def paused(self) -> frozenset[str]:
        """The topics of which it hands out nothing for now."""
        return self._member.intake.paused
