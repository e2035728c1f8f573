"""Goes round all topics every so often: what is kept no longer goes, and the log learns
from where it is still needed.

One short step in each turn of the reactor. A round is over when every topic was looked
at; what it found free counts only as of the log's end at that time (`Free`), and is
given up to the keeper.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import structlog

from txmq.batch import single_row
from txmq.broker.log_reader import read_batches
from txmq.core.events.base import FirstsMoved, MessagesCopied
from txmq.core.retention import log_floor, relocation, topic_retention
from txmq.core.retention.letter_retention import ExpireLetters
from txmq.core.retention.relocation import CopyOut, Outlived, Repoint
from txmq.core.retention.topic_retention import Keep, Retain, keep_of
from txmq.core.state import log_pins
from txmq.core.state.state import Rejected
from txmq.core.topics import delayed
from txmq.core.topics.delay_rules import MoveDelayed
from txmq.errors import CorruptRecord
from txmq.store.tables import SIGN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.engine import Engine
    from txmq.broker.reactor.protocols import Clock
    from txmq.config.storage import Retention
    from txmq.core.events.base import Place
    from txmq.core.state.state import Topic

HOUR = 3_600_000_000
PARTITIONS = 256  # looked at in one turn of the reactor: about 2 ms
READ = 4 << 20  # bytes of batches read in one turn, to copy messages out of them
TRANSACTIONS = "undecided or waiting transactions"
log = structlog.get_logger()


class Free(NamedTuple):
    """Nothing below the log position `below` is needed, once the log is durable up to
    `as_of`.

    `held_by` is what is needed there: a topic, by its name, or what else.
    """

    below: int = 0
    as_of: int = 0
    held_by: str = ""


class Retaining:
    """See above. `free` is what the last round found. All methods belong to the
    reactor's thread.
    """

    def __init__(self, engine: Engine, settings: Retention, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._keep = Keep(int(settings.hours * HOUR), settings.bytes)
        self._letters = int(settings.letters_hours * HOUR)
        self._policy = settings.policy
        self._busy = self._stopped = False
        self._topics: list[int] = []
        self._groups: list[int] = []
        self._began = self._copied_to = 0
        self._lowest = SIGN
        self._held_by = ""
        self.free = Free()
        self.passed = 0  # messages that groups have missed, since the start
        self.passed_at = 0
        engine.listen(FirstsMoved, self._moved)
        engine.listen(MessagesCopied, self._copied)

    def tick(self) -> None:
        """Timer: begin a round, unless one is under way."""
        if self._busy or self._stopped or self._engine.failed is not None:
            return
        self._busy = True
        self._topics, self._groups = (
            list(self._engine.state.topics_by_id),
            list(self._engine.state.consumers.by_id),
        )
        self._began, self._lowest, self._held_by = self._engine.store.end, SIGN, ""
        self._soon(self._look)

    def stop(self) -> None:
        """No further step: the next start begins a round of its own."""
        self._stopped = True

    @property
    def held(self) -> int:
        """Bytes of log that are kept because transactions are undecided, or wait for
        those that are.
        """
        return self._engine.store.end - self.free.below if self.free.held_by == TRANSACTIONS else 0

    @property
    def archives(self) -> bool:
        """Whether segments that are needed no longer go to the archive: the log is one
        for all topics.
        """
        topics = self._engine.state.topics_by_id.values()
        return any((topic.settings.policy or self._policy) == "archive" for topic in topics)

    def _soon(self, step: Callable[[], None]) -> None:
        self._clock.callLater(0, self._run, step)

    def _run(self, step: Callable[[], None]) -> None:
        if self._stopped or self._engine.failed is not None:
            self._busy = False
        else:
            step()

    def _do(self, command: object, following: Callable[[], None]) -> None:
        """Carry out a command and go on; refused, for want of space, the round ends."""

        def done(reply: object) -> None:
            self._busy = not isinstance(reply, Rejected)
            if self._busy:
                self._soon(following)

        self._engine.submit(command, done)

    def _look(self) -> None:
        state, store, room = self._engine.state, self._engine.store, PARTITIONS
        while self._topics and room > 0:
            topic = state.topics_by_id[self._topics[-1]]
            room -= len(topic.ends)
            command = Retain(topic.topic_id, keep_of(topic, self._keep), store.durable, store.first)
            found = topic_retention.planned(state, command, self._engine.now())
            if found.batches:
                self._do(command, self._look)
                return
            if found.outlived and self._copy_out(found.outlived, self._look):
                return
            self._done_with(topic)
        self._soon(self._look if self._topics else self._expire_letters)

    def _done_with(self, topic: Topic) -> None:
        self._need(log_floor.by_topic(self._engine.state, topic), f"topic {topic.name}")
        self._topics.pop()

    def _need(self, position: int, by: str) -> None:
        if position < self._lowest:
            self._lowest, self._held_by = position, by

    def _copy_out(self, rows: Sequence[Outlived], following: Callable[[], None]) -> bool:
        """Copy messages, then point at the copies once they are durable; False = they
        cannot be read, and stay.
        """
        chosen: list[Outlived] = []
        for row in rows:
            if not chosen or sum(one.length for one in chosen) + row.length <= READ:
                chosen.append(row)
        try:
            batches = read_batches(
                self._engine.store, [(row.position, row.length) for row in chosen]
            )
        except CorruptRecord as error:
            log.exception("retention.unreadable", path=error.path, position=error.position)
            return False
        copies = tuple(
            single_row(bytes(data), row.row) for row, data in zip(chosen, batches, strict=True)
        )
        self._do(CopyOut(copies), lambda: self._point_at(chosen, copies, following))
        return True

    def _point_at(
        self, rows: Sequence[Outlived], copies: Sequence[bytes], following: Callable[[], None]
    ) -> None:
        position, pointed = self._copied_to, []
        for row, copy in zip(rows, copies, strict=True):
            pointed.append((row, position, len(copy)))
            position += len(copy)
        self._do(Repoint(tuple(pointed)), following)

    def _copied(self, event: MessagesCopied, place: Place) -> None:
        del event
        self._copied_to = place.attachment

    def _expire_letters(self, after: int = 0) -> None:
        state = self._engine.state
        own = (topic.settings.letters_us for topic in state.topics_by_id.values())
        if not self._groups or (not self._letters and max(own, default=0) <= 0):
            self._soon(self._look_besides)
            return

        def expired(reply: object) -> None:
            self._busy = isinstance(reply, int)
            if isinstance(reply, int):
                if not reply:
                    self._groups.pop()
                self._soon(lambda: self._expire_letters(reply))

        self._engine.submit(ExpireLetters(self._groups[-1], after, self._letters), expired)

    def _look_besides(self) -> None:
        """What is left are pins: those of messages are copied once more where that
        frees a segment.
        """
        state, store = self._engine.state, self._engine.store
        self._need(log_floor.besides(state, delayed_too=False), TRANSACTIONS)
        self._need(max(0, self._began - log_pins.SLACK), "what is new")
        whole = max(
            (segment.end for segment in store.segments()[:-1] if segment.end <= self._lowest),
            default=0,
        )
        if self._move_delayed(whole):
            return
        self._need(log_floor.besides(state), "messages that wait for their time")
        stale, again = list[int](), list[Outlived]()
        for pin in log_pins.below(state, whole):
            if len(stale) + len(again) >= relocation.COPIED_AT_ONCE:
                break
            if relocation.is_stale(state, pin):
                stale.append(pin.position)
                continue
            row = relocation.outlived(state, pin)
            if row is None:
                break
            again.append(row)
        if stale:
            self._do(Repoint((), tuple(stale)), self._look_besides)
        elif not again or not self._copy_out(again, self._look_besides):
            self._over()

    def _move_delayed(self, whole: int) -> bool:
        """Store messages again that wait for their time in segments that nobody else
        needs; False = there are none.
        """
        waiting = tuple(islice(delayed.below(self._engine.state, whole), relocation.COPIED_AT_ONCE))
        try:
            found = read_batches(
                self._engine.store, [(one.place, one.message.length) for one in waiting]
            )
        except CorruptRecord as error:
            log.exception("retention.unreadable", path=error.path, position=error.position)
            return False
        if waiting:
            batches = zip(waiting, map(bytes, found), strict=True)
            self._do(MoveDelayed(tuple(batches)), self._look_besides)
        return bool(waiting)

    def _over(self) -> None:
        for pin in islice(log_pins.below(self._engine.state, self._lowest), 1):
            self._need(
                pin.position,
                f"a message of topic {self._engine.state.topics_by_id[pin.topic_id].name}",
            )
        self.free = Free(self._lowest, self._engine.store.end, self._held_by)
        self._busy = False

    def _moved(self, event: FirstsMoved, place: Place) -> None:
        state = self._engine.state
        topic = state.topics_by_id[event.topic_id].name
        log.info("retention.moved", topic=topic, partitions=len(event.firsts))
        for group_id, partition, missed in event.passed:
            group = state.consumers.by_id[group_id].name
            self.passed += missed
            self.passed_at = place.stored_at
            log.error(
                "retention.passed_group",
                group=group,
                topic=topic,
                partition=partition,
                messages=missed,
            )
