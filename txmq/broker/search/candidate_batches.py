"""Batches that may hold a key, an id or a correlation: those that catalogues name, and
those that no catalogue covers.
"""

from __future__ import annotations

from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.engine.log_reader import PublishedBatch, published_batches
from txmq.broker.search.catalogue_build import gaps
from txmq.store.catalogue.catalogue import (
    encode_place,
    hash_of_correlation,
    hash_of_key,
    hashes_of_id,
    place_offset,
)
from txmq.store.tables import ENTRY_KEY, BatchEntry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from txmq.core.state.state import State
    from txmq.store.catalogue.catalogue import Catalogue

MessageId = tuple[bytes, int]  # producer id or token, sequence


class VisibleTopic(NamedTuple):
    """A topic, as far as readers may see it."""

    state: State
    topic_id: int
    durable: int


class CandidateBatches:
    """Candidates of one topic, partition by partition, upwards. Raises DamagedPage for
    a catalogue.
    """

    def __init__(
        self,
        where: VisibleTopic,
        catalogues: Sequence[Catalogue],
        key: str | None,
        message: MessageId | None,
        correlations: Collection[str] = (),
    ) -> None:
        """Search for the key, or else for the id, or for correlations. Without these,
        or without catalogues, every batch is a candidate.
        """
        self._where = where
        named = catalogues if key is not None or message is not None or correlations else ()
        self._covered: dict[int, list[tuple[int, int]]] = {}
        for catalogue in named:
            for _topic_id, partition, first, end in catalogue.ranges(where.topic_id):
                self._covered.setdefault(partition, []).append((first, end))
        for ranges in self._covered.values():
            ranges.sort()
        self._cursors = [
            _Cursor(catalogue, hashed)
            for catalogue in named
            for hashed in _hashes(
                where.topic_id, key, message, correlations, catalogue.header.levels
            )
        ]

    def within(self, partition: int, first: int) -> Iterator[PublishedBatch]:
        """Return the visible candidates of a partition, in order, beginning with the
        batch that holds the offset `first`.
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

    def _published(self, partition: int, first: int) -> Iterator[PublishedBatch]:
        return published_batches(
            self._where.state, self._where.topic_id, partition, first, self._where.durable
        )

    def _between(self, partition: int, start: int) -> Iterator[PublishedBatch]:
        """Return the batches that no catalogue covers."""
        for first, end in gaps(self._covered[partition], start, encode_place(1, 0)):
            for found in self._published(partition, first):
                if found.base >= end:
                    break
                yield found

    def _entries(self, partition: int, bases: Iterable[int]) -> Iterator[PublishedBatch]:
        """Return the named batches that still exist; two catalogues may name the same
        one.
        """
        last = -1
        for base in bases:
            row = self._where.state.entries.get(
                ENTRY_KEY.pack(self._where.topic_id, partition, base)
            )
            if row is not None and base != last:
                last = base
                yield PublishedBatch(base, BatchEntry._make(row))


class _Cursor:
    """Goes forward through the places that one catalogue has for one hash."""

    def __init__(self, catalogue: Catalogue, hashed: bytes) -> None:
        self._catalogue, self._hashed = catalogue, hashed
        self._rows = catalogue.places(hashed, 0)
        self._next = next(self._rows, None)

    def within(self, partition: int, base: int) -> Iterator[int]:
        """Return the first offsets of batches in a partition, from `base` on."""
        start, end = encode_place(partition, base), encode_place(partition + 1, 0)
        if self._next is not None and self._next < start:
            self._rows = self._catalogue.places(self._hashed, start)
            self._next = next(self._rows, None)
        while self._next is not None and self._next < end:
            yield place_offset(self._next)
            self._next = next(self._rows, None)


def _hashes(
    topic_id: int,
    key: str | None,
    found: MessageId | None,
    correlations: Collection[str],
    levels: int,
) -> Iterable[bytes]:
    if key is not None:
        return (hash_of_key(topic_id, key.encode()),)
    if found is not None:
        return hashes_of_id(topic_id, *found, levels)
    return [hash_of_correlation(topic_id, text) for text in correlations]
