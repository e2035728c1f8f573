"""The partition that holds a shared log, as a node sees it.

It is a queue that anybody may append to, such as Kafka's. It promises little:

- A record that was produced may be lost, come late or come twice, also after an error
  was reported. Records of one node are not overtaken by its later ones, copies aside.
- Readers see all records in the order of their offsets. Offsets may have gaps, and a
  record is seen only when it cannot be lost any more.

Whatever follows from that is the business of `rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Reported = Callable[[Exception | None, int | None], None]
Deliver = Callable[[int, bytes], None]
CaughtUp = Callable[[int], None]
Lost = Callable[[int], None]


class Partition(Protocol):
    """A partition of one topic.

    Callbacks come in the thread of the caller, after the call has returned, and none
    after `close`. An exception that a callback raises is a fault of the node.
    """

    def produce(self, data: bytes, reported: Reported) -> None:
        """Append one record; `reported` is called once, within a bounded time.

        It gets an error, after which the record may be there all the same, or the
        offset of one copy of the record. Without either the record was taken for a
        duplicate of one that is there, at an offset that nobody knows.
        """

    def read_from(self, offset: int, deliver: Deliver, caught_up: CaughtUp, lost: Lost) -> None:
        """Deliver every record from an offset on, in order, for ever. Called once.

        `caught_up` gets the next offset each time when the end was reached. Where the
        partition lacks the next offset, because it forgot it or was cut, `lost` gets
        the first one that it has, and reading ends: to go on there would hide the
        records between, and gaps are no sign of them. Reading outlives errors of the
        network; it tries again until `close`.
        """

    def forget_before(self, offset: int) -> None:
        """Let the partition remove what is before an offset, now or later or never."""

    def close(self) -> None:
        """Give up everything within a bounded time; reports that are due never come."""
