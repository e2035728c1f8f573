"""Maps from ranges of offsets to values: disjoint, sorted, equal neighbours joined.

A consumer group's position is a handful of these maps. Each operation costs a bisection
and a move of list items, so thousands of ranges are fine.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

V = TypeVar("V")
# The lists of all maps that never held anything: nearly all maps of a large group.
# Lists of their own would take a kilobyte for each partition.
EMPTY: list[Any] = []
SMALL = 0x80  # a varint below this is one byte


class ValueRange(NamedTuple, Generic[V]):
    """The offsets start <= offset < end and their value."""

    start: int
    end: int
    value: V


class RangeMap(Generic[V]):
    """Half-open ranges of offsets, each with a value."""

    __slots__ = ("_ends", "_starts", "_values")

    def __init__(self, items: Iterable[tuple[int, int, V]] = ()) -> None:
        self._starts: list[int] = EMPTY
        self._ends: list[int] = EMPTY
        self._values: list[V] = EMPTY
        for start, end, value in items:
            self.put(start, end, value)

    def __iter__(self) -> Iterator[ValueRange[V]]:
        for start, end, value in zip(self._starts, self._ends, self._values, strict=True):
            yield ValueRange(start, end, value)

    def __len__(self) -> int:
        """Return the number of ranges, not of offsets."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeMap) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"RangeMap({[tuple(item) for item in self]})"

    @property
    def total(self) -> int:
        """The number of offsets."""
        return sum(self._ends) - sum(self._starts)

    def put(self, start: int, end: int, value: V) -> None:
        """Set the value of [start, end)."""
        if end <= start:
            return
        if self._ends and start < self._ends[-1]:
            self.cut(start, end)
            at = bisect_left(self._starts, start)
        else:
            at = len(self._starts)
        before = at > 0 and self._ends[at - 1] == start and self._values[at - 1] == value
        after = at < len(self._starts) and self._starts[at] == end and self._values[at] == value
        if before:
            start = self._starts[at - 1]
        if after:
            end = self._ends[at]
        low, high = at - before, at + after
        self._replace(low, high, [(start, end, value)])

    def cut(self, start: int, end: int) -> list[ValueRange[V]]:
        """Remove [start, end), and return the ranges that were there."""
        low, high = self._span(start, end)
        if low == high:
            return []
        removed = self._clip(low, high, start, end)
        rest = []
        if self._starts[low] < start:
            rest.append((self._starts[low], start, self._values[low]))
        if self._ends[high - 1] > end:
            rest.append((end, self._ends[high - 1], self._values[high - 1]))
        self._replace(low, high, rest)
        return removed

    def overlap(self, start: int, end: int) -> list[ValueRange[V]]:
        """Return the ranges within [start, end), clipped to it."""
        return self._clip(*self._span(start, end), start, end)

    def first(self, offset: int = 0) -> ValueRange[V] | None:
        """Return the first range that ends above `offset`, clipped to begin there."""
        at = bisect_right(self._ends, offset)
        if at == len(self._starts):
            return None
        return ValueRange(max(self._starts[at], offset), self._ends[at], self._values[at])

    def _span(self, start: int, end: int) -> tuple[int, int]:
        """Return the bounds of the indices of ranges that overlap [start, end)."""
        low = bisect_right(self._ends, start)
        return low, low if end <= start else max(low, bisect_left(self._starts, end))

    def _clip(self, low: int, high: int, start: int, end: int) -> list[ValueRange[V]]:
        return [
            ValueRange(max(self._starts[at], start), min(self._ends[at], end), self._values[at])
            for at in range(low, high)
        ]

    def _replace(self, low: int, high: int, items: list[tuple[int, int, V]]) -> None:
        if self._starts is EMPTY:
            self._starts, self._ends, self._values = [], [], []
        self._starts[low:high] = [item[0] for item in items]
        self._ends[low:high] = [item[1] for item in items]
        self._values[low:high] = [item[2] for item in items]


def gaps(items: Iterable[ValueRange[V]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the gaps between sorted ranges that lie within [start, end)."""
    for item in items:
        if start < item.start:
            yield start, item.start
        start = item.end
    if start < end:
        yield start, end


def pack(ranges: Iterable[ValueRange[Any]], origin: int) -> bytes:
    """Pack ranges at or above `origin` in about a byte each: the gaps before them, then
    their lengths, as varints, deflated.
    """
    before, lengths = [], []
    for item in ranges:
        before.append(item.start - origin)
        lengths.append(item.end - item.start)
        origin = item.end
    if not lengths:
        return b""
    # Small numbers without a pattern: only their frequencies compress, and gaps and
    # lengths have different ones.
    deflate = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    packed = deflate.compress(_varints(before)) + deflate.flush(zlib.Z_SYNC_FLUSH)
    return packed + deflate.compress(_varints(lengths)) + deflate.flush()


def unpack(packed: bytes, origin: int) -> RangeMap[None]:
    """Return the ranges that `pack` has packed with the same origin."""
    ranges: RangeMap[None] = RangeMap()
    numbers = list(_numbers(zlib.decompress(packed))) if packed else []
    count = len(numbers) // 2
    for before, length in zip(numbers[:count], numbers[count:], strict=True):
        start = origin + before
        origin = start + length
        ranges.put(start, origin, None)
    return ranges


def _varints(numbers: list[int]) -> bytes:
    """Encode numbers as LEB128: seven bits a byte, lowest first, the top bit set in
    every byte of a number but its last.
    """
    if max(numbers) < SMALL:
        return bytes(numbers)
    encoded = bytearray()
    for number in numbers:
        rest = number
        while rest >= SMALL:
            encoded.append(rest & 0x7F | SMALL)
            rest >>= 7
        encoded.append(rest)
    return bytes(encoded)


def _numbers(data: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < SMALL:
            yield number
            number = shift = 0
