"""Search in a log that no broker has open, such as an archive: by key, id, time and
place.

The search has only the records. A batch is found where it was stored; its offset comes
from the record that published it, which may come later. A batch that these records do
not publish is reported as `stored`: in an archive, the decision often stands in a
segment that is not archived yet. Messages that retention has removed are found as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import BatchView
from txmq.broker.search.message_view import describe_message
from txmq.broker.search.search import SearchQuery
from txmq.core import machine
from txmq.core.events.audit import AuditStored
from txmq.core.events.base import RecordContext, UnknownEvent, decode, unsupported_event
from txmq.core.events.delays import (
    BatchDelayed,
    DelayedPublished,
    DelayedQueued,
    DelayedRecalled,
    DelayedRow,
)
from txmq.core.events.topics import BatchQueued, BatchStored, TopicCreated
from txmq.core.events.transactions import (
    BacklogDone,
    Decided,
    JobDecided,
    JobGroupsDone,
    PartStored,
    PublicationBegun,
    Released,
    UnpublishedBatch,
)
from txmq.core.transactions.batched import events_in
from txmq.model.message import Decision
from txmq.model.topic_partition import TopicPartition
from txmq.store.log.record import LOST, split_body

if TYPE_CHECKING:
    from txmq.broker.data_directory.verify import LogFiles
    from txmq.store.log.record import Record

assert machine, "imported because it registers all events"

# whose publication gives the offset: a token, a ticket, or where a message was stored
Owner = tuple[str, object]


class SearchScope(NamedTuple):
    """The searched place: a topic by its name, a partition (None = all), and the first
    offset.
    """

    topic: str
    partition: int | None = None
    offset: int = 0


class _RecordedBatch(NamedTuple):
    """A batch of a record. `base` is its offset, None = another record publishes it.
    `number` counts the batches of its bundle.
    """

    place: TopicPartition
    base: int | None
    data: bytes
    owner: Owner = ("", None)
    number: int = 0
    before: int = 0  # messages of the group in the partition before it


class OfflineSearch:
    """Scans the records once."""

    def __init__(self, files: LogFiles, scope: SearchScope, query: SearchQuery) -> None:
        self._files, self._scope, self._query = files, scope, query
        self._names: dict[int, str] = {}
        self._rows: list[dict[str, Any]] = []
        self._unpublished: dict[Owner, list[tuple[dict[str, Any], _RecordedBatch, int]]] = {}
        # of undecided groups: messages by partition, in their order
        self._partition_counts: dict[bytes, dict[TopicPartition, int]] = {}
        self._counts: dict[bytes, int] = {}
        self._handlers: dict[type, Callable[[Any, RecordContext], None]] = {
            TopicCreated: self._created,
            Decided: self._decided,
            JobDecided: self._job,
            JobGroupsDone: self._published,
            BacklogDone: self._published,
            PublicationBegun: self._begun,
            DelayedPublished: self._due,
            DelayedQueued: self._queued,
            DelayedRecalled: self._recalled,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return the messages found, in the order of storing. Damaged spans are
        skipped, and listed in `files.damaged` then. Raises StoreError, and its kind
        UnsupportedFormat at a record of another version, which may hold messages.
        """
        for record in self._files.scan(self._files.first):
            if record.kind == LOST:
                continue
            try:
                self._read(record)
            except UnknownEvent as unknown:
                raise unsupported_event(record.position, unknown.kind) from None
        low = self._scope.offset
        return [
            row
            for row in self._rows
            if not low or (row["offset"] is not None and row["offset"] >= low)
        ]

    def _read(self, record: Record) -> None:
        body = split_body(record)
        begin = body.attachment_position
        place = RecordContext(
            record.position, record.end, begin, record.stored_at, record.boot_epoch
        )
        for event, at in events_in(decode(record.kind, body.head), place):
            attached = body.attachment[at.attachment_position - begin :]
            for batch in self._stored(event, at, attached):
                if self._names.get(batch.place[0]) == self._scope.topic:
                    self._match(batch, record)
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event, at)

    def _stored(
        self, event: object, at: RecordContext, attached: memoryview
    ) -> Iterator[_RecordedBatch]:
        if isinstance(event, BatchStored):
            yield _RecordedBatch(
                TopicPartition(event.topic_id, event.partition),
                event.base_offset,
                bytes(attached[: event.length]),
            )
        elif isinstance(event, AuditStored):
            data = bytes(attached[: event.length])
            yield _RecordedBatch(TopicPartition(event.topic_id, 0), event.base_offset, data)
        elif isinstance(event, BatchQueued):
            data, ticket = bytes(attached[: event.length]), ("ticket", at.position)
            yield _RecordedBatch(
                TopicPartition(event.topic_id, event.partition), None, data, ticket
            )
        elif isinstance(event, BatchDelayed):
            for row in (DelayedRow(*row) for row in event.rows):
                data = bytes(attached[row.start : row.start + row.length])
                yield _RecordedBatch(
                    TopicPartition(event.topic_id, event.partition),
                    None,
                    data,
                    ("delayed", at.attachment_position + row.start),
                )
        elif isinstance(event, PartStored):
            yield from self._part(event, attached, at.attachment_position)

    def _part(
        self, event: PartStored, attached: memoryview, start: int
    ) -> Iterator[_RecordedBatch]:
        counts = self._partition_counts.setdefault(event.token, {})
        for at, batch in enumerate(UnpublishedBatch(*batch) for batch in event.batches):
            place = TopicPartition(batch.topic_id, batch.partition)
            number = self._counts.get(event.token, 0)
            self._counts[event.token] = number + 1
            data = bytes(attached[batch.start : batch.start + batch.length])
            if batch.delay is not None:
                counts.setdefault(place, 0)
                yield _RecordedBatch(place, None, data, ("delayed", start + batch.start))
                continue
            before = counts.get(place, 0)
            counts[place] = before + batch.count
            base = None if event.offsets is None else event.offsets[at]
            yield _RecordedBatch(place, base, data, ("token", event.token), number, before)

    def _match(self, batch: _RecordedBatch, record: Record) -> None:
        wanted, partition = self._query, self._scope.partition
        late = wanted.end is not None and record.stored_at >= wanted.end
        if (
            late
            or record.stored_at < (wanted.start or 0)
            or partition not in (None, batch.place[1])
        ):
            return
        view = BatchView(batch.data)
        for row in range(len(view)):
            own = (view.header.producer_id, view.header.sequence + row)
            if wanted.key in (None, view.keys[row]) and wanted.message in (None, own):
                self._add_row(batch, view, row, record)

    def _add_row(self, batch: _RecordedBatch, view: BatchView, row: int, record: Record) -> None:
        where = {
            "topic": self._scope.topic,
            "partition": batch.place[1],
            "offset": None,
            "position": record.position,
        }
        message = {"state": "stored", "stored_at": record.stored_at} | where
        message |= describe_message(view, row, bodies=self._query.bodies)
        self._rows.append(message)
        if batch.base is not None:
            _publish(message, batch.base + row)
        else:
            self._unpublished.setdefault(batch.owner, []).append((message, batch, row))

    def _created(self, event: TopicCreated, _at: RecordContext) -> None:
        self._names[event.topic_id] = event.name

    def _decided(self, event: Decided, at: RecordContext) -> None:
        if event.outcome == Decision.ROLLBACK:
            self._rolled_back(event.token)
        self._published(event, at)

    def _job(self, event: JobDecided, at: RecordContext) -> None:
        for token in event.losers:
            self._rolled_back(token)
        self._published(event, at)

    def _rolled_back(self, token: bytes) -> None:
        self._forget(token)
        for message, _batch, _row in self._unpublished.pop(("token", token), ()):
            message["state"] = "rolled_back"

    def _published(
        self, event: Decided | JobDecided | JobGroupsDone | BacklogDone, _at: RecordContext
    ) -> None:
        for one in (Released(*one) for one in event.released):
            owner: Owner = ("ticket", one.ticket) if one.token is None else ("token", one.token)
            for message, batch, row in self._unpublished.pop(owner, ()):
                _publish(message, one.offsets[batch.number] + row)
            self._forget(one.token or b"")

    def _begun(self, event: PublicationBegun, _at: RecordContext) -> None:
        bases = dict(zip(self._partition_counts.get(event.token, ()), event.bases, strict=False))
        for message, batch, row in self._unpublished.pop(("token", event.token), ()):
            if batch.place in bases:
                _publish(message, bases[batch.place] + batch.before + row)
        self._forget(event.token)

    def _forget(self, token: bytes) -> None:
        self._partition_counts.pop(token, None)
        self._counts.pop(token, None)

    def _due(self, event: DelayedPublished, _at: RecordContext) -> None:
        for _due, position, offset in event.messages:
            for message, _batch, row in self._unpublished.pop(("delayed", position), ()):
                if offset >= 0:
                    _publish(message, offset + row)

    def _queued(self, event: DelayedQueued, at: RecordContext) -> None:
        found = self._unpublished.pop(("delayed", event.position), None)
        if found is not None:
            self._unpublished["ticket", at.position] = found

    def _recalled(self, event: DelayedRecalled, _at: RecordContext) -> None:
        gone = {tuple(one) for one in event.ids}
        for owner, found in list(self._unpublished.items()):
            for message, batch, row in found if owner[0] == "delayed" else ():
                header = BatchView(batch.data).header
                if (header.producer_id, header.sequence + row) in gone:
                    message["state"] = "recalled"


def _publish(message: dict[str, Any], offset: int) -> None:
    message["state"], message["offset"] = "published", offset
