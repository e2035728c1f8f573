"""Messages as handlers of FastStream see them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from faststream.exceptions import HandlerException
from faststream.message import StreamMessage, decode_message

from txmq.aio import Consumer, Consumers
from txmq.model.durations import Duration
from txmq.model.message import ReceivedMessage
from txmq.model.tracebacks import text_of
from txmq_faststream.transactions import current

if TYPE_CHECKING:
    from faststream._internal.basic_types import DecodedMessage

CONTENT_TYPE, CORRELATION_ID, REPLY_TO = "content-type", "correlation_id", "reply_to"
REJECTED = "the handler has rejected it"
NACKED = "the handler, or a middleware around it, has nacked it"


class TxmqMessage(StreamMessage[ReceivedMessage]):
    """A delivered message. `raw_message` has topic, offset, key, attempt and the rest;
    of a subscriber of batches it is the list of them, and what is said of the message
    is said of each.

    What is settled already, by a transaction or because it took too long, is left
    alone.
    """

    consumer: Consumer | Consumers | None = None  # None: of a reader, or of a test
    deliveries: Sequence[ReceivedMessage] = ()  # one, or those of a batch

    async def ack(self) -> None:
        """Ack the message, with the transaction of an atomic subscriber."""
        for consumer, delivery in self._in_hand():
            scope = current()
            if scope is not None and scope.delivery is self.raw_message:
                scope.transaction.ack(delivery)
                scope.acked = True
            else:
                consumer.ack(delivery)
        await super().ack()

    async def nack(
        self, delay: Duration | None = None, error: BaseException | str | None = None
    ) -> None:
        """Have the message delivered again, by the policy of the group or after `delay`
        seconds. At the end of its retries it is a dead letter.

        `error` is stored with it, by default the one that is handled.
        """
        for consumer, delivery in self._in_hand():
            consumer.nack(delivery, delay, error or _handled() or NACKED)
        await super().nack()

    async def reject(self, reason: str | None = None) -> None:
        """Move the message to the dead letters at once."""
        for consumer, delivery in self._in_hand():
            error = _handled()
            text = REJECTED if error is None else f"{type(error).__name__}: {text_of(error)}"
            consumer.dead_letter(delivery, reason or text)
        await super().reject()

    async def extend(self, duration: Duration | None = None) -> None:
        """Give the handler more time; see `extend` of txmq's consumers."""
        for consumer, delivery in self._in_hand():
            consumer.extend(delivery, duration)

    def _in_hand(self) -> Iterator[tuple[Consumer | Consumers, ReceivedMessage]]:
        """Yield the deliveries that are to be settled, and who settles them."""
        if self.consumer is not None and self.committed is None:
            for delivery in self.deliveries:
                if is_in_hand(delivery):
                    yield self.consumer, delivery


def is_in_hand(delivery: ReceivedMessage) -> bool:
    """Return whether the delivery is a consumer's, and not settled."""
    return bool(getattr(delivery, "in_hand", False))


def _handled() -> BaseException | None:
    """Return the error that the caller handles; of FastStream's own, its cause."""
    error = sys.exception()
    if isinstance(error, HandlerException):
        return error.__cause__ or error.__context__
    return error


class Parser:
    """Makes messages of FastStream of those of a consumer."""

    def __init__(self) -> None:
        self.consumer: Consumer | Consumers | None = None

    async def parse_message(self, raw: ReceivedMessage) -> TxmqMessage:
        """Return the message, with FastStream's headers in their places."""
        headers: dict[str, Any] = dict(raw.headers)
        message = TxmqMessage(
            raw_message=raw,
            body=raw.body,
            headers=headers,
            reply_to=headers.get(REPLY_TO, ""),
            content_type=headers.get(CONTENT_TYPE),
            correlation_id=headers.get(CORRELATION_ID),
            message_id=raw.message_id,
        )
        message.consumer, message.deliveries = self.consumer, (raw,)
        return message

    async def decode_message(self, message: StreamMessage[Any]) -> DecodedMessage:
        """Return the body by its content type."""
        return decode_message(message)

    async def parse_batch(self, batch: Sequence[ReceivedMessage]) -> TxmqMessage:
        """Return one message of several, with the headers of each."""
        first, last, headers = batch[0], batch[-1], [dict(raw.headers) for raw in batch]
        message = TxmqMessage(
            raw_message=batch,  # type: ignore[arg-type]  # the one place where it is several
            body=[raw.body for raw in batch],
            headers=dict(headers[0]),
            batch_headers=headers,
            content_type=headers[0].get(CONTENT_TYPE),
            correlation_id=headers[0].get(CORRELATION_ID),
            message_id=f"{first.message_id}-{last.message_id}",
        )
        message.consumer, message.deliveries = self.consumer, batch
        return message

    async def decode_batch(self, message: StreamMessage[Any]) -> list[DecodedMessage]:
        """Return the bodies. FastStream knows a decoder of batches by this name."""
        return [decode_message(await self.parse_message(raw)) for raw in message.raw_message]
