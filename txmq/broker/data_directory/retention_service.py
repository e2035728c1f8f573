"""Rounds of retention over all topics: old messages go, and the log learns which
segments are still needed.

A round makes one short step in each turn of the reactor, and ends when it has visited
every topic. Its result (`FreeLog`) counts only as of the log's end at that time; the
storage service removes segments by it.

A follower of a shared log decides nothing. Its rounds only find what its state needs,
which is what the leader's state needs at the same position.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import structlog

from txmq.batch import BatchView, single_row
from txmq.broker.engine.log_reader import read_batches
from txmq.broker.engine.message_copies import MessageCopies
from txmq.core.events.topics import FirstsMoved, TopicDeleted, TopicsEmptied
from txmq.core.retention import audit_entries, log_floor, relocation, topic_retention
from txmq.core.retention.audit_entries import MoveEntries
from txmq.core.retention.letter_retention import ExpireLetters
from txmq.core.retention.relocation import RepointMessages, RetainedMessage
from txmq.core.retention.topic_retention import ApplyRetention, RetentionLimits, limits_of
from txmq.core.state import log_pins
from txmq.core.topics import delayed
from txmq.core.topics.delay_rules import RelocateDelayed
from txmq.core.topics.topics import EmptyTopics
from txmq.errors import CorruptRecord, RequestRejected
from txmq.model.units import HOUR
from txmq.store.tables import SIGN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.config.broker import RetentionSettings
    from txmq.core.events.base import LogSpan, RecordContext
    from txmq.core.retention.audit_entries import AuditEntryAt
    from txmq.core.state.state import Topic
    from txmq.core.topics.delayed import ScheduledMessage

PARTITIONS_PER_STEP = 256  # in one turn of the reactor: about 2 ms
EMPTIED_PER_ROUND = 10_000  # deleted topics, in one record
COPIED_BYTES = 4 << 20  # of batches, opened in one turn to copy messages out of them
TRANSACTIONS = "undecided or waiting transactions"
log = structlog.get_logger()


class FreeLog(NamedTuple):
    """The log below position `below` is not needed, once the log is durable up to
    `as_of`.

    `held_by` names what needs the log there: a topic, or another reason.
    """

    below: int = 0
    as_of: int = 0
    held_by: str = ""


class RetentionService:
    """Makes the rounds; `free` is the result of the last one. All methods belong to the
    reactor's thread.
    """

    def __init__(
        self, engine: Engine, settings: RetentionSettings, clock: Clock, *, decides: bool = True
    ) -> None:
        self._engine, self._clock, self.decides = engine, clock, decides
        self.use(settings)
        self._busy = self._stopped = False
        self._topics: list[int] = []
        self._groups: list[int] = []
        # deleted topics without messages, and the ends of the records that deleted them
        self._empty: list[int] = []
        self._deleted_at: dict[int, int] = {}
        self._started = engine.store.end
        self._began = 0
        self._copies = MessageCopies(engine)
        self._lowest = SIGN
        self._held_by = ""
        self.free = FreeLog()
        self.missed = 0  # messages that retention took from groups, since the start
        self.missed_at = 0
        if decides:
            engine.listen(FirstsMoved, self._log_firsts_moved)
            engine.listen(TopicDeleted, self._note_deleted)
            engine.listen(TopicsEmptied, self._note_emptied)

    def use(self, settings: RetentionSettings) -> None:
        """Go by other settings, from the next round on."""
        self._keep = RetentionLimits(int(settings.hours * HOUR), settings.bytes)
        self._letters = int(settings.letters_hours * HOUR)
        self._policy = settings.policy

    def tick(self) -> None:
        """Timer: begin a round, unless one is under way."""
        if self._busy or self._stopped or self._engine.failed is not None:
            return
        self._busy = True
        self._topics = list(self._engine.state.topics_by_id)
        self._groups = list(self._engine.state.groups.by_id)
        # An edit's version that is not durable yet has no pin: it counts as new.
        self._began, self._lowest, self._held_by = self._engine.store.durable, SIGN, ""
        self._empty = []
        self._soon(self._visit_topics)

    def stop(self) -> None:
        """Make no further step; the next start begins a new round."""
        self._stopped = True

    @property
    def held_bytes(self) -> int:
        """Bytes of log that are kept for transactions: undecided ones, and those that
        wait for them.
        """
        return self._engine.store.end - self.free.below if self.free.held_by == TRANSACTIONS else 0

    @property
    def archiving(self) -> bool:
        """Return whether released segments go to the archive.

        All topics share the log, so one topic with that policy is enough.
        """
        topics = self._engine.state.topics_by_id.values()
        return any((topic.settings.policy or self._policy) == "archive" for topic in topics)

    def _soon(self, step: Callable[[], None]) -> None:
        self._clock.callLater(0, self._run, step)

    def _run(self, step: Callable[[], None]) -> None:
        if self._stopped or self._engine.failed is not None:
            self._busy = False
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001  # a bug at one topic must not stop retention
            self._skip(step, error)

    def _skip(self, step: Callable[[], None], error: Exception) -> None:
        """Go on with the next topic after an exception; elsewhere, end the round. No
        segment is freed by a round that has not seen everything.
        """
        self._engine.faults.record("retention", error)
        self._need(0, "an internal error: see the broker's log")
        if step == self._visit_topics and self._topics:
            self._topics.pop()
            self._soon(self._visit_topics)
        else:
            self._end_round()

    def _submit(self, command: object, following: Callable[[], None]) -> None:
        """Submit a command, and continue once it is durable. A refusal, for want of
        space, ends the round.
        """

        def done(reply: object) -> None:
            self._busy = not isinstance(reply, RequestRejected)
            if self._busy:
                self._soon(following)

        self._engine.submit(command, done)

    def _store(self, copies: Sequence[bytes], following: Callable[[list[LogSpan]], None]) -> None:
        """Store copies, and continue with their spans once they are durable. A refusal
        ends the round.
        """

        def stored(spans: list[LogSpan] | RequestRejected) -> None:
            self._busy = not isinstance(spans, RequestRejected)
            if not isinstance(spans, RequestRejected):
                self._soon(partial(following, spans))

        self._copies.store(copies, stored)

    def _visit_topics(self) -> None:
        state, store, room = self._engine.state, self._engine.store, PARTITIONS_PER_STEP
        while self._topics and room > 0:
            topic = state.topics_by_id.get(self._topics[-1])
            if topic is None:  # deleted and forgotten meanwhile
                self._topics.pop()
                continue
            room -= max(1, len(topic.end_offsets))
            if not self.decides:
                self._end_topic(topic)
                continue
            command = ApplyRetention(
                topic.topic_id, limits_of(topic, self._keep), store.durable, store.first
            )
            found = topic_retention.preview(state, command, self._engine.now())
            if found.batches:
                self._submit(command, self._visit_topics)
                return
            if found.to_copy and self._copy_out(found.to_copy, self._visit_topics):
                return
            self._end_topic(topic)
        if self._topics:
            self._soon(self._visit_topics)
        else:
            self._soon(self._give_up_empty if self.decides else self._visit_pins)

    def _end_topic(self, topic: Topic) -> None:
        self._need(log_floor.topic_floor(self._engine.state, topic), f"topic {topic.name}")
        self._topics.pop()
        if topic.deleted and topic.end_offsets and topic.start_offsets == topic.end_offsets:
            self._empty.append(topic.topic_id)

    def _give_up_empty(self) -> None:
        """Free the memory of deleted topics without messages. A message that is stored,
        but not published yet, may still belong to one that was deleted after it.
        """
        lowest = log_floor.state_floor(self._engine.state, delayed_too=False)
        ids = [one for one in self._empty if self._deleted_at.get(one, self._started) <= lowest]
        self._empty = []
        if ids:
            self._submit(EmptyTopics(tuple(ids[:EMPTIED_PER_ROUND])), self._expire_letters)
        else:
            self._soon(self._expire_letters)

    def _note_deleted(self, event: TopicDeleted, place: RecordContext) -> None:
        self._deleted_at[event.topic_id] = place.end

    def _note_emptied(self, event: TopicsEmptied, _place: RecordContext) -> None:
        for topic_id in event.topic_ids:
            self._deleted_at.pop(topic_id, None)

    def _need(self, position: int, by: str) -> None:
        if position < self._lowest:
            self._lowest, self._held_by = position, by

    def _copy_out(self, rows: Sequence[RetainedMessage], following: Callable[[], None]) -> bool:
        """Copy the first of these messages, then point at the copies once they are
        durable. False = they cannot be read, and stay where they are.
        """
        chosen: list[RetainedMessage] = []
        copies: list[bytes] = []
        left = COPIED_BYTES
        for span, some in groupby(rows, attrgetter("position", "length")):
            batch = self._read([span])
            if batch is None:
                break
            view = BatchView(batch[0])
            left -= max(len(batch[0]), view.header.size)
            if copies and left < 0:
                break
            for row in some:
                chosen.append(row)
                copies.append(single_row(batch[0], row.row, view))

        def point(spans: list[LogSpan]) -> None:
            pointed = tuple((row, *span) for row, span in zip(chosen, spans, strict=True))
            self._submit(RepointMessages(pointed), following)

        if copies:
            self._store(copies, point)
        return bool(copies)

    def _expire_letters(self, after: int = 0) -> None:
        state = self._engine.state
        own = (topic.settings.letters_us for topic in state.topics_by_id.values())
        if not self._groups or (not self._letters and max(own, default=0) <= 0):
            self._soon(self._visit_pins)
            return

        def expired(reply: object) -> None:
            self._busy = isinstance(reply, int)
            if isinstance(reply, int):
                if not reply:
                    self._groups.pop()
                self._soon(lambda: self._expire_letters(reply))

        self._engine.submit(ExpireLetters(self._groups[-1], after, self._letters), expired)

    def _visit_pins(self) -> None:
        """Copy messages that hold a segment alone: delayed messages, and those that log
        pins keep.
        """
        state, store = self._engine.state, self._engine.store
        self._need(log_floor.state_floor(state, delayed_too=False), TRANSACTIONS)
        self._need(max(0, self._began - log_pins.SLACK_BYTES), "what is new")
        whole = max(
            (segment.end for segment in store.segments()[:-1] if segment.end <= self._lowest),
            default=0,
        )
        if self.decides and self._move_delayed(whole):
            return
        self._need(log_floor.state_floor(state), "messages that wait for their time")
        if not self.decides:
            self._end_round()
            return
        stale, again = list[int](), list[RetainedMessage]()
        entries: list[AuditEntryAt] = []
        for pin in log_pins.pins_below(state, whole):
            if len(stale) + len(again) + len(entries) >= relocation.STEP_COPIES:
                break
            entry = audit_entries.entry_of_pin(state, pin)
            if entry is not None:
                entries.append(entry)
                continue
            if relocation.is_stale_pin(state, pin):
                stale.append(pin.position)
                continue
            row = relocation.message_of_pin(state, pin)
            if row is None:
                break
            again.append(row)
        if stale:
            self._submit(RepointMessages((), tuple(stale)), self._visit_pins)
        elif not (entries and self._move_entries(entries)) and not (
            again and self._copy_out(again, self._visit_pins)
        ):
            self._end_round()

    def _move_entries(self, entries: Sequence[AuditEntryAt]) -> bool:
        """Copy messages of the audit topic that hold a segment alone. False = they
        cannot be read, and stay where they are.
        """
        batches = self._read([(one.pin.position, one.length) for one in entries])
        if batches is None:
            return False

        def move(spans: list[LogSpan]) -> None:
            moved = tuple((one.pin, span[0]) for one, span in zip(entries, spans, strict=True))
            self._submit(MoveEntries(moved), self._visit_pins)

        self._store(batches, move)
        return True

    def _move_delayed(self, whole: int) -> bool:
        """Store delayed messages again that hold a segment alone. False = there are
        none, or they cannot be read.
        """
        waiting = tuple(_some(delayed.stored_below(self._engine.state, whole)))
        batches = self._read([(one.log_position, one.message.length) for one in waiting])
        if not batches:
            return False
        stored_again = tuple(zip(waiting, batches, strict=True))
        self._submit(RelocateDelayed(stored_again), self._visit_pins)
        return True

    def _read(self, spans: Sequence[LogSpan]) -> list[bytes] | None:
        """Return batches; None = one of them cannot be read, which is logged."""
        try:
            return list(map(bytes, read_batches(self._engine.store, spans)))
        except CorruptRecord as error:
            log.exception("retention.unreadable", path=error.path, position=error.position)
            return None

    def _end_round(self) -> None:
        for pin in islice(log_pins.pins_below(self._engine.state, self._lowest), 1):
            self._need(
                pin.position,
                f"a message of topic {self._engine.state.topics_by_id[pin.topic_id].name}",
            )
        self.free = FreeLog(self._lowest, self._engine.store.end, self._held_by)
        self._busy = False

    def _log_firsts_moved(self, event: FirstsMoved, place: RecordContext) -> None:
        state = self._engine.state
        topic = state.topics_by_id[event.topic_id].name
        log.info("retention.moved", topic=topic, partitions=len(event.firsts))
        for group_id, partition, missed in event.passed:
            group = state.groups.by_id[group_id].name
            self.missed += missed
            self.missed_at = place.stored_at
            log.error(
                "retention.passed_group",
                group=group,
                topic=topic,
                partition=partition,
                messages=missed,
            )


def _some(waiting: Iterable[ScheduledMessage]) -> Iterator[ScheduledMessage]:
    """Yield as many of the first messages as one record stores again."""
    left = COPIED_BYTES
    for number, one in enumerate(islice(waiting, relocation.STEP_COPIES)):
        left -= one.message.length
        if number and left < 0:
            return
        yield one
