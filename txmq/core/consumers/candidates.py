"""What could go out: rows of stored batches, neighbouring ones joined to runs."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import Spot
    from txmq.core.state.positions import Back


WORTH_SLICING = 4_096  # bytes of a batch of which only one row goes out


class Source(IntEnum):
    """Where a candidate comes from."""

    LIVE = 1  # never delivered
    REDELIVER = 2  # delivered before, and given back
    EXHAUSTED = 3  # given back once too often: it will not go out but to the dead letters
    MOVED = 4  # a row of table `moved`


class Candidate(NamedTuple):
    """Rows of one stored batch, or of a run of them, that could go out together.

    `further` batches follow the first one, offset by offset. `wanted`: it may have one
    of the tags that are asked for.
    """

    source: Source
    topic_id: int
    partition: int
    base_offset: int
    first_row: int
    rows: int
    attempt: int
    needs_keys: bool
    batch: t.Entry  # of a moved row: without count and tag filter
    further: tuple[t.Entry, ...] = ()
    wanted: bool = True
    deaths: int = 0  # of consumers that were lost with each of its messages

    @property
    def start(self) -> int:
        """Offset of the first row."""
        return self.base_offset + self.first_row

    @property
    def batches(self) -> tuple[t.Entry, ...]:
        """All of them."""
        return (self.batch, *self.further)


class Wish(NamedTuple):
    """What a fetch asks for: messages and bytes at most; batches that share a bit with
    `tags`, 0 = all; neighbouring ones of at most `run` rows joined; nothing of the
    topics `without`, by their ids.
    """

    messages: int
    size: int
    tags: int = 0
    run: int = 0
    without: frozenset[int] = frozenset()


class Runs:
    """Makes candidates of neighbouring batches, joined to `most` rows."""

    def __init__(
        self, source: Source, spot: Spot, back: Back, *, needs_keys: bool, most: int
    ) -> None:
        self.source, self._most = source, most
        self._head = (source, *spot)
        self._rest = (back.attempt, needs_keys)
        self._deaths = back.deaths
        self._made: list[Candidate] = []
        self._base = self._first = self._rows = 0
        self._entries: list[t.Entry] = []
        self._wanted = True

    def add(self, base: int, first: int, rows: int, entry: t.Entry, *, wanted: bool) -> None:
        """The next batch, and which of its rows."""
        if self._entries and (self._rows + rows > self._most or wanted is not self._wanted):
            self._close()
        if not self._entries:
            self._base, self._first, self._rows, self._wanted = base, first, 0, wanted
        self._entries.append(entry)
        self._rows += rows

    def _close(self) -> None:
        batch, *further = self._entries
        self._entries = []
        rows = (self._base, self._first, self._rows)
        self._made.append(
            Candidate(
                *self._head, *rows, *self._rest, batch, tuple(further), self._wanted, self._deaths
            )
        )

    def candidates(self) -> list[Candidate]:
        """What was made of all."""
        if self._entries:
            self._close()
        return self._made
