"""The two rules of a shared log: what counts, and when its leader may answer.

Rule R, what counts, for every reader at any time. It is a fold over the partition:

1. The first genesis begins the log.
2. A claim of the next epoch counts. Its epoch and nonce are the owner's from then on,
   and what its predecessor wrote of an unfinished record is cut off. An epoch further
   on is void: the last one that there is would leave none for a later claim.
3. A slice counts if it has epoch and nonce of the owner and begins where the log ends.
   The epoch alone would not do: a slice that was sent again would be applied twice.
4. Everything else is void for every reader, for ever.

Rule B, when a leader may answer: an acknowledged offset is certain if it is the one
after the last offset that the leader has read or knows to be its own. Otherwise the
leader reads on to its slice, and rule R decides. What an acknowledgement reports is
never the base of the next expectation.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from txmq.store.shared.records import Claim, Genesis, PartitionRecord, Slice

NO_NONCE = bytes(16)


class Place(NamedTuple):
    """What a reader knows after an offset of the partition: the state of rule R.

    `checksum` is that of the record at `offset`, which tells whether a partition is
    still the one that was read. The log ends at `end`, its last whole record at
    `whole`. Without `log_id` no genesis was read yet.
    """

    offset: int = -1
    checksum: int = 0
    log_id: UUID | None = None
    epoch: int = 0
    nonce: bytes = NO_NONCE
    end: int = 0
    whole: int = 0

    def is_owned_by(self, epoch: int, nonce: bytes) -> bool:
        """Return whether a claim of this epoch and nonce still counts."""
        return self.epoch == epoch and self.nonce == nonce


def fold(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    """Return the place after the record at `offset`, and whether the record counts.

    `record` is None for bytes that are no record. Offsets grow, with gaps.
    """
    after = place._replace(offset=offset, checksum=checksum)
    match record:
        case Genesis(log_id, epoch, start, _) if place.log_id is None:
            return after._replace(log_id=log_id, epoch=epoch, end=start, whole=start), True
        case Claim(log_id, epoch, nonce, _) if (log_id, epoch) == (place.log_id, place.epoch + 1):
            return after._replace(epoch=epoch, nonce=nonce, end=place.whole), True
        case Slice() if _continues(place, record):
            return after._replace(end=record.end, whole=record.whole), True
    return after, False


def _continues(place: Place, record: Slice) -> bool:
    return (
        record.log_id == place.log_id
        and place.is_owned_by(record.epoch, record.nonce)
        and record.start == place.end
        and place.whole <= record.whole <= record.end
    )


class Expectation:
    """The offset that a leader's next slice must have for certainty (rule B)."""

    def __init__(self, offset: int) -> None:
        """`offset` is the last one that was read; the claim still counted there."""
        self._known = offset

    def read(self, offset: int) -> None:
        """Note an offset that was read while the claim still counted."""
        self._known = max(self._known, offset)

    def is_certain(self, offset: int | None) -> bool:
        """Return whether an acknowledged slice is sure to count.

        None is an acknowledgement without an offset, as for a supposed duplicate.
        """
        if offset != self._known + 1:
            return False
        self._known = offset
        return True
