"""Messages that a handler holds for longer than `consume_timeout`: they have failed.

Outstanding messages are checked now and then, so that receiving a message costs nothing
for it. The time of a message counts from the first check that finds it outstanding.
Thus a message fails late by a sixteenth of the timeout at most.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.client.protocol.consumer.fetched import OUTSTANDING, FetchedBatch
from txmq.client.protocol.consumer.local_queue import LocalQueue
from txmq.model.retry import FailureReport
from txmq.wire.data_requests import AckedRange

CHECKS = 16  # of a message within its timeout
ERROR_TYPE = "ConsumeTimeout"


class ExpiredMessage(NamedTuple):
    """A message that has been outstanding for too long. `key` is None where the order
    of keys does not matter.
    """

    place: AckedRange
    key: str | None


class ConsumeTimeouts:
    """The timeouts of all outstanding messages, checked at `next_check`."""

    def __init__(self, queue: LocalQueue) -> None:
        self._queue = queue
        self.next_check = 0.0

    def check(self, now: float, timeout_s: float) -> list[ExpiredMessage]:
        """Return the messages whose timeout is over, and set the time of the next
        check.
        """
        self.next_check = now + timeout_s / CHECKS
        expired = []
        for batch in self._queue.batches():
            for offset in _timed_offsets(batch, now):
                start = batch.timed_from[offset]
                if batch.received_whole:
                    start = max(start, batch.touched_at)
                if now - start >= timeout_s:
                    place = AckedRange(*batch.partition_name, offset, offset + 1)
                    expired.append(ExpiredMessage(place, batch.key(offset)))
        return expired


def _timed_offsets(batch: FetchedBatch, now: float) -> list[int]:
    """Return the outstanding offsets. The timeout of new ones begins now."""
    if OUTSTANDING not in batch.states:
        batch.timed_from = {}
        return []
    offsets = list(batch.offsets(OUTSTANDING))
    batch.timed_from = {offset: batch.timed_from.get(offset, now) for offset in offsets}
    return offsets


def timeout_failure(timeout_s: float) -> FailureReport:
    """Return the failure of such a message."""
    return FailureReport(
        ERROR_TYPE,
        f"a handler has held it for more than {timeout_s:g} s (consume_timeout)",
        ERROR_TYPE,
    )
