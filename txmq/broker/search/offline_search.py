"""Messages looked up in a log that no broker has open, such as an archive: by key, id,
time and place.

The records are all there is: a batch is found where it was stored, and has its offset
from the record that published it, there or later. What was not published as far as
these records go is told as `stored`, which an archive often has: the decision stands in
a segment that is not archived yet. Whatever was kept no longer is found as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import BatchView
from txmq.broker.search.search import Wanted, message
from txmq.core.events.base import EVENTS, BatchQueued, BatchStored, TopicCreated, decode
from txmq.core.events.base import Place as At
from txmq.core.events.delays import (
    BatchDelayed,
    DelayedPublished,
    DelayedQueued,
    DelayedRecalled,
    DelayedRow,
)
from txmq.core.events.transactions import (
    BacklogDone,
    Decided,
    JobDecided,
    JobGroupsDone,
    PartStored,
    PublicationBegun,
    Released,
    StoredBatch,
)
from txmq.core.transactions.batched import members
from txmq.model.message import Decision
from txmq.store.record import split_body

if TYPE_CHECKING:
    from txmq.broker.data_directory.verify import LogFiles
    from txmq.store.record import Record

Owner = tuple[
    str, object
]  # whose publication gives the offset: a token, a ticket, or where a message was stored
Spot = tuple[int, int]  # topic id, partition


class Place(NamedTuple):
    """In a log: a topic by its name, a partition (None = all), and offsets from one
    on.
    """

    topic: str
    partition: int | None = None
    offset: int = 0


class _Batch(NamedTuple):
    """A batch as its record has it; `base` None = not published there. `number` counts
    the batches of its group.
    """

    spot: Spot
    base: int | None
    data: bytes
    owner: Owner = ("", None)
    number: int = 0
    before: int = 0  # messages of the group in the partition before it


class Digging:
    """Goes through the records once. `rows` are what was found, in the order of
    storing.
    """

    def __init__(self, files: LogFiles, place: Place, wanted: Wanted) -> None:
        self._files, self._place, self._wanted = files, place, wanted
        self._names: dict[int, str] = {}
        self._rows: list[dict[str, Any]] = []
        self._waiting: dict[Owner, list[tuple[dict[str, Any], _Batch, int]]] = {}
        self._shares: dict[
            bytes, dict[Spot, int]
        ] = {}  # of undecided groups: messages by partition, in their order
        self._counts: dict[bytes, int] = {}
        self._told: dict[type, Callable[[Any, At], None]] = {
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
        """Look through all of it. Raises StoreError; damaged spans are passed over, and
        in `files.damaged` then.
        """
        for record in self._files.scan(self._files.first):
            if record.kind not in EVENTS:
                continue
            body = split_body(record)
            begin = body.attachment_position
            place = At(record.position, record.end, begin, record.stored_at, record.boot_epoch)
            for event, at in members(decode(record.kind, body.head), place):
                for batch in self._stored(event, at, body.attachment[at.attachment - begin :]):
                    if self._names.get(batch.spot[0]) == self._place.topic:
                        self._look_at(batch, record)
                told = self._told.get(type(event))
                if told is not None:
                    told(event, at)
        low = self._place.offset
        return [
            row
            for row in self._rows
            if not low or (row["offset"] is not None and row["offset"] >= low)
        ]

    def _stored(self, event: object, at: At, attached: memoryview) -> Iterator[_Batch]:
        if isinstance(event, BatchStored):
            yield _Batch(
                (event.topic_id, event.partition),
                event.base_offset,
                bytes(attached[: event.length]),
            )
        elif isinstance(event, BatchQueued):
            data, ticket = bytes(attached[: event.length]), ("ticket", at.position)
            yield _Batch((event.topic_id, event.partition), None, data, ticket)
        elif isinstance(event, BatchDelayed):
            for row in (DelayedRow(*row) for row in event.rows):
                data = bytes(attached[row.start : row.start + row.length])
                yield _Batch(
                    (event.topic_id, event.partition),
                    None,
                    data,
                    ("delayed", at.attachment + row.start),
                )
        elif isinstance(event, PartStored):
            yield from self._part(event, attached, at.attachment)

    def _part(self, event: PartStored, attached: memoryview, start: int) -> Iterator[_Batch]:
        shares = self._shares.setdefault(event.token, {})
        for at, batch in enumerate(StoredBatch(*batch) for batch in event.batches):
            spot, number = (batch.topic_id, batch.partition), self._counts.get(event.token, 0)
            self._counts[event.token] = number + 1
            data = bytes(attached[batch.start : batch.start + batch.length])
            if batch.delay is not None:
                shares.setdefault(spot, 0)
                yield _Batch(spot, None, data, ("delayed", start + batch.start))
                continue
            before = shares.get(spot, 0)
            shares[spot] = before + batch.count
            base = None if event.offsets is None else event.offsets[at]
            yield _Batch(spot, base, data, ("token", event.token), number, before)

    def _look_at(self, batch: _Batch, record: Record) -> None:
        wanted, partition = self._wanted, self._place.partition
        late = wanted.end is not None and record.stored_at >= wanted.end
        if late or record.stored_at < (wanted.start or 0) or partition not in (None, batch.spot[1]):
            return
        view = BatchView(batch.data)
        for row in range(len(view)):
            own = (view.header.producer_id, view.header.sequence + row)
            if wanted.key in (None, view.keys[row]) and wanted.found in (None, own):
                self._found(batch, view, row, record)

    def _found(self, batch: _Batch, view: BatchView, row: int, record: Record) -> None:
        where = {
            "topic": self._place.topic,
            "partition": batch.spot[1],
            "offset": None,
            "position": record.position,
        }
        told = {"state": "stored", "stored_at": record.stored_at} | where
        told |= message(view, row, bodies=self._wanted.bodies)
        self._rows.append(told)
        if batch.base is not None:
            _publish(told, batch.base + row)
        else:
            self._waiting.setdefault(batch.owner, []).append((told, batch, row))

    def _created(self, event: TopicCreated, _at: At) -> None:
        self._names[event.topic_id] = event.name

    def _decided(self, event: Decided, at: At) -> None:
        if event.outcome == Decision.ROLLBACK:
            self._rolled_back(event.token)
        self._published(event, at)

    def _job(self, event: JobDecided, at: At) -> None:
        for token in event.losers:
            self._rolled_back(token)
        self._published(event, at)

    def _rolled_back(self, token: bytes) -> None:
        self._forget(token)
        for told, _batch, _row in self._waiting.pop(("token", token), ()):
            told["state"] = "rolled_back"

    def _published(
        self, event: Decided | JobDecided | JobGroupsDone | BacklogDone, _at: At
    ) -> None:
        for one in (Released(*one) for one in event.released):
            owner: Owner = ("ticket", one.ticket) if one.token is None else ("token", one.token)
            for told, batch, row in self._waiting.pop(owner, ()):
                _publish(told, one.offsets[batch.number] + row)
            self._forget(one.token or b"")

    def _begun(self, event: PublicationBegun, _at: At) -> None:
        bases = dict(zip(self._shares.get(event.token, ()), event.bases, strict=False))
        for told, batch, row in self._waiting.pop(("token", event.token), ()):
            if batch.spot in bases:
                _publish(told, bases[batch.spot] + batch.before + row)
        self._forget(event.token)

    def _forget(self, token: bytes) -> None:
        self._shares.pop(token, None)
        self._counts.pop(token, None)

    def _due(self, event: DelayedPublished, _at: At) -> None:
        for _due, position, offset in event.messages:
            for told, _batch, row in self._waiting.pop(("delayed", position), ()):
                if offset >= 0:
                    _publish(told, offset + row)

    def _queued(self, event: DelayedQueued, at: At) -> None:
        found = self._waiting.pop(("delayed", event.position), None)
        if found is not None:
            self._waiting["ticket", at.position] = found

    def _recalled(self, event: DelayedRecalled, _at: At) -> None:
        gone = {tuple(one) for one in event.ids}
        for owner, found in list(self._waiting.items()):
            for told, batch, row in found if owner[0] == "delayed" else ():
                header = BatchView(batch.data).header
                if (header.producer_id, header.sequence + row) in gone:
                    told["state"] = "recalled"


def _publish(told: dict[str, Any], offset: int) -> None:
    told["state"], told["offset"] = "published", offset
