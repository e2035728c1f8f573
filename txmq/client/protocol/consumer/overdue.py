"""Messages that a handler holds for longer than it may (`consume_timeout_s`): they are
given up, as if it had failed.

What is in hand is looked at every now and then, so that taking a message costs nothing
for it. The time of a message counts from the first look that finds it in hand, so that
it is given up by a sixteenth of the time late at most.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.client.protocol.consumer.failure import Failure
from txmq.client.protocol.consumer.fetched import STARTED, Parcel
from txmq.client.protocol.consumer.local_queue import Holdings
from txmq.wire.headers import Acked

LOOKS = 16  # at a message within its time
CAUSE = "ConsumeTimeout"


class Late(NamedTuple):
    """A message that has been in hand for too long, and its key where that is
    needed.
    """

    place: Acked
    key: str | None


class Overdue:
    """Looks at what is in hand, when it is time to: at `look_at`."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.look_at = 0.0

    def look(self, now: float, timeout_s: float) -> list[Late]:
        """What has been in hand for `timeout_s` seconds since a look."""
        if now < self.look_at:
            return []
        self.look_at = now + timeout_s / LOOKS
        found = []
        for parcel in self._holdings.parcels():
            for offset in _in_hand(parcel, now):
                since = parcel.since[offset]
                if now - max(since, parcel.touched_at if parcel.whole else since) >= timeout_s:
                    found.append(Late(Acked(*parcel.spot, offset, offset + 1), parcel.key(offset)))
        return found


def _in_hand(parcel: Parcel, now: float) -> list[int]:
    """The offsets in hand, each with a time from now on."""
    if STARTED not in parcel.states:
        parcel.since = {}
        return []
    offsets = list(parcel.offsets(STARTED))
    parcel.since = {offset: parcel.since.get(offset, now) for offset in offsets}
    return offsets


def cause(timeout_s: float) -> Failure:
    """The failure of such a message."""
    return Failure(
        CAUSE, f"a handler has held it for more than {timeout_s:g} s (consume_timeout)", CAUSE
    )
