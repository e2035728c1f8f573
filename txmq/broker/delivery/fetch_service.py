"""Fetches of members: deliverable messages are read, leased and sent."""

from __future__ import annotations

from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import structlog

from txmq.batch import BatchView, has_expiry, key_hashes
from txmq.broker.delivery.fetch_chunks import Batches, BatchParts, chunk_of, join_chunks
from txmq.broker.delivery.group_paces import GroupPaces, cold_bytes
from txmq.broker.delivery.long_polls import MAX_WAIT_MS
from txmq.broker.engine.log_reader import read_batches, read_before_damage
from txmq.core.consumers.candidates import Candidate, CandidateSource, FetchLimits
from txmq.core.consumers.commands import CandidateRead, Deliver, ReturnMessages
from txmq.core.consumers.damaged_letters import SetAside, is_to_deliver
from txmq.core.consumers.fetch_choice import ChosenCandidates, choose_candidates
from txmq.errors import CorruptRecord, RequestRejected
from txmq.model.message import resolve_time
from txmq.model.topic_partition import TopicPartition
from txmq.wire.chunks import Chunk, chunk_size, pack_chunks

if TYPE_CHECKING:
    from txmq.broker.delivery.long_polls import LongPolls
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.core.consumers.delivery import DeliverReply
    from txmq.wire.data_requests import Fetch
    from txmq.wire.frames import Frame

NO_OFFSETS: frozenset[int] = frozenset()
MAX_MESSAGES = 10_000
MAX_BYTES = 2 << 20  # of one reply: larger ones only leave the processor's cache
SET_ASIDE = 250  # damaged letters in one turn: each is a record of its own
REPLY_BYTES = 4 << 20  # of one reply, as they are sent, unless its first batch is larger

log = structlog.get_logger()


class FetchService:
    """Answers FETCH. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, polls: LongPolls, clock: Clock) -> None:
        self._engine, self._clock, self.polls = engine, clock, polls
        self.paces = GroupPaces(engine, clock)
        # members whose leases are on their way to the disk
        self.leasing: set[tuple[str, str]] = set()

    def fetch(self, session: ClientSession, frame: Frame, request: Fetch) -> None:
        """Lease messages to a member, now or when there are some. End the member's
        other fetches on this connection.
        """
        self.polls.end_fetches(request.group, request.member, session)
        _FetchRequest(self, self._engine, session, frame, request, self._clock.seconds()).start()


class _FetchRequest:
    """One FETCH, until it is answered."""

    def __init__(
        self,
        fetches: FetchService,
        engine: Engine,
        session: ClientSession,
        frame: Frame,
        request: Fetch,
        began: float,
    ) -> None:
        self._fetches, self._engine, self._session, self._frame = fetches, engine, session, frame
        self._request = request
        self._until = began + min(request.max_wait_ms, MAX_WAIT_MS) / 1_000
        self._member = (request.group, request.member, request.generation)

    def start(self) -> None:
        """Answer now, or wait."""
        wait_ms = self._fetches.polls.ms_until(self._until)
        if not self._attempt(last=wait_ms <= 0):
            self._fetches.polls.wait(
                self._session,
                wait_ms,
                self._attempt,
                partial(self._reply, []),
                topics=self._topics(),
                timed=True,
                member=self._member[:2],
            )

    def _topics(self) -> list[str]:
        """Return the topics that the member reads; when it names others, it joins
        again, which ends its fetches.
        """
        state, (group, member) = self._engine.state, self._member[:2]
        known = state.topics_by_id
        found = state.groups.by_name.get(group)
        here = None if found is None else found.members.get(member)
        ids = () if here is None else here.topics
        return [known[topic_id].name for topic_id in ids if topic_id in known]

    def _attempt(self, *, last: bool) -> bool:
        if self._must_wait():
            if last:
                self._reply([])
            return last
        limits, pace = self._limits(), self._fetches.paces.of(self._member[0])
        if pace is not None:
            messages = pace.messages(limits.max_messages, self._fetches.paces.now())
            if not messages:  # asked again before long
                if last:
                    self._reply([])
                return last
            limits = limits._replace(max_messages=messages)
        found, batches = self._readable(limits)
        if found.candidates or found.fences_can_advance:
            self._lease(found.candidates, batches, last=last)
            return True
        if last:
            self._reply([])
        return last

    def _must_wait(self) -> bool:
        """Return whether the member gets nothing now.

        A first lease needs no disk. It would overtake leases that wait for the disk,
        and the messages of a key would lose their order. And a node of a cluster may
        not lead any more.
        """
        lease = self._engine.lease
        return self._member[:2] in self._fetches.leasing or (lease is not None and not lease())

    def _limits(self) -> FetchLimits:
        request, topics = self._request, self._engine.state.topics
        without = frozenset(topics[name].topic_id for name in request.without if name in topics)
        return FetchLimits(
            min(request.max_messages, MAX_MESSAGES),
            min(request.max_bytes, MAX_BYTES),
            request.tag_filter,
            min(request.run, MAX_MESSAGES),
            without,
        )

    def _readable(self, limits: FetchLimits) -> tuple[ChosenCandidates, list[Batches]]:
        """Return the deliverable candidates and their batches. No damaged batch is
        skipped: its partition stands still before it.
        """
        engine = self._engine
        stopped: set[TopicPartition] = set()
        set_aside = 0
        while True:
            durable, now = engine.store.durable, engine.now()
            found = choose_candidates(engine.state, *self._member, durable, limits, now, stopped)
            paces = self._fetches.paces
            pace = paces.of(self._member[0])
            if pace is not None and not pace.may_read(
                found.candidates, paces.hot_from(), paces.now()
            ):
                return found._replace(candidates=()), []
            try:
                return found, self._read(found.candidates)
            except CorruptRecord:
                if limits.max_run_rows:
                    # batches of a run before the damaged one are deliverable
                    limits = limits._replace(max_run_rows=0)
                    continue
                good, batches = self._read_undamaged(found.candidates, stopped)
                if not good and (more := self._set_aside(found.candidates, stopped)):
                    set_aside += more
                    if set_aside < SET_ASIDE:
                        continue
                    # an empty delivery, behind which the next turn goes on
                    return found._replace(candidates=(), fences_can_advance=True), []
            if good:
                return found._replace(candidates=good), batches

    def _read_undamaged(
        self, candidates: tuple[Candidate, ...], stopped: set[TopicPartition]
    ) -> tuple[tuple[Candidate, ...], list[Batches]]:
        """Return the candidates before the first damaged batch of their partition,
        which then stands still. They hold no runs.
        """
        places = [
            (TopicPartition(c.topic_id, c.partition), c.batches[0][:2] if c.wanted else None)
            for c in candidates
        ]
        found, damaged = read_before_damage(self._engine.store, places)
        stopped |= damaged
        good = [
            (c, [data] if c.wanted else [])
            for c, data in zip(candidates, found, strict=True)
            if data is not None
        ]
        return tuple(c for c, _batches in good), [batches for _c, batches in good]

    def _set_aside(self, left: tuple[Candidate, ...], stopped: set[TopicPartition]) -> int:
        """Make damaged messages dead letters again that were put back, some at most.
        Return their number. Their partitions go on.
        """
        before, damage, number = stopped.copy(), dict[tuple[int, int], str](), 0
        for one in left:
            tp, span = TopicPartition(one.topic_id, one.partition), (one.batch[0], one.batch[1])
            if one.source is not CandidateSource.FAILED or tp not in before:
                continue
            if span not in damage:
                damage[span] = self._damage_at(span)
            if not damage[span]:
                continue
            rows = min(one.rows, SET_ASIDE - number)
            for offset in range(one.start, one.start + rows):  # neighbours of the batch
                ref = (one.topic_id, one.partition, offset)
                command = SetAside(self._member[0], ref, damage[span])
                self._engine.submit(command)
                if not is_to_deliver(self._engine.state, command):
                    stopped.discard(tp)
                    number += 1
        return number

    def _damage_at(self, span: tuple[int, int]) -> str:
        """Return why a batch cannot be read; "" = it can."""
        try:
            read_batches(self._engine.store, [span])
        except CorruptRecord as error:
            return error.message
        return ""

    def _read(self, candidates: tuple[Candidate, ...]) -> list[Batches]:
        """Return the candidates' batches, each read once; none for those that the
        member does not want. Raises CorruptRecord.
        """
        places = [[b[:2] for b in c.batches] if c.wanted else [] for c in candidates]
        # in the log partitions stand side by side
        wanted = sorted(set(chain.from_iterable(places)))
        found = dict(zip(wanted, read_batches(self._engine.store, wanted), strict=True))
        return [[found[place] for place in of_one] for of_one in places]

    def _lease(
        self, candidates: tuple[Candidate, ...], batches: list[Batches], *, last: bool
    ) -> None:
        """Lease the candidates that may be delivered. From a message's second delivery
        on, the reply waits until that is durable.
        """
        certain = self._engine.certain()  # what expires is gone for good
        parts = BatchParts()
        fitting = self._fit(candidates, batches, parts)
        reads = tuple(
            _inspect(c, b, certain) if b else CandidateRead(c, unwanted=True)
            for c, b in zip(candidates[:fitting], batches[:fitting], strict=True)
        )
        topics = self._engine.state.topics_by_id
        names = {c.topic_id: topics[c.topic_id].name for c in candidates}

        def deliver(reply: DeliverReply | RequestRejected) -> None:
            self._fetches.leasing.discard(self._member[:2])
            if isinstance(reply, RequestRejected):
                self._session.refuse(self._frame, reply)
            elif reply.deliveries or last:
                self._send(reply, candidates, batches, names, parts)
            else:
                self._restart()

        self._fetches.leasing.add(self._member[:2])
        self._engine.submit(Deliver(*self._member, reads, self._engine.store.durable), deliver)

    def _fit(
        self, candidates: tuple[Candidate, ...], batches: list[Batches], parts: BatchParts
    ) -> int:
        """Return how many candidates fit in the reply as they are sent, one at least.
        The choice counts stored bytes; a row of a compressed batch is sent unpacked.
        """
        size = 0
        for number, (candidate, read) in enumerate(zip(candidates, batches, strict=True)):
            if len(read) == 1:
                first, rows = candidate.first_row, candidate.rows
                position = candidate.batch.position
                size += len(parts.get(candidate, position, read[0], first, rows))
            else:
                size += sum(map(len, read))
            if number and size > REPLY_BYTES:
                return number
        return len(candidates)

    def _send(
        self,
        reply: DeliverReply,
        candidates: tuple[Candidate, ...],
        batches: list[Batches],
        names: dict[int, str],
        parts: BatchParts,
    ) -> None:
        """Send the leased messages. Pieces of one batch may need more room than the
        reply has: what does not fit is returned.
        """
        paces = self._fetches.paces
        pace = paces.of(self._member[0])
        if pace is not None:
            count = sum(one.end - one.start for one in reply.deliveries)
            pace.note(count, cold_bytes(candidates, paces.hot_from()))
        chunks: list[Chunk] = []
        surplus: list[tuple[str, int, int, int]] = []
        size = 0
        for delivery in reply.deliveries:
            candidate = candidates[delivery.read_index]
            name = names[candidate.topic_id]
            if size <= REPLY_BYTES:
                read = batches[delivery.read_index]
                chunk = chunk_of(delivery, reply.lease, candidate, read, name, parts)
                size += chunk_size(name, len(chunk.batch))
                if size <= REPLY_BYTES or not chunks:
                    chunks.append(chunk)
                    continue
            surplus.append((name, candidate.partition, delivery.start, delivery.end))
        if surplus:
            self._engine.submit(ReturnMessages(*self._member, tuple(surplus)), _returned)
        size = sum(len(chunk.batch) for chunk in chunks)
        self._fetches.paces.note_sent(self._member[0], size)
        self._reply(join_chunks(chunks, self._request.run) if self._request.run else chunks)

    def _restart(self) -> None:
        """Choose again in the next turn: nothing chosen was to be delivered, and
        much more of that kind may follow. A connection that was lost meanwhile would
        get leases that its member does not know of.
        """
        if self._session.lost:
            return

        def go_on() -> None:
            self._session.on_lost.pop(self, None)
            self.start()

        self._session.on_lost[self] = self._fetches.polls.next_turn(go_on).cancel

    def _reply(self, chunks: list[Chunk]) -> None:
        self._session.reply(self._frame, pack_chunks(chunks, generation=self._request.generation))


def _returned(reply: object) -> None:
    """Log a refusal: the member is gone, and so are its leases."""
    if isinstance(reply, RequestRejected):
        log.info("fetch.surplus_not_returned", message=reply.message)


def _inspect(candidate: Candidate, batches: Batches, now: int) -> CandidateRead:
    """Return a candidate with the facts that only its batches hold: key hashes and
    expired messages.
    """
    keys = _keys(candidate, *batches) if candidate.needs_keys else None
    return CandidateRead(
        candidate,
        keys,
        _expired(candidate, batches, now) if any(map(has_expiry, batches)) else NO_OFFSETS,
    )


def _expired(candidate: Candidate, batches: Batches, now: int) -> frozenset[int]:
    """Return the offsets of messages whose time to live is over. A time span counts
    from when they could be delivered.
    """
    ends = chain.from_iterable(
        [resolve_time(carried, entry.stored_at) for carried in BatchView(batch).expire_at]
        for entry, batch in zip(candidate.batches, batches, strict=True)
    )
    times = enumerate(
        islice(ends, candidate.first_row, candidate.first_row + candidate.rows), candidate.start
    )
    return frozenset(offset for offset, end in times if 0 < end <= now)


def _keys(candidate: Candidate, batch: bytes) -> tuple[int | None, ...]:
    hashes = key_hashes(batch)
    return tuple(hashes[candidate.first_row : candidate.first_row + candidate.rows])
