"""Search for messages by id, key, time and place, page by page.

Catalogues name the batches of a key or an id (`candidate_batches`). Batches that no
catalogue covers are scanned, and all batches where only a time or a place is given. A
page scans a bounded number and says where the next one begins.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import BatchView
from txmq.broker.engine.log_reader import PublishedBatch
from txmq.broker.search.candidate_batches import CandidateBatches, MessageId, VisibleTopic
from txmq.broker.search.message_view import (
    PAGE_BYTES,
    describe_message,
    fit_entries,
    read_view,
    weight_of,
)
from txmq.core.state.visibility import offset_at_time
from txmq.core.topics import delayed
from txmq.core.transactions.model import every_batch, get
from txmq.errors import CorruptRecord
from txmq.model.message import message_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from txmq.core.state.state import State, Topic
    from txmq.core.topics.key_order import UnplacedBatch
    from txmq.core.transactions.model import Transaction
    from txmq.model.content import Content
    from txmq.store.catalogue.catalogue import Catalogue
    from txmq.store.log.log import Log

PAGE_BATCHES = 4_096  # scanned for one page
PAGE_READ_BYTES = 4 << 20
JUDGED_BYTES = 256 << 10  # of bodies, looked into at once: a MiB of JSON takes up to 0.2 s
TRANSACTION_BATCHES = 4_096
DELETED = "deleted with its topic"


class SearchQuery(NamedTuple):
    """The messages looked for; None = any. `start` and `end` are times, `end`
    excluded.
    """

    key: str | None = None
    message: MessageId | None = None
    start: int | None = None
    end: int | None = None
    limit: int = 100
    bodies: bool = False
    content: Content | None = None

    def wants(self, view: BatchView, row: int) -> bool:
        """Return whether a message of a batch has the key and the content."""
        return self.key in (None, view.keys[row]) and (
            self.content is None or self.content.is_in(view.headers[row], lambda: view.bodies[row])
        )


class BegunBatch:
    """The batch in which the step before has ended, so that the next one need not
    decompress it again.
    """

    def __init__(self) -> None:
        self._position = -1
        self._view: BatchView | None = None

    def view(self, store: Log, position: int, length: int) -> BatchView:
        """Return the batch at a position. Raises CorruptRecord."""
        if self._view is None or self._position != position:
            return read_view(store, position, length)
        return self._view

    def keep(self, position: int, view: BatchView | None) -> None:
        """Keep a batch that is to go on, None = none."""
        self._position, self._view = position, view


class SearchPage(NamedTuple):
    """Messages, and the (partition, offset) at which the next page begins; None = the
    end. So many batches were scanned, of so many bytes and `read` messages.
    """

    messages: list[dict[str, Any]]
    following: tuple[int, int] | None
    batches: int = 0
    size: int = 0
    read: int = 0


class Search:
    """One page of one topic. Raises DamagedPage for a catalogue."""

    def __init__(
        self,
        store: Log,
        state: State,
        topic: Topic,
        query: SearchQuery,
        catalogues: Sequence[Catalogue] = (),
        *,
        batches: int = PAGE_BATCHES,
        size: int = PAGE_READ_BYTES,
        begun: BegunBatch | None = None,
    ) -> None:
        """At most so many batches, of about this size in all, are scanned; where bodies
        are shown, of this size decompressed. `begun` is of the steps of one page.
        """
        self._store, self._state, self._topic, self._query = store, state, topic, query
        where = VisibleTopic(state, topic.topic_id, store.durable)
        correlations = () if query.content is None else query.content.of_correlations
        self._candidates = CandidateBatches(
            where, catalogues, query.key, query.message, correlations
        )
        self._batches, self._bytes, self._most = batches, size, batches
        self._most_bytes = size
        self._begun = begun or BegunBatch()
        self._read = self._judged = 0  # messages, and bytes of their bodies
        self._messages: list[dict[str, Any]] = []
        self._size = 0  # of these in a reply

    def page(self, partitions: range, offset: int) -> SearchPage:
        """Search the partitions in turn, the first of them from `offset` on."""
        for partition in partitions:
            first = max(offset if partition == partitions.start else 0, self._first(partition))
            stopped_at = self._partition(partition, first)
            if stopped_at is not None:
                return self._page((partition, stopped_at))
        return self._page(None)

    def _page(self, following: tuple[int, int] | None) -> SearchPage:
        batches, size = self._most - self._batches, self._most_bytes - self._bytes
        return SearchPage(self._messages, following, batches, size, self._read)

    def _first(self, partition: int) -> int:
        start = self._query.start
        return (
            0
            if start is None
            else offset_at_time(self._state, self._topic.topic_id, partition, start)
        )

    def _partition(self, partition: int, first: int) -> int | None:
        """Search a partition. Return the offset to continue at; None = the end."""
        end = self._query.end
        for place in self._candidates.within(partition, first):
            at = max(first, place.base)
            if end is not None and place.entry.stored_at >= end:
                return None
            if self._batches <= 0 or self._bytes <= 0 or self._judged >= JUDGED_BYTES:
                return at
            try:
                view = self._begun.view(self._store, place.entry.position, place.entry.length)
            except CorruptRecord:
                if self._batches < self._most:
                    return at  # the next page begins with the damage, and reports it
                raise
            self._batches -= 1
            self._bytes -= place.entry.length
            rows = self._rows_to_judge(view, at - place.base)
            self._begun.keep(place.entry.position, view if rows.stop < len(view) else None)
            self._read += len(rows)
            where = {"topic": self._topic.name, "partition": partition}
            opens = self._query.bodies
            for row in self._matching(view, where, place, rows):
                if len(self._messages) == self._query.limit or self._size >= PAGE_BYTES:
                    return int(row["offset"])
                self._messages.append(row)
                self._size += weight_of(row)
                if opens:  # all bodies of the batch were decompressed for this one
                    self._bytes -= max(0, view.header.size - place.entry.length)
                    opens = False
            if rows.stop < len(view):
                return place.base + rows.stop
        return None

    def _rows_to_judge(self, view: BatchView, first: int) -> range:
        """Return the rows to look at from `first` on. Where bodies are judged, they may
        be far larger than their batch was in the log.
        """
        content = self._query.content
        if content is None or content.body is None:
            return range(first, len(view))
        for row in range(first, len(view)):
            if self._judged >= JUDGED_BYTES:
                return range(first, row)
            self._judged += len(view.bodies[row])
        return range(first, len(view))

    def _matching(
        self, view: BatchView, where: dict[str, Any], place: PublishedBatch, rows: range
    ) -> Iterator[dict[str, Any]]:
        wanted, entry = self._query, place.entry
        if wanted.message is not None and not _holds(view, wanted.message):
            return
        for row in rows:
            is_it = wanted.message is None or view.header.sequence + row == wanted.message[1]
            if is_it and wanted.wants(view, row):
                fields = where | {"offset": place.base + row, "stored_at": entry.stored_at}
                yield fields | describe_message(view, row, bodies=wanted.bodies)


def _holds(view: BatchView, found: MessageId) -> bool:
    """Return whether a batch has the message of an id."""
    header = view.header
    return (
        header.producer_id == found[0]
        and header.sequence <= found[1] < header.sequence + header.count
    )


def find_by_id(
    store: Log, state: State, message: MessageId, *, bodies: bool
) -> dict[str, Any] | None:
    """Find a message by its id alone: delayed, recalled, or of a transaction. None = it
    is none of these.
    """
    waiting = delayed.find(state, message)
    if waiting is not None:
        shape = waiting.message
        view = read_view(store, waiting.log_position, shape.length)
        fields = {
            "state": "delayed",
            "due_at": waiting.due,
            **_place(state, shape.topic_id, shape.partition, None),
        }
        return fields | describe_message(view, 0, bodies=bodies)
    if delayed.was_recalled(state, message):
        return {"state": "recalled", "message_id": message_id(*message)}
    row = get(state, message[0])
    return None if row is None else _in_transaction(store, state, message, row, bodies=bodies)


def _in_transaction(
    store: Log, state: State, found: MessageId, row: Transaction, *, bodies: bool
) -> dict[str, Any] | None:
    """Find a message among the batches of a transaction. Delayed messages have no
    offset there.
    """
    for batch, base in islice(every_batch(state, found[0], row), TRANSACTION_BATCHES):
        if batch.position + batch.length <= store.durable:
            view = read_view(store, batch.position, batch.length)
            if _holds(view, found):
                return _of_batch(view, state, batch, base, found, row, bodies=bodies)
    return None


def _of_batch(
    view: BatchView,
    state: State,
    batch: UnplacedBatch,
    base: int | None,
    found: MessageId,
    row: Transaction,
    *,
    bodies: bool,
) -> dict[str, Any]:
    number = found[1] - view.header.sequence
    offset = None if base is None else base + number
    fields = {
        "state": row.state.name.lower(),
        **_place(state, batch.topic_id, batch.partition, offset),
    }
    return fields | describe_message(view, number, bodies=bodies)


def _place(state: State, topic_id: int, partition: int, offset: int | None) -> dict[str, Any]:
    """Return the place of a message. Another topic may have the name of a deleted one,
    so what was in that has no offset, and another state.
    """
    topic = state.topics_by_id[topic_id]
    place = {"topic": topic.name, "partition": partition, "offset": offset}
    return place | {"state": DELETED, "offset": None} if topic.deleted else place


def fit_page(page: SearchPage) -> SearchPage:
    """Return as much of a page as fits in a reply."""
    fitting = list(fit_entries(iter(page.messages)))
    if len(fitting) == len(page.messages):
        return page
    left = page.messages[len(fitting)]
    return page._replace(messages=fitting, following=(left["partition"], left["offset"]))
