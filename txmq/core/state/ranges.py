"""Ranges of offsets: disjoint, sorted, neighbours of the same value joined.

A consumer group's position is a handful of these maps: what is settled above the floor,
what is leased to whom, what has come back. All operations cost a bisection and a move
of list items, so thousands of ranges are fine.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

V = TypeVar("V")
SMALL = 0x80  # a varint below this is one byte


class Piece(NamedTuple, Generic[V]):
    """Offsets start <= offset < end, and what is known of them."""

    start: int
    end: int
    value: V


class RangeMap(Generic[V]):
    """Half-open ranges of offsets, each with a value."""

    __slots__ = ("_ends", "_starts", "_values")

    def __init__(self, pieces: Iterable[tuple[int, int, V]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._values: list[V] = []
        for start, end, value in pieces:
            self.put(start, end, value)

    def __iter__(self) -> Iterator[Piece[V]]:
        for start, end, value in zip(self._starts, self._ends, self._values, strict=True):
            yield Piece(start, end, value)

    def __len__(self) -> int:
        """How many ranges, not how many offsets."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeMap) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"RangeMap({[tuple(piece) for piece in self]})"

    @property
    def total(self) -> int:
        """How many offsets."""
        return sum(self._ends) - sum(self._starts)

    def put(self, start: int, end: int, value: V) -> None:
        """Give the offsets of [start, end) this value, whatever they had."""
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

    def cut(self, start: int, end: int) -> list[Piece[V]]:
        """Take [start, end) out; returns what was there."""
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

    def overlap(self, start: int, end: int) -> list[Piece[V]]:
        """What there is within [start, end), clipped to it."""
        return self._clip(*self._span(start, end), start, end)

    def first(self, offset: int = 0) -> Piece[V] | None:
        """The first range that reaches beyond `offset`, clipped to begin at or after
        it.
        """
        at = bisect_right(self._ends, offset)
        if at == len(self._starts):
            return None
        return Piece(max(self._starts[at], offset), self._ends[at], self._values[at])

    def _span(self, start: int, end: int) -> tuple[int, int]:
        """Indices of the ranges that meet [start, end)."""
        low = bisect_right(self._ends, start)
        return low, low if end <= start else max(low, bisect_left(self._starts, end))

    def _clip(self, low: int, high: int, start: int, end: int) -> list[Piece[V]]:
        return [
            Piece(max(self._starts[at], start), min(self._ends[at], end), self._values[at])
            for at in range(low, high)
        ]

    def _replace(self, low: int, high: int, pieces: list[tuple[int, int, V]]) -> None:
        self._starts[low:high] = [piece[0] for piece in pieces]
        self._ends[low:high] = [piece[1] for piece in pieces]
        self._values[low:high] = [piece[2] for piece in pieces]


def gaps(pieces: Iterable[Piece[V]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of [start, end) that no piece covers; the pieces are sorted and lie
    within it.
    """
    for piece in pieces:
        if start < piece.start:
            yield start, piece.start
        start = piece.end
    if start < end:
        yield start, end


def pack(ranges: Iterable[Piece[Any]], origin: int) -> bytes:
    """Ranges at or above `origin` in about a byte each: the gaps before them, then
    their lengths, varints, deflated.
    """
    before, lengths = [], []
    for piece in ranges:
        before.append(piece.start - origin)
        lengths.append(piece.end - piece.start)
        origin = piece.end
    if not lengths:
        return b""
    # small numbers without a pattern: their frequencies compress, and those of gaps and
    # of lengths are best kept apart
    deflate = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    packed = deflate.compress(_varints(before)) + deflate.flush(zlib.Z_SYNC_FLUSH)
    return packed + deflate.compress(_varints(lengths)) + deflate.flush()


def unpack(packed: bytes, origin: int) -> RangeMap[None]:
    """The ranges that `pack` was given, with the same origin."""
    ranges: RangeMap[None] = RangeMap()
    numbers = list(_numbers(zlib.decompress(packed))) if packed else []
    count = len(numbers) // 2
    for before, length in zip(numbers[:count], numbers[count:], strict=True):
        start = origin + before
        origin = start + length
        ranges.put(start, origin, None)
    return ranges


def _varints(numbers: list[int]) -> bytes:
    """Seven bits a byte, the lowest first; every byte of a number but its last has the
    top bit set.
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
