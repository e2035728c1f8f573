"""The rules for running handlers, for both faces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.errors import LocalProtocolError

log = get_logger()


class HandlerOptions(NamedTuple):
    """The way handlers run: the `workers` (threads, or coroutines on a reactor), the
    messages for one call, the seconds to wait for so many, and the seconds without a
    message after which to end.
    """

    workers: int
    batch: int | None
    batch_wait: float
    idle_exit: float | None

    def check(self, workers_name: str) -> None:
        """Raise LocalProtocolError for numbers that make no sense."""
        if self.batch is not None and self.batch < 1:
            raise LocalProtocolError(f"batch is {self.batch}", hint="use at least 1")
        if self.workers < 1:
            raise LocalProtocolError(f"{workers_name} is {self.workers}", hint="use at least 1")
        if self.batch_wait < 0 or (self.batch_wait and self.batch is None):
            raise LocalProtocolError(
                f"batch_wait is {self.batch_wait}, with batch={self.batch}",
                hint="give the seconds to wait for a full batch: batch=50, batch_wait=0.1",
            )


def failed_messages(
    messages: Sequence[DeliveredMessage], error: BaseException
) -> list[DeliveredMessage]:
    """Return the messages to nack after the handler has raised, and log each.

    They keep their order: later ones of a key are parked behind the first. Messages
    that the handler has nacked itself are left out.
    """
    failed = [message for message in messages if message.in_hand]
    for message in failed:
        place = f"{message.topic}/{message.partition}/{message.offset}"
        log.warning("message.failed", place=place, attempt=message.attempt, error=repr(error)[:200])
    return failed
