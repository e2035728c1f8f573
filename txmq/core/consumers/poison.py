"""Messages that may have killed their consumers, and how the one that did is told from
those that were only near it.

When a member is lost with what it had, or a lease runs out, any of those messages may
have been to blame, and most were not even begun. So a death alone counts for none of
them. Each is a suspect from then on, and suspects go out in lots that get smaller with
every death: 512 after the first, 16 after the second, beside whatever else the member
has; from the third death on alone, to a member that has nothing else in hand and gets
nothing else meanwhile. A death counts as an attempt only for a message that was out
alone. So whatever kills each time becomes a dead letter in the end, and no other
message comes nearer to that.

Neither a restart of the broker nor messages given back make a suspect. A member has one
lot at a time (`Group.lots`). Who waits is found through `Group.loners` (rows that go
out alone) and `Group.suspects` (partitions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.consumers.failed_messages import Moved
    from txmq.core.state.consumer_groups import Group, Lease, Member, Spot
    from txmq.core.state.positions import Back
    from txmq.core.state.ranges import Piece

LOTS = (0, 512, 16)  # how many go out together, by their deaths
ALONE = len(LOTS)  # after so many deaths a message goes out alone
DIED = "consumer died"


def at_once(deaths: int) -> int:
    """How many suspects of so many deaths may go out together."""
    return LOTS[deaths] if deaths < ALONE else 1


def lot_of(group: Group, member: Member) -> Lease | None:
    """The lease of the suspects that a member has."""
    number = group.lots.get(member.name)
    return None if number is None else group.leases[number]


def has_one_alone(group: Group, member: Member) -> bool:
    """Whether the member has a message that is out alone, and gets nothing beside
    it.
    """
    lot = lot_of(group, member) if group.lots else None
    return lot is not None and lot.single


def empty_handed(group: Group, member: Member) -> bool:
    """Whether nothing is leased to the member."""
    return all(lease.member != member.name for lease in group.leases.values())


def in_turn(group: Group, spot: Spot) -> Iterator[Piece[Back]]:
    """What has come back and could go out next: in an ordered group only the first of
    it.
    """
    limit = group.limit
    for piece in group.positions[spot].redeliver:
        if limit is None or piece.value.attempt <= limit:
            yield piece
        if group.ordered:
            return


def note(group: Group, spot: Spot) -> None:
    """Apply: something has come back to a partition, or has gone out of it."""
    if any(back.deaths for _start, _end, back in group.positions[spot].redeliver):
        group.suspects.add(spot)
    else:
        group.suspects.discard(spot)


def buried(row: Moved) -> Moved:
    """The row of a message that was the death of its consumers, as a dead letter tells
    it; an earlier failure stays.
    """
    if row.error_text:
        return row
    text = f"{row.deaths} consumers died, or fell silent, with this message; it was alone with the last of them"
    return row._replace(error_type=row.error_type or DIED, error_text=text)
