"""Search for messages in all topics, in bounded steps: by id, key, time and content.

A reply goes through a bounded number of topics and batches, and says where the next one
goes on, and how many messages it has read. Besides published messages, it finds those
of undecided transactions, delayed ones, and failed ones whose batches retention has
removed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.broker.search.message_view import describe_message, read_view, weight_of
from txmq.broker.search.search import BegunBatch, SearchQuery, find_by_id
from txmq.core.state import failed_messages, letter_index
from txmq.core.state.letter_cells import LetterState
from txmq.core.state.letter_index import PLACE, PREFIX, Dimension
from txmq.core.topics import delayed, key_order, topics
from txmq.core.transactions.indexes import undecided_tokens
from txmq.core.transactions.model import every_batch, get
from txmq.errors import CorruptRecord
from txmq.model.keys import key_hash
from txmq.model.limits import BATCH_ROWS
from txmq.model.own_topics import is_own
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import MILLISECOND
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.batch import BatchView
    from txmq.broker.engine.engine import Engine
    from txmq.broker.search.catalogue_service import CatalogueService
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State, Topic
    from txmq.core.steps import Steps

PARTITIONS_PER_STEP = 64
STEP_BATCHES, STEP_BYTES = 64, 64 << 10  # scanned without a catalogue
STEPS = 1_024  # of one reply
REPLY_BYTES = 1 << 20
MAX_DELAYED = 10_000  # rows of delayed messages that are looked through for a key
MAX_HOLDERS = 100  # undecided transactions, in each partition where there is a key
MAX_LETTERS = 1_000  # of which only their rows are left
BATCHES_OF_TRANSACTION = 1_000

# Topic id, partition, offset. What is in no topic comes first: instead of offsets it
# has numbers of batches times BATCH_ROWS, and of rows in these.
Place = tuple[int, int, int]
IN_NO_TOPIC = 0
FIRST: Place = (IN_NO_TOPIC, 0, 0)

# position and length of a batch, the one row of it or None for all, and fields
_Apart = tuple[int, int, int | None, dict[str, Any]]
_Holder = tuple[bytes, TopicPartition | None]  # token, and where it holds the key


class SearchEverywhere:
    """One reply. All methods belong to the reactor's thread."""

    def __init__(
        self,
        engine: Engine,
        catalogues: CatalogueService,
        wanted: SearchQuery,
        start: Place | None,
        within_ms: int | None = None,
    ) -> None:
        """A reply takes `within_ms` at most, None = as long as it needs."""
        self._engine, self._catalogues, self._wanted = engine, catalogues, wanted
        self._start = start
        self._found: list[dict[str, Any]] = []
        self._damaged: list[tuple[str, int, int]] = []
        self._size = 0
        self._steps = STEPS
        self._begun = BegunBatch()
        self._read = 0  # messages
        self._until = None if within_ms is None else engine.now() + within_ms * MILLISECOND
        self._hash = None if wanted.key is None else key_hash(wanted.key)

    @property
    def _state(self) -> State:
        return self._engine.state

    def reply(self) -> Steps[dict[str, Any]]:
        """Return the reply, in steps."""
        following: Place | None = None
        if self._start is not None or not self._find_one():
            start = self._start or FIRST
            if start[0] == IN_NO_TOPIC:
                following = yield from self._unpublished(start[2])
            if following is None:
                following = yield from self._topics(start)
        return {
            "messages": self._found,
            "damaged": self._damaged,
            "next": None if following is None else list(following),
            "at": None if following is None else self._topic_at(following),
            "topics": len(self._topic_ids()),
            "read": self._read,
        }

    def _topic_at(self, place: Place) -> str:
        """Return the name of the topic of a place; of one in no topic, the first's."""
        topic = self._state.topics_by_id.get(place[0] or min(self._topic_ids(), default=0))
        return "" if topic is None else topic.name

    def _add(self, message: dict[str, Any]) -> None:
        self._found.append(message)
        self._size += weight_of(message)

    @property
    def _full(self) -> bool:
        return len(self._found) >= self._wanted.limit or self._size >= REPLY_BYTES

    @property
    def _late(self) -> bool:
        return self._until is not None and self._engine.now() >= self._until

    def _find_one(self) -> bool:
        """Find a message by its id alone. True = there is nothing else to find."""
        wanted = self._wanted
        if wanted.message is None:
            return False
        found = find_by_id(self._engine.store, self._state, wanted.message, bodies=wanted.bodies)
        if found is None or (found.get("offset") is None and found["state"] == "published"):
            return False
        self._add(found)
        return True

    def _topics(self, start: Place) -> Steps[Place | None]:
        """Search the topics from a place on; return where the next reply begins."""
        for topic_id in sorted(one for one in self._topic_ids() if one >= start[0]):
            topic = self._state.topics_by_id[topic_id]
            partition, offset = start[1:] if topic_id == start[0] else (0, 0)
            while partition < len(topic.end_offsets) and not topic.deleted:
                # a reply makes a step at least, so that the search comes to its end
                if self._steps <= 0 or self._full or (self._steps < STEPS and self._late):
                    return topic_id, partition, offset
                self._steps -= 1
                partition, offset = self._step(topic, partition, offset)
                yield
        return None

    def _topic_ids(self) -> list[int]:
        """Return the topics to search, without the broker's own: not everybody who may
        read all topics may read those.
        """
        return [one.topic_id for one in self._state.topics.values() if not is_own(one.name)]

    def _step(self, topic: Topic, partition: int, offset: int) -> tuple[int, int]:
        """Search some partitions; return where the next step goes on."""
        last = min(partition + PARTITIONS_PER_STEP, len(topic.end_offsets))
        try:
            page = self._catalogues.search(
                topic,
                self._wanted,
                range(partition, last),
                offset,
                batches=STEP_BATCHES,
                size=STEP_BYTES,
                begun=self._begun,
            )
        except CorruptRecord as error:
            return self._behind_damage(topic, error, partition, last, offset)
        self._read += page.read
        for message in page.messages:
            self._add({"state": "published"} | message)
        if page.following is not None:
            return page.following
        return last, 0

    def _behind_damage(
        self, topic: Topic, error: CorruptRecord, partition: int, last: int, offset: int
    ) -> tuple[int, int]:
        """Note a damaged batch, and go on behind it."""
        for number in range(partition, last):
            tp = TopicPartition(topic.topic_id, number)
            low = offset if number == partition else topic.start_offsets[number]
            for base, entry in topics.scan_entries(self._state, tp, low):
                if entry.position <= error.position < entry.position + entry.length:
                    self._damaged.append((topic.name, number, base))
                    return number, base + entry.count
        return last, 0  # the damage is in no batch that can be told

    def _name(self, tp: TopicPartition) -> dict[str, Any]:
        name = self._state.topics_by_id[tp[0]].name
        return {"topic": name, "partition": tp[1], "offset": None}

    def _view(self, position: int, length: int) -> BatchView | None:
        """Return a batch that is durable and undamaged."""
        if position + length > self._engine.store.durable:
            return None
        try:
            return read_view(self._engine.store, position, length)
        except CorruptRecord:
            return None

    def _unpublished(self, first: int) -> Steps[Place | None]:
        """Find messages in no topic from a place on; return where the next reply
        begins.
        """
        (begins, skipped), number = divmod(first, BATCH_ROWS), -1
        for batch in self._apart():
            yield
            number += batch is not None
            if batch is None or number < begins:
                continue
            position, length, row, fields = batch
            view = self._view(position, length)
            rows = range(0 if view is None else len(view)) if row is None else range(row, row + 1)
            for at in rows[skipped if number == begins else 0 :]:
                # a reply looks at a message at least, so that the search ends
                if self._full or (self._read and self._late):
                    return IN_NO_TOPIC, 0, number * BATCH_ROWS + at - rows.start
                self._add_row(view, at, fields)
                yield  # a large body takes long to judge
        return None

    def _apart(self) -> Iterator[_Apart | None]:
        """Yield batches of undecided transactions, of delayed messages, and of failed
        ones of which only their rows are left; None after some that are of other keys.
        """
        if self._wanted.message is not None:
            return
        for holders in self._holders():
            yield from self._undecided(holders)
            yield None
        start = position = 0
        for _number in range(0, MAX_DELAYED, STEP_BATCHES):
            # anew each time: the table changes between steps
            found = delayed.scan(self._state, start, position=position)
            some = list(islice(found, STEP_BATCHES))
            for waiting in some:
                shape = waiting.message
                if self._hash in (None, shape.key_hash):
                    place = self._name(TopicPartition(shape.topic_id, shape.partition))
                    fields = {"state": "delayed", "due_at": waiting.due} | place
                    yield waiting.log_position, shape.length, None, fields
            if len(some) < STEP_BATCHES:
                break
            start, position = some[-1].due, some[-1].position + 1
            yield None
        for ref, failed in islice(self._letters(), MAX_LETTERS):
            fields = self._name(TopicPartition(*ref[:2])) | {
                "state": "removed by retention",
                "offset": ref[2],
                "stored_at": failed.stored_at,
            }
            yield failed.position, failed.length, failed.row, fields

    def _holders(self) -> Iterator[list[_Holder]]:
        """Yield undecided transactions: those that hold the key, partition by
        partition, or all where there is none.
        """
        hashed = self._hash
        if hashed is None:
            yield [(token, None) for token in islice(undecided_tokens(self._state), MAX_HOLDERS)]
            return
        for tp in sorted(self._state.held_keys):
            holders = islice(key_order.holders(self._state, (*tp, hashed)), MAX_HOLDERS)
            yield [(token, tp) for _ticket, token in holders if token is not None]

    def _undecided(self, holders: list[_Holder]) -> Iterator[_Apart]:
        """Yield their batches, or those in the partition where they hold the key."""
        for token, held in holders:
            row = get(self._state, token)
            batches = () if row is None else every_batch(self._state, token, row)
            # a list, because the tables change between steps
            for batch, base in list(islice(batches, BATCHES_OF_TRANSACTION)):
                tp = TopicPartition(batch.topic_id, batch.partition)
                if row is not None and base is None and held in (None, tp):
                    fields = {"state": row.state.name.lower(), "token": token.hex()}
                    yield batch.position, batch.length, None, fields | self._name(tp)

    def _letters(self) -> Iterator[tuple[Place, FailedMessage]]:
        """Yield the letters, of the key if there is one, whose batches are in no topic
        any more.
        """
        hashed = self._hash
        where = (Dimension.ALL, 0) if hashed is None else (Dimension.KEY, hashed + t.SIGN)
        seen: set[Place] = set()
        for group in list(self._state.groups.by_name.values()):
            for state in (LetterState.OPEN, LetterState.ABANDONED):
                prefix = letter_index.prefix(group.group_id, state, *where)
                rows = self._state.tables[t.LETTER_INDEX].range(
                    prefix, prefix + b"\xff" * (PLACE.size + 1)
                )
                # at once: the table changes while the caller waits between two letters
                for key in [key for key, _row in islice(rows, MAX_LETTERS)]:
                    ref: Place = PLACE.unpack(key[PREFIX.size :])[2:]
                    topic = self._state.topics_by_id[ref[0]]
                    row = failed_messages.get(self._state, group, ref)
                    if row is None or ref in seen or topic.deleted or _is_retained(topic, ref):
                        continue
                    seen.add(ref)
                    yield ref, row

    def _add_row(self, view: BatchView | None, row: int, fields: dict[str, Any]) -> None:
        """Add a message that is in no topic, if it is wanted."""
        if view is None:
            return
        self._read += 1
        if self._wanted.wants(view, row):
            self._add(fields | describe_message(view, row, bodies=self._wanted.bodies))


def _is_retained(topic: Topic, ref: Place) -> bool:
    return ref[2] >= topic.start_offsets[ref[1]]
