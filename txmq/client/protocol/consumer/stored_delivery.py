"""Messages of the local store as handlers get them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.client.protocol.consumer.fetched import READY, DeliveredMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.recover.local import StoredMessage


class StoredDelivery:
    """One message of the local store, from its hand-out to its outcome.

    It takes the place of the `FetchedBatch` of a `DeliveredMessage`. `attempt` is the
    number of this attempt, which the store has counted; `begin` notes that the handler
    has the message. `status` is a state of `fetched`: an ack or a nack counts only
    while it is OUTSTANDING.
    """

    moved, epoch_at = True, None

    def __init__(
        self,
        message: StoredMessage,
        topic: str,
        owner: object,
        attempt: int,
        begin: Callable[[], None],
    ) -> None:
        self.begin = begin
        self.message, self.topic, self.owner, self.attempt = message, topic, owner, attempt
        self.place = message.place
        self.partition, self.topic_id = message.place.partition, message.place.topic_id
        self.partition_name = (topic, message.place.partition)
        self.epoch, self.generation = message.epoch, message.generation
        self.position: Any = None  # what an inbox knows the partition by, once it was asked
        self.status, self.timed_from = READY, 0.0

    def state(self, offset: int) -> int:
        """Return the state of the message."""
        del offset
        return self.status

    def deliver(self) -> DeliveredMessage:
        """Return the message for a handler."""
        stored = self.message
        delivered = tuple.__new__(
            DeliveredMessage,
            (
                *(self.topic, self.partition, stored.place.offset, stored.key, stored.tag),
                *(stored.headers, stored.body, stored.message_id, self.attempt),
                *(stored.born_at, stored.stored_at),
            ),
        )
        delivered.fetched = self  # type: ignore[assignment]  # has what its users read
        return delivered


def stored_delivery(message: object) -> StoredDelivery | None:
    """Return the delivery of a message from the local store; None for others."""
    fetched = getattr(message, "fetched", None)
    return fetched if type(fetched) is StoredDelivery else None
