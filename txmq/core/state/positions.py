"""The position of a consumer group in one partition.

Every offset is in exactly one place:

- settled: below `floor`, or in `settled` (processed, or a failed message with a row);
- delivered and not settled: in `leased`, `redeliver` or `reserved`;
- never delivered: at or above `cursor`.

So [floor, cursor) without `settled` is the sum of the other three, which do not
overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from txmq.core.state.ranges import RangeMap, gaps, pack, unpack

if TYPE_CHECKING:
    from txmq.core.state.ranges import ValueRange
    from txmq.store.tables import Row

# number of ranges of one value from which on they are packed as settled ones are
SCATTERED = 64
EFFECTS = 2  # index of that field, among those after the first six
MAX_PASSED = 1_000  # ranges of an `EffectsRecord`
MAX_FILTERED = 256  # ranges that a position knows to be filtered, the last ones
FAR = 1 << 63
V = TypeVar("V")


class Grant(NamedTuple):
    """The lease of a range, and the number of this delivery (1 = the first)."""

    lease: int
    attempt: int


class Reservation(NamedTuple):
    """The undecided transaction that acks a range, and the lease that the range had."""

    token: bytes
    attempt: int
    lease: int
    member: str
    generation: int


class Redelivery(NamedTuple):
    """The number of a range's next attempt, and the consumers that were lost with it
    (`core/consumers/poison.py`).
    """

    attempt: int
    deaths: int = 0


UNDELIVERED = Redelivery(1)  # of messages that were never delivered


@dataclass(slots=True)
class EffectsRecord:
    """Offsets whose effects an inbox must have: those settled at or above `base`, but
    for failed messages and for those that were `passed`: settled without an effect,
    because an operator or retention passed over them.
    """

    base: int
    passed: RangeMap[None] = field(default_factory=RangeMap)

    def pass_over(self, start: int, end: int) -> None:
        """Add [start, end) to what has no effect, as far as it is at or above the
        base. Beyond `MAX_PASSED` ranges, the base rises above the lowest ones.
        """
        self.passed.put(max(start, self.base), end, None)
        if len(self.passed) > MAX_PASSED:
            lowest = next(iter(self.passed))
            self.base = lowest.end
            self.passed.cut(0, lowest.end)

    def to_row(self) -> Row:
        return (self.base, pack(self.passed, self.base))

    @classmethod
    def from_row(cls, row: Any) -> EffectsRecord:  # noqa: ANN401  # rows are untyped
        base, passed = row
        return cls(base, unpack(passed, base))


@dataclass(slots=True)
class GroupPosition:
    """The offsets of one partition, by their state for one group. `effects` is set once
    the members have an inbox.
    """

    floor: int = 0
    cursor: int = 0
    settled: RangeMap[None] = field(default_factory=RangeMap)
    leased: RangeMap[Grant] = field(default_factory=RangeMap)
    redeliver: RangeMap[Redelivery] = field(default_factory=RangeMap)
    reserved: RangeMap[Reservation] = field(default_factory=RangeMap)
    effects: EffectsRecord | None = None
    # since the start: what `head_of_line` must not take for processed
    filtered: RangeMap[None] = field(default_factory=RangeMap, compare=False)

    def pass_over(self, start: int, end: int) -> None:
        """Note that [start, end) is settled without an effect, by the word of an
        operator or of retention.
        """
        if self.effects is not None:
            self.effects.pass_over(start, end)

    def move_to(self, offset: int) -> None:
        """Go on at `offset` by an operator's word. What is not settled below it is
        passed over; of what is above it, nothing is known any more.
        """
        unsettled = list(gaps(self.settled.overlap(self.floor, offset), self.floor, offset))
        for start, end in unsettled:
            self.pass_over(start, end)
        if self.effects is not None:
            self.effects.passed.cut(offset, FAR)
        self.floor = self.cursor = offset
        self.settled, self.leased, self.redeliver = RangeMap(), RangeMap(), RangeMap()
        self.reserved, self.filtered = RangeMap(), RangeMap()

    def settle_filtered(self, start: int, end: int) -> None:
        """Settle [start, end), as `settle` does: a member's filter passed over it."""
        self.settle(start, end)
        self.filtered.put(start, end, None)
        if len(self.filtered) > MAX_FILTERED:
            lowest = next(iter(self.filtered))
            self.filtered.cut(lowest.start, lowest.end)

    def filters_known_from(self, offset: int) -> int:
        """Return the first offset from `offset` on behind which all filtered messages
        are known.
        """
        lowest = self.filtered.first() if len(self.filtered) == MAX_FILTERED else None
        return offset if lowest is None else max(offset, lowest.start)

    def settle(self, start: int, end: int) -> None:
        """Settle [start, end), which the caller has removed from the other ranges, and
        raise the floor as far as possible.
        """
        if start > self.floor:
            self.settled.put(start, end, None)
            return
        self.floor = max(self.floor, end)
        following = self.settled.first()
        if following is not None and following.start <= self.floor:
            self.settled.cut(following.start, following.end)
            self.floor = max(self.floor, following.end)

    def redeliver_range(self, start: int, end: int, back: Redelivery) -> None:
        """Add [start, end) to the ranges to be delivered again."""
        self.redeliver.put(start, end, back)

    def remove_ready(self, start: int, end: int) -> None:
        """Remove [start, end) from what is ready for delivery."""
        if start < self.cursor:
            self.redeliver.cut(start, end)
        self.cursor = max(self.cursor, end)

    def unprocessed_below(self, first: int) -> int:
        """Return the number of unsettled messages below `first`."""
        settled = sum(item.end - item.start for item in self.settled.overlap(self.floor, first))
        return max(0, first - self.floor - settled)

    def skip_to(self, first: int) -> None:
        """Settle everything below `first`, of which nothing is leased or reserved."""
        for start, end in gaps(self.settled.overlap(self.floor, first), self.floor, first):
            self.pass_over(start, end)
        self.redeliver.cut(0, first)
        self.settled.cut(0, first)
        self.settle(self.floor, first)
        self.cursor = max(self.cursor, first)

    def bring_back(self, start: int, end: int) -> None:
        """Deliver [start, end), which is settled, again."""
        if start < self.floor:
            self.settled.put(start, self.floor, None)
            self.floor = start
        self.settled.cut(start, end)
        self.filtered.cut(start, end)
        self.redeliver.put(start, end, UNDELIVERED)

    @property
    def unsettled(self) -> int:
        """The number of unsettled messages below the cursor."""
        return self.cursor - self.floor - self.settled.total

    def to_row(self) -> Row:
        held, back = _scattered_values(self.leased), _scattered_values(self.redeliver)
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
            tuple((tuple(value), pack(items, self.floor)) for value, items in many.items())
            for many in (held, back)
        ]
        if self.effects is not None:
            return (*row, *packed, self.effects.to_row())
        return (*row, *packed) if back else (*row, *packed[:1]) if held else row

    @classmethod
    def from_row(cls, row: Any) -> GroupPosition:  # noqa: ANN401  # rows are untyped
        floor, cursor, settled, leased, redeliver, reserved, *more = row
        position = cls(
            floor,
            cursor,
            unpack(settled, floor),
            RangeMap((start, end, Grant(*grant)) for start, end, grant in leased),
            RangeMap((start, end, Redelivery(*back)) for start, end, *back in redeliver),
            RangeMap(
                (start, end, Reservation(*reservation)) for start, end, reservation in reserved
            ),
        )
        for grant, ranges in more[0] if more else ():
            _put_all(position.leased, Grant(*grant), unpack(ranges, floor))
        for back, ranges in more[1] if len(more) > 1 else ():
            _put_all(position.redeliver, Redelivery(*back), unpack(ranges, floor))
        if len(more) > EFFECTS:
            position.effects = EffectsRecord.from_row(more[EFFECTS])
        return position


def _scattered_values(ranges: RangeMap[V]) -> dict[V, list[ValueRange[V]]]:
    """Return the values that very many ranges have, each with its ranges. A lease of
    which single messages are settled leaves such ranges.
    """
    if len(ranges) < SCATTERED:
        return {}
    items: dict[V, list[ValueRange[V]]] = {}
    for item in ranges:
        items.setdefault(item.value, []).append(item)
    return {value: some for value, some in items.items() if len(some) >= SCATTERED}


def _put_all(ranges: RangeMap[V], value: V, packed: RangeMap[None]) -> None:
    for start, end, _nothing in packed:
        ranges.put(start, end, value)
