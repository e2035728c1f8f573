"""Where a consumer group stands in one partition.

Every offset is in exactly one place: below `floor` or in `settled` (done with, or moved
to a row of table `moved`), in `leased`, `redeliver` or `reserved`, or at or above
`cursor` (never delivered). So [floor, cursor) without `settled` is the sum of the other
three, and they do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from txmq.core.state.ranges import RangeMap, pack, unpack

if TYPE_CHECKING:
    from txmq.core.state.ranges import Piece
    from txmq.store.tables import Row

# ranges of one value from which on they are stored as settled ones are: fewer are not
# worth it
SCATTERED = 64
V = TypeVar("V")


class Grant(NamedTuple):
    """A lease on a range, and which delivery of it this is (1 = the first)."""

    lease: int
    attempt: int


class Reservation(NamedTuple):
    """A range acked in a transaction that is not decided yet; the rest is what its
    lease was.
    """

    token: bytes
    attempt: int
    lease: int
    member: str
    generation: int


class Back(NamedTuple):
    """What has come back: the number of its next attempt, and how many consumers were
    lost with it (`suspects`).
    """

    attempt: int
    deaths: int = 0


FIRST = Back(1)  # of what was never delivered


@dataclass(slots=True)
class Position:
    """The state of one partition for one group."""

    floor: int = 0
    cursor: int = 0
    settled: RangeMap[None] = field(default_factory=RangeMap)
    leased: RangeMap[Grant] = field(default_factory=RangeMap)
    redeliver: RangeMap[Back] = field(default_factory=RangeMap)
    reserved: RangeMap[Reservation] = field(default_factory=RangeMap)

    def settle(self, start: int, end: int) -> None:
        """Done with [start, end), which was taken from where it was; the floor passes
        whatever it can.
        """
        if start > self.floor:
            self.settled.put(start, end, None)
            return
        self.floor = max(self.floor, end)
        following = self.settled.first()
        if following is not None and following.start <= self.floor:
            self.settled.cut(following.start, following.end)
            self.floor = max(self.floor, following.end)

    def give_back(self, start: int, end: int, back: Back) -> None:
        """[start, end) is to be delivered once more."""
        self.redeliver.put(start, end, back)

    def take(self, start: int, end: int) -> None:
        """[start, end) leaves `redeliver` or what was never delivered."""
        if start < self.cursor:
            self.redeliver.cut(start, end)
        self.cursor = max(self.cursor, end)

    def missed_below(self, first: int) -> int:
        """How many messages below `first` are neither done with nor moved."""
        settled = sum(piece.end - piece.start for piece in self.settled.overlap(self.floor, first))
        return max(0, first - self.floor - settled)

    def pass_to(self, first: int) -> None:
        """Messages below `first` are no longer there, and nothing of them is leased or
        reserved.
        """
        self.redeliver.cut(0, first)
        self.settled.cut(0, first)
        self.settle(self.floor, first)
        self.cursor = max(self.cursor, first)

    @property
    def unsettled(self) -> int:
        """Messages below the cursor that are neither done with nor moved."""
        return self.cursor - self.floor - self.settled.total

    def to_row(self) -> Row:
        held, back = _scattered(self.leased), _scattered(self.redeliver)
        row = (
            self.floor,
            self.cursor,
            pack(self.settled, self.floor),
            tuple(
                (start, end, tuple(grant)) for start, end, grant in self.leased if grant not in held
            ),
            tuple(
                (start, end, *value) for start, end, value in self.redeliver if value not in back
            ),
            tuple((start, end, tuple(reservation)) for start, end, reservation in self.reserved),
        )
        packed = [
            tuple((tuple(value), pack(pieces, self.floor)) for value, pieces in many.items())
            for many in (held, back)
        ]
        return (*row, *packed) if back else (*row, *packed[:1]) if held else row

    @classmethod
    def from_row(cls, row: Any) -> Position:  # rows are untyped tuples
        floor, cursor, settled, leased, redeliver, reserved, *more = row
        position = cls(
            floor,
            cursor,
            unpack(settled, floor),
            RangeMap((start, end, Grant(*grant)) for start, end, grant in leased),
            RangeMap((start, end, Back(*back)) for start, end, *back in redeliver),
            RangeMap(
                (start, end, Reservation(*reservation)) for start, end, reservation in reserved
            ),
        )
        for grant, ranges in more[0] if more else ():
            _restore(position.leased, Grant(*grant), unpack(ranges, floor))
        for back, ranges in more[1] if len(more) > 1 else ():
            _restore(position.redeliver, Back(*back), unpack(ranges, floor))
        return position


def _scattered(ranges: RangeMap[V]) -> dict[V, list[Piece[V]]]:
    """Values that very many ranges have, as what is left of a lease where messages here
    and there are done with.
    """
    if len(ranges) < SCATTERED:
        return {}
    pieces: dict[V, list[Piece[V]]] = {}
    for piece in ranges:
        pieces.setdefault(piece.value, []).append(piece)
    return {value: some for value, some in pieces.items() if len(some) >= SCATTERED}


def _restore(ranges: RangeMap[V], value: V, packed: RangeMap[None]) -> None:
    for start, end, _nothing in packed:
        ranges.put(start, end, value)
