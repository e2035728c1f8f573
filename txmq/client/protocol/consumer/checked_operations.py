"""The operations of a consumer of typed topics: it checks bodies at receipt.

A class of its own, so that a consumer without models pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
from txmq.client.protocol.consumer.member import Member
from txmq.client.protocol.consumer.operations import Operations
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.errors import BodyMismatch

MOST_REFUSED = 64  # at one receipt: then the broker is told, before more are looked at


class CheckedOperations(Operations):
    """Operations that give messages of typed topics their value.

    A message that does not fit the model is a dead letter at once: no attempt would
    mend it.
    """

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self._models = member.settings.models
        self._ordered = member.settings.ordered

    def receive_many(self, most: int, now: float) -> list[DeliveredMessage]:
        refused = 0
        while refused < MOST_REFUSED and (received := super().receive_many(most, now)):
            if fitting := self._fitting(received, now):
                return fitting
            refused += len(received)
        return []

    def receive(self, now: float) -> DeliveredMessage | None:
        for _refused in range(MOST_REFUSED):
            message = super().receive(now)
            if message is None or self._fits(message):
                return message
        return None

    def receive_batch(self, now: float) -> ReceivedBatch | None:
        refused = 0
        while refused < MOST_REFUSED and (batch := super().receive_batch(now)) is not None:
            if batch.topic not in self._models:
                return batch
            messages = [message for message in batch.messages() if message.in_hand]
            if fitting := self._fitting(messages, now):
                batch.keep(
                    [message.offset for message in fitting], [message.value for message in fitting]
                )
                return batch
            refused += len(messages)
        return None

    def _fitting(self, messages: Iterable[DeliveredMessage], now: float) -> list[DeliveredMessage]:
        """Return the messages that fit.

        In an ordered group, later ones of a refused key go back: they are parked behind
        its letter.
        """
        fitting, refused = [], set[tuple[str, str]]()
        for message in messages:
            if message.key and (message.topic, message.key) in refused:
                self.give_back(message, now)
            elif self._fits(message):
                fitting.append(message)
            elif self._ordered:
                refused.add((message.topic, message.key or ""))
        return fitting

    def _fits(self, message: DeliveredMessage) -> bool:
        model = self._models.get(message.topic)
        if model is None:
            return True
        try:
            message.value = model.decode(message.body, message.headers)
        except BodyMismatch as error:
            self.nack(message, None, error, dead=True)
            self.has_refused = True
            if self.on_refused is not None:
                self.on_refused(message, error)
            return False
        return True


def operations_type(settings: ConsumerSettings) -> type[Operations]:
    """Return the operations of a consumer with these settings."""
    return CheckedOperations if settings.models else Operations
