"""Long polls: whoever asks for messages that are not there yet is answered when they
are, or when the time is up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from txmq.batch import BatchView, single_row
from txmq.broker.delivery_rows import Batches, covered, pick
from txmq.broker.log_reader import before_damage, read_batches
from txmq.core.consumers.candidates import WORTH_SLICING, Candidate, Source, Wish
from txmq.core.consumers.commands import Deliver, Pick
from txmq.core.consumers.planning import Plan, plan
from txmq.core.state.state import Rejected
from txmq.errors import CorruptRecord
from txmq.wire.chunks import MOVED, Chunk, pack_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from txmq.broker.engine import Engine
    from txmq.broker.protocol import Session
    from txmq.broker.reactor.protocols import Clock, Timer
    from txmq.core.consumers.delivery import DeliverReply, Delivery
    from txmq.core.state.consumer_groups import Spot
    from txmq.wire.frames import Frame
    from txmq.wire.headers import Fetch

LONGEST_MS = 60_000
MOST_MESSAGES = 10_000
MOST_BYTES = 2 << 20  # of one reply: larger ones only leave the processor's cache

Views = dict[
    int, BatchView
]  # of large batches of which rows go out, by position: decompressed once for a reply


class Attempt(Protocol):
    """Tries to answer; True = answered. `last`: the time is up, so answer with what
    there is.
    """

    def __call__(self, *, last: bool) -> bool: ...


def _nothing() -> None:
    """The end of what needs no end."""


@dataclass(eq=False, slots=True)
class _Waiter:
    """One request that waits; `topics` are what could end the wait (None = anything),
    `member` whose fetch it is.

    `end` answers it with nothing.
    """

    session: Session
    attempt: Attempt
    topics: Collection[str] | None
    member: tuple[str, str] | None = None
    end: Callable[[], None] = _nothing
    timer: Timer | None = None


class Fetching:
    """Answers FETCH, and holds whatever waits for messages. All methods belong to the
    reactor's thread.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._waiters: dict[_Waiter, None] = {}
        self.answering: set[tuple[str, str]] = (
            set()
        )  # members whose leases are on their way to the disk
        engine.on_durable.append(self._wake)

    def fetch(self, session: Session, frame: Frame, request: Fetch) -> None:
        """Lease messages to a member, now or when there are some. What else it has
        waiting here gets nothing more.
        """
        member = (request.group, request.member)
        for waiter in [w for w in session.lost if isinstance(w, _Waiter) and w.member == member]:
            self._end(waiter)
        _Fetch(self, self._engine, session, frame, request, self._clock.seconds()).start()

    def soon(self, function: Callable[[], None]) -> Timer:
        """In the next turn of the reactor."""
        return self._clock.callLater(0, function)

    def milliseconds_to(self, time: float) -> int:
        """From now to a time of the clock's."""
        return int((time - self._clock.seconds()) * 1_000)

    def wait(
        self,
        session: Session,
        topics: Collection[str] | None,
        wait_ms: int,
        attempt: Attempt,
        member: tuple[str, str] | None = None,
        end: Callable[[], None] = _nothing,
    ) -> None:
        """Try again whenever something of these topics becomes visible, until `wait_ms`
        have passed.
        """
        waiter = _Waiter(session, attempt, topics, member, end)
        self._waiters[waiter] = None
        self._engine.reader_waits = True
        waiter.timer = self._clock.callLater(
            min(wait_ms, LONGEST_MS) / 1_000, self._time_is_up, waiter
        )
        session.lost[waiter] = lambda: self._forget(waiter)

    def end(self, group: str, member: str) -> None:
        """The member has joined again: what it had waiting, perhaps on a connection
        that is dead, gets nothing more.
        """
        for waiter in [w for w in self._waiters if w.member == (group, member)]:
            self._end(waiter)

    def _end(self, waiter: _Waiter) -> None:
        self._forget(waiter)
        waiter.end()

    def _forget(self, waiter: _Waiter) -> None:
        self._waiters.pop(waiter, None)
        waiter.session.lost.pop(waiter, None)
        self._engine.reader_waits = bool(self._waiters)
        if waiter.timer is not None and waiter.timer.active():
            waiter.timer.cancel()

    def _time_is_up(self, waiter: _Waiter) -> None:
        self._forget(waiter)
        waiter.attempt(last=True)

    def _wake(self) -> None:
        published = self._engine.state.published
        if not published or not self._waiters:
            published.clear()
            return
        topics = self._engine.state.topics_by_id
        names = {topics[topic_id].name for topic_id in published}
        published.clear()
        for waiter in [
            w for w in self._waiters if w.topics is None or not names.isdisjoint(w.topics)
        ]:
            if waiter.attempt(last=False):
                self._forget(waiter)

    def retry(self) -> None:
        """Timer: what has become due without a new message (retries, leases that ran
        out, rebalances).
        """
        for waiter in [w for w in self._waiters if w.topics is None]:
            if waiter.attempt(last=False):
                self._forget(waiter)


class _Fetch:
    """One FETCH until it is answered."""

    def __init__(
        self,
        fetching: Fetching,
        engine: Engine,
        session: Session,
        frame: Frame,
        request: Fetch,
        began: float,
    ) -> None:
        self._fetching, self._engine, self._session, self._frame, self._request = (
            fetching,
            engine,
            session,
            frame,
            request,
        )
        self._until = began + min(request.max_wait_ms, LONGEST_MS) / 1_000
        self._member = (request.group, request.member, request.generation)

    def start(self) -> None:
        """Answer now, or wait."""
        wait_ms = self._fetching.milliseconds_to(self._until)
        if not self._attempt(last=wait_ms <= 0):
            self._fetching.wait(
                self._session,
                None,
                wait_ms,
                self._attempt,
                self._member[:2],
                partial(self._reply, []),
            )

    def _attempt(self, *, last: bool) -> bool:
        if self._member[:2] in self._fetching.answering:
            # A first lease needs no disk and would overtake those that do: the order of
            # a key's messages would be lost.
            if last:
                self._reply([])
            return last
        found, batches = self._readable(self._wish())
        if isinstance(found, Rejected):
            self._session.reject(self._frame, found)
            return True
        if found.candidates or found.steps:
            self._lease(found.candidates, batches, last=last)
            return True
        if last:
            self._reply([])
        return last

    def _wish(self) -> Wish:
        request, topics = self._request, self._engine.state.topics
        messages, size = (
            min(request.max_messages, MOST_MESSAGES),
            min(request.max_bytes, MOST_BYTES),
        )
        without = frozenset(topics[name].topic_id for name in request.without if name in topics)
        return Wish(messages, size, request.tag_filter, min(request.run, MOST_MESSAGES), without)

    def _readable(self, wish: Wish) -> tuple[Plan | Rejected, list[Batches]]:
        """What could go out, and its batches. No damaged one is passed over: its
        partition stands still before it.
        """
        engine = self._engine
        standing: set[Spot] = set()
        while True:
            durable, now = engine.store.durable, engine.now()
            found = plan(engine.state, *self._member, durable, wish, now, standing)
            if isinstance(found, Rejected):
                return found, []
            try:
                return found, self._read(found.candidates)
            except CorruptRecord:
                if wish.run:
                    wish = wish._replace(
                        run=0
                    )  # what stands in a run before the damaged one goes out
                    continue
                good, batches = self._before_damage(found.candidates, standing)
            if good:
                return found._replace(candidates=good), batches

    def _before_damage(
        self, candidates: tuple[Candidate, ...], standing: set[Spot]
    ) -> tuple[tuple[Candidate, ...], list[Batches]]:
        """Those before the first damaged one of their partition, which then stands
        still. No runs here.
        """
        places = [
            ((c.topic_id, c.partition), c.batches[0][:2] if c.wanted else None) for c in candidates
        ]
        found, damaged = before_damage(self._engine.store, places)
        standing |= damaged
        good = [
            (c, [data] if c.wanted else [])
            for c, data in zip(candidates, found, strict=True)
            if data is not None
        ]
        return tuple(c for c, _batches in good), [batches for _c, batches in good]

    def _read(self, candidates: tuple[Candidate, ...]) -> list[Batches]:
        """Their batches, each read once; nothing of those that the member does not
        want. Raises CorruptRecord.
        """
        places = [[b[:2] for b in c.batches] if c.wanted else [] for c in candidates]
        wanted = sorted(
            set(chain.from_iterable(places))
        )  # in the log partitions stand side by side
        found = dict(zip(wanted, read_batches(self._engine.store, wanted), strict=True))
        return [[found[place] for place in of_one] for of_one in places]

    def _lease(
        self, candidates: tuple[Candidate, ...], batches: list[Batches], *, last: bool
    ) -> None:
        """Lease what may go out of what was read; from the second delivery on only once
        that is durable.
        """
        now = self._engine.now()
        picks = tuple(
            pick(c, b, now) if b else Pick(c, unwanted=True)
            for c, b in zip(candidates, batches, strict=True)
        )

        def deliver(reply: DeliverReply | Rejected) -> None:
            self._fetching.answering.discard(self._member[:2])
            if isinstance(reply, Rejected):
                self._session.reject(self._frame, reply)
            elif reply.deliveries or last:
                views: Views = {}
                self._reply(
                    [
                        self._chunk(d, reply.lease, candidates[d.pick], batches[d.pick], views)
                        for d in reply.deliveries
                    ]
                )
            else:
                self._start_again()

        self._fetching.answering.add(self._member[:2])
        self._engine.submit(Deliver(*self._member, picks), deliver)

    def _start_again(self) -> None:
        """Nothing was to be delivered of what was planned, and there may be much more
        of that: not in this turn.
        """

        def go_on() -> None:
            self._session.lost.pop(self, None)
            self.start()

        self._session.lost[self] = self._fetching.soon(go_on).cancel

    def _chunk(
        self, delivery: Delivery, lease: int, candidate: Candidate, batches: Batches, views: Views
    ) -> Chunk:
        rows = delivery.end - delivery.start
        flags = MOVED if candidate.source is Source.MOVED else 0
        base, (stored, *others), (batch, *more) = covered(delivery, candidate, batches)
        first = delivery.start - base
        if rows == 1 and len(batch) > WORTH_SLICING:
            view = views.setdefault(stored.position, BatchView(batch))
            batch, base, first = single_row(batch, first, view), delivery.start, 0
        further = tuple([(entry.length, entry.count, entry.stored_at) for entry in others])
        return Chunk(
            self._engine.state.topics_by_id[candidate.topic_id].name, candidate.partition, base,
            stored.stored_at, stored.position, delivery.attempt, flags, lease, first, rows,
            b"".join((batch, *more)) if more else batch, further,
        )  # fmt: skip

    def _reply(self, chunks: list[Chunk]) -> None:
        self._session.reply(self._frame, pack_chunks(chunks, generation=self._request.generation))
