"""Which batches of a topic are worth a look for a key or an id: those that catalogues
name, and all that none has.
"""

from __future__ import annotations

from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.catalogues.catalogue_build import gaps
from txmq.broker.log_reader import Found, published
from txmq.store.catalogue import base_of, hash_of_key, hashes_of_id, place_of
from txmq.store.tables import ENTRY_KEY, Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from txmq.core.state.state import State
    from txmq.store.catalogue import Catalogue

Id = tuple[bytes, int]  # producer id or token, sequence


class Where(NamedTuple):
    """What of a topic readers may see."""

    state: State
    topic_id: int
    durable: int


class Candidates:
    """Batches of one topic, asked for partition by partition, upwards. Raises
    DamagedPage of a catalogue.
    """

    def __init__(
        self, where: Where, catalogues: Sequence[Catalogue], key: str | None, found: Id | None
    ) -> None:
        """Of the key, or else of the id; where neither is given, or there are no
        catalogues, everything is.
        """
        self._where = where
        named = catalogues if key is not None or found is not None else ()
        self._covered: dict[int, list[tuple[int, int]]] = {}
        for catalogue in named:
            for _topic_id, partition, first, end in catalogue.ranges(where.topic_id):
                self._covered.setdefault(partition, []).append((first, end))
        for ranges in self._covered.values():
            ranges.sort()
        self._cursors = [
            _Cursor(catalogue, hashed)
            for catalogue in named
            for hashed in _hashes(where.topic_id, key, found, catalogue.about.levels)
        ]

    def within(self, partition: int, first: int) -> Iterator[Found]:
        """Those of a partition from the one that holds the offset `first` on, in order,
        as far as readers may see.
        """
        if partition not in self._covered:
            return self._published(partition, first)
        holds_first = next(self._published(partition, first), None)
        if holds_first is None:
            return iter(())
        start = holds_first.base
        named = merge(*(cursor.within(partition, start) for cursor in self._cursors))
        return merge(
            self._entries(partition, named), self._between(partition, start), key=attrgetter("base")
        )

    def _published(self, partition: int, first: int) -> Iterator[Found]:
        return published(
            self._where.state, self._where.topic_id, partition, first, self._where.durable
        )

    def _between(self, partition: int, start: int) -> Iterator[Found]:
        """What no catalogue has."""
        for first, end in gaps(self._covered[partition], start, place_of(1, 0)):
            for found in self._published(partition, first):
                if found.base >= end:
                    break
                yield found

    def _entries(self, partition: int, bases: Iterable[int]) -> Iterator[Found]:
        """What is named and still there; two catalogues may name the same."""
        last = -1
        for base in bases:
            row = self._where.state.entries.get(
                ENTRY_KEY.pack(self._where.topic_id, partition, base)
            )
            if row is not None and base != last:
                last = base
                yield Found(base, Entry._make(row))


class _Cursor:
    """Goes through the places that one catalogue has for one hash; it never goes
    back.
    """

    def __init__(self, catalogue: Catalogue, hashed: bytes) -> None:
        self._catalogue, self._hashed = catalogue, hashed
        self._rows = catalogue.places(hashed, 0)
        self._next = next(self._rows, None)

    def within(self, partition: int, base: int) -> Iterator[int]:
        """The bases in a partition, from that one on."""
        start, end = place_of(partition, base), place_of(partition + 1, 0)
        if self._next is not None and self._next < start:
            self._rows = self._catalogue.places(self._hashed, start)
            self._next = next(self._rows, None)
        while self._next is not None and self._next < end:
            yield base_of(self._next)
            self._next = next(self._rows, None)


def _hashes(topic_id: int, key: str | None, found: Id | None, levels: int) -> Iterable[bytes]:
    if key is not None:
        return (hash_of_key(topic_id, key.encode()),)
    return () if found is None else hashes_of_id(topic_id, *found, levels)
