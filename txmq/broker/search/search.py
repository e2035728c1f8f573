"""Messages looked up by id, key, time and place, page by page.

Keys and ids are looked up in catalogues (`candidates`); what has been published since
the newest of them, and all where only a time or place is given, is looked through: a
page looks at so much, and says where the next one begins.
"""

from __future__ import annotations

from base64 import b64encode
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import BatchView
from txmq.broker.calls.views import as_fit
from txmq.broker.log_reader import Found, offset_at, read_batches
from txmq.broker.search.candidate_batches import Candidates, Id, Where
from txmq.core.topics import delayed
from txmq.core.transactions.model import every_batch, get
from txmq.errors import CorruptRecord
from txmq.model.message import message_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from txmq.core.state.state import State, Topic
    from txmq.core.topics.key_order import HeldBatch
    from txmq.core.transactions.model import Transaction
    from txmq.store.catalogue import Catalogue
    from txmq.store.log import Log

BATCHES = 4_096  # looked at for one page
BYTES = 4 << 20
TRANSACTION_BATCHES = 4_096


class Wanted(NamedTuple):
    """What is looked for; None = anything. `start` and `end` are times, `end`
    excluded.
    """

    key: str | None = None
    found: Id | None = None
    start: int | None = None
    end: int | None = None
    limit: int = 100
    bodies: bool = False


class Page(NamedTuple):
    """Messages, and (partition, offset) to go on from; None = all were looked at."""

    messages: list[dict[str, Any]]
    following: tuple[int, int] | None


class Search:
    """One page of one topic, from a place on. Raises DamagedPage of a catalogue."""

    def __init__(
        self,
        store: Log,
        state: State,
        topic: Topic,
        wanted: Wanted,
        catalogues: Sequence[Catalogue] = (),
    ) -> None:
        self._store, self._state, self._topic, self._wanted = store, state, topic, wanted
        where = Where(state, topic.topic_id, store.durable)
        self._candidates = Candidates(where, catalogues, wanted.key, wanted.found)
        self._batches, self._bytes = BATCHES, BYTES
        self._messages: list[dict[str, Any]] = []

    def page(self, partitions: range, offset: int) -> Page:
        """Through the partitions in turn; `offset` is where to begin in the first of
        them.
        """
        for partition in partitions:
            first = max(offset if partition == partitions.start else 0, self._first(partition))
            stopped_at = self._partition(partition, first)
            if stopped_at is not None:
                return Page(self._messages, (partition, stopped_at))
        return Page(self._messages, None)

    def _first(self, partition: int) -> int:
        start = self._wanted.start
        return (
            0 if start is None else offset_at(self._state, self._topic.topic_id, partition, start)
        )

    def _partition(self, partition: int, first: int) -> int | None:
        """Where to go on, None = at the end."""
        end = self._wanted.end
        for place in self._candidates.within(partition, first):
            at = max(first, place.base)
            if end is not None and place.entry.stored_at >= end:
                return None
            if self._batches <= 0 or self._bytes <= 0:
                return at
            try:
                rows = self._rows(partition, place, at)
            except CorruptRecord:
                if self._batches < BATCHES:
                    return at  # what comes before it is served, the next page says so
                raise
            self._batches -= 1
            for row in rows:
                if len(self._messages) == self._wanted.limit:
                    return int(row["offset"])
                self._messages.append(row)
        return None

    def _rows(self, partition: int, place: Found, at: int) -> Iterator[dict[str, Any]]:
        entry = place.entry
        view = view_of(self._store, entry.position, entry.length)
        self._bytes -= entry.length
        return self._matching(view, {"topic": self._topic.name, "partition": partition}, place, at)

    def _matching(
        self, view: BatchView, where: dict[str, Any], place: Found, at: int
    ) -> Iterator[dict[str, Any]]:
        wanted, entry = self._wanted, place.entry
        if wanted.found is not None and not _has(view, wanted.found):
            return
        for row in range(at - place.base, entry.count):
            if wanted.key is not None and view.keys[row] != wanted.key:
                continue
            if wanted.found is None or view.header.sequence + row == wanted.found[1]:
                told = where | {"offset": place.base + row, "stored_at": entry.stored_at}
                yield told | message(view, row, bodies=wanted.bodies)


def _has(view: BatchView, found: Id) -> bool:
    """Whether the batch has the message of that id."""
    header = view.header
    return (
        header.producer_id == found[0]
        and header.sequence <= found[1] < header.sequence + header.count
    )


def view_of(store: Log, position: int, length: int) -> BatchView:
    """The batch at that place. Raises CorruptRecord."""
    [data] = read_batches(store, [(position, length)])
    return BatchView(bytes(data))


def message(view: BatchView, row: int, *, bodies: bool) -> dict[str, Any]:
    """What is told of a message, wherever it is."""
    told = {
        "message_id": message_id(view.header.producer_id, view.header.sequence + row),
        "key": view.keys[row],
        "tag": view.tags[row],
        "headers": dict(view.headers[row]),
        "born_at": view.born_at[row],
        "size": len(view.bodies[row]),
    }
    return told | {"body": b64encode(view.bodies[row]).decode()} if bodies else told


def where_is(store: Log, state: State, found: Id, *, bodies: bool) -> dict[str, Any] | None:
    """A message that is known by its id alone: delayed, recalled, or of a transaction.
    None = it is none of these.
    """
    waiting = delayed.find(state, found)
    if waiting is not None:
        shape = waiting.message
        view = view_of(store, waiting.place, shape.length)
        told = {
            "state": "delayed",
            "due_at": waiting.due,
            **_place(state, shape.topic_id, shape.partition, None),
        }
        return told | message(view, 0, bodies=bodies)
    if delayed.was_recalled(state, found):
        return {"state": "recalled", "message_id": message_id(*found)}
    row = get(state, found[0])
    return None if row is None else _in_transaction(store, state, found, row, bodies=bodies)


def _in_transaction(
    store: Log, state: State, found: Id, row: Transaction, *, bodies: bool
) -> dict[str, Any] | None:
    """What was published with a delay has its place in no row of the transaction's."""
    for batch, base in islice(every_batch(state, found[0], row), TRANSACTION_BATCHES):
        if batch.position + batch.length <= store.durable:
            view = view_of(store, batch.position, batch.length)
            if _has(view, found):
                return _of_batch(view, state, batch, base, found, row, bodies=bodies)
    return None


def _of_batch(
    view: BatchView,
    state: State,
    batch: HeldBatch,
    base: int | None,
    found: Id,
    row: Transaction,
    *,
    bodies: bool,
) -> dict[str, Any]:
    number = found[1] - view.header.sequence
    offset = None if base is None else base + number
    told = {
        "state": row.state.name.lower(),
        **_place(state, batch.topic_id, batch.partition, offset),
    }
    return told | message(view, number, bodies=bodies)


def _place(state: State, topic_id: int, partition: int, offset: int | None) -> dict[str, Any]:
    return {"topic": state.topics_by_id[topic_id].name, "partition": partition, "offset": offset}


def fitting(page: Page) -> Page:
    """As much of a page as fits in a reply."""
    kept = list(as_fit(iter(page.messages)))
    if len(kept) == len(page.messages):
        return page
    left = page.messages[len(kept)]
    return Page(kept, (left["partition"], left["offset"]))
