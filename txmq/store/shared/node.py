"""One node of a shared log: it follows the partition, claims it, leads, and ends.

    FOLLOWING ◄──► CLAIMING ──► LEADING ──► ENDED

The node has no clock, no thread and no network. Seconds come in as numbers that count
the machine's sleep as well (CLOCK_BOOTTIME); records and reports come by the callbacks
of a `Partition`. The newest number that the node was told is never ahead of the clock.
So what begins is dated with it, and what has to pass is counted from the next `tick`.

A node leads at most once. Its memory is ahead of the log when it fails or is deposed,
as after a failed fsync, so it ends, and its process starts again as a follower.

A leader goes on reading the partition. That costs a copy of what it writes, and saves a
second way of knowing: a claim is noticed while nothing is written, and the records that
answer a question of rule B come without being asked for.

The lease. A leader may answer from its state without an append for `lease_s` from when
its last confirmed slice was begun. That slice counted, so the next leader reads it
before its own claim. It answers and confirms nothing until the lease has run out since
then, with LEASE_MARGIN for clocks of different rates. An election by silence has waited
for that already.

Silence ends a leader as well. One of whose slices none was confirmed for as long as a
follower waits at most can only be deposed: each of them has claimed, unless the
partition is away for all. It does not wait until it learns that, because its clients
would wait with it.

Space. A node without space on its disk, or with damage in its copy, claims after all
others. A leader that loses its space steps down once: where it comes to lead again,
there is nobody else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import inf
from random import Random
from typing import NamedTuple, Protocol
from uuid import UUID

from txmq.errors import StoreClosed, UnsupportedFormat
from txmq.store.shared.partition import Partition
from txmq.store.shared.records import (
    MOST_DATA,
    Claim,
    NodeStatus,
    PartitionRecord,
    Slice,
    checksum_of,
    decode,
    encode,
)
from txmq.store.shared.rules import NO_NONCE, Expectation, Place, fold

# chrony slews a clock by up to 8.3 %: two of them differ by less than a fifth.
LEASE_MARGIN = 1.25
# Followers wait for different times, so that one claims before the others.
_PATIENCE = (1.0, 1.6)
_PATIENCE_AFTER_RESIGNATION = (0.0, 0.3)


class Timing(NamedTuple):
    """Seconds: of silence, after which followers claim, and of the leader's lease."""

    silence_s: float = 1.5
    lease_s: float = 1.0

    @property
    def beat_s(self) -> float:
        """The longest time between the beginnings of two slices."""
        return self.lease_s / 3


class State(StrEnum):
    """What a node is."""

    FOLLOWING = "following"
    CLAIMING = "claiming"
    LEADING = "leading"
    ENDED = "ended"


class End(StrEnum):
    """Why a node ended. After the first four it starts again as a follower."""

    DEPOSED = "another node leads"
    RESIGNED = "stepped down"
    UNDELIVERED = "the partition did not take a record for certain"
    FORGOTTEN = "the partition begins after what was read"
    DIVERGED = "the partition is not the one that was read"
    UNSUPPORTED = "a later version of txmq writes to the partition: upgrade this node"


class Listener(Protocol):
    """What a node tells. In `leads` and `confirmed` its `append` may be called."""

    def counted(self, record: PartitionRecord, place: Place) -> None:
        """A record counts, and the log is at `place` after it. Each one, in order.

        A slice brings bytes; a claim may put `place.end` back, where the log is cut. A
        leader's own slices are left out: it has their bytes.
        """

    def heard(self, said: NodeStatus, place: Place, *, is_history: bool) -> None:
        """A node has said something of itself. `is_history`: before this one began."""

    def leads(self, place: Place) -> None:
        """This node's claim counts. What it appends begins at `place.end`."""

    def confirmed(self, position: int) -> None:
        """What was appended up to `position` counts, for every reader, for ever.

        It may be answered: no other leader has a lease any more.
        """

    def ended(self, end: End, detail: str) -> None:
        """The node does nothing any more."""


@dataclass(slots=True)
class _InFlight:
    record: Claim | Slice
    begun_at: float
    read_to: int  # offset of the last record that was read before
    is_reported: bool = False
    offset: int | None = None


DEFAULT_TIMING = Timing()


class Node:
    """A node of a shared log, from its start to its end.

    `place` is what the node's copy of the log knows of the partition. `nonce` are 16
    random bytes of this object. Two things are told from outside: `has_space`, whether
    the node's disk has space for a leader's writes; `is_whole`, whether its copy of the
    log has no damage that is known.
    """

    def __init__(
        self,
        partition: Partition,
        listener: Listener,
        place: Place,
        *,
        name: str,
        nonce: bytes,
        rng: Random,
        now: float,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self.state = State.FOLLOWING
        self.has_space = self._had_space = self.is_whole = True
        self.place = place
        self.has_caught_up = False  # once, since it began
        # For operators: claims that were read, questions of rule B, and times.
        self.claims = self.questions = 0
        self.read_at = now
        self._partition, self._listener = partition, listener
        self._name, self._nonce, self._rng, self._timing = name, nonce, rng, timing
        self._longest_s = timing.silence_s * _PATIENCE[1]  # that any node waits
        self._now = now
        self._is_known = False  # whether the partition is the one of `place`
        self._is_caught_up = False
        # A start says nothing of the time since when the log is silent.
        self._is_heard = self._is_slice_read = True
        self._quiet_since = self._slice_read_at = now
        self._patience = 0.0
        self._draw_patience(_PATIENCE)
        self._in_flight: _InFlight | None = None
        # of a claim, and of a leader
        self._log_id = UUID(int=0)
        self._epoch = 0
        self._expectation = Expectation(-1)
        self._queue: deque[Slice] = deque()
        self._end = self._certain = self._confirmed = 0
        self._begun_at = now
        self._confirmed_at = -inf
        self._free_at = inf
        self.is_resigning = False

    @property
    def confirmed_at(self) -> float:
        """When the last slice was begun that is certain to count; -inf = none yet."""
        return self._confirmed_at

    def start(self) -> None:
        """Begin to read the partition, at the record of `place`, to see it there."""
        start = max(self.place.offset, 0)
        self._partition.read_from(start, self._read, self._read_all, self._lost)

    def tick(self, now: float) -> None:
        """Do what is due. To be called several times in each third of the lease."""
        stood_still = now - self._now > self._timing.beat_s
        if stood_still:  # then nobody listened
            self._quiet_since += now - self._now
        self._now = now
        if self._is_heard:
            self._is_heard, self._quiet_since = False, now
        if self._is_slice_read:
            self._is_slice_read, self._slice_read_at = False, now
        if self.state is State.LEADING:
            self._lead_on()
        elif now - self._quiet_since >= self._patience + self._delay_s:
            if self.state is State.CLAIMING and self._in_flight is None:
                # A reader that stands still looks like silence: its node would depose
                # one leader after the other.
                self._finish(End.UNDELIVERED, "its own claim was taken, and it does not read it")
            else:
                self.claim(now)

    @property
    def _delay_s(self) -> float:
        """How much later than others the node claims."""
        return 0 if self.has_space and self.is_whole else self._longest_s

    def claim(self, now: float) -> bool:
        """Try to become the leader. Return False where that has to wait.

        It waits for the end of the partition, for a genesis, for an earlier claim.
        """
        may = self.state in (State.FOLLOWING, State.CLAIMING) and self._is_caught_up
        if not may or self.place.log_id is None or self._in_flight is not None:
            return False
        self._log_id = self.place.log_id
        self._now = self._quiet_since = now
        self._draw_patience(_PATIENCE)
        self.state = State.CLAIMING
        self._produce(Claim(self._log_id, self.place.epoch + 1, self._nonce, self._name))
        return True

    def append(self, data: bytes, now: float, *, begins_segment: bool = False) -> None:
        """Append whole records of one segment, with its header if `begins_segment`.

        They are confirmed together. Raises StoreClosed unless the node leads.
        """
        if self.state is not State.LEADING or self.is_resigning:
            raise StoreClosed(f"the node {self._name} does not lead the log")
        self._now = now
        start = self._end
        self._end += len(data)
        for at in range(0, len(data), MOST_DATA):
            piece = data[at : at + MOST_DATA]
            position = start + at
            whole = self._end if position + len(piece) == self._end else start
            self._queue.append(
                Slice(
                    self._log_id,
                    self._epoch,
                    self._nonce,
                    position,
                    whole,
                    piece,
                    begins_segment and not at,
                )
            )
        self._produce_next()

    def is_serving(self, now: float) -> bool:
        """Return whether the leader may answer from its state without an append."""
        return (
            self.state is State.LEADING
            and not self.is_resigning
            and self._free_at <= now < self._confirmed_at + self._timing.lease_s
        )

    def step_down(self, now: float) -> None:
        """Stop to lead: at once for answers, after the last append for the log.

        A claim of nobody then tells the others that no lease is left to wait for.
        """
        if self.state is not State.LEADING or self.is_resigning:
            return
        self.is_resigning = True
        if now < self._free_at:
            self._finish(End.RESIGNED, "before the lease of the leader before it ran out")
            return
        self._now = now
        self._produce_next()

    # what the partition tells

    def _read(self, offset: int, data: bytes) -> None:
        if self.state is State.ENDED or not self._goes_on(offset, data):
            return
        try:
            record = decode(data)
        except UnsupportedFormat as error:
            self._finish(End.UNSUPPORTED, str(error))
            return
        self.read_at = self._now
        self.claims += isinstance(record, Claim)
        self.place, counts = fold(self.place, offset, checksum_of(data), record)
        self._is_caught_up = False
        if isinstance(record, NodeStatus):
            self._listener.heard(record, self.place, is_history=not self.has_caught_up)
        if self.state is State.LEADING:
            self._read_on()
        elif counts and record is not None:
            self._follow(record)

    def _goes_on(self, offset: int, data: bytes) -> bool:
        """Return whether the record follows the place, and see to it if not."""
        place = self.place
        if self._is_known:
            if offset <= place.offset:
                self._diverge(f"offset {offset} comes after {place.offset}")
            return offset > place.offset
        self._is_known = True
        if place.offset < 0:
            return True
        if (offset, checksum_of(data)) != (place.offset, place.checksum):
            self._diverge(f"it has another record at {offset}, {place.offset} was read")
        return False

    def _read_all(self, next_offset: int) -> None:
        if self.state is State.ENDED:
            return
        if next_offset <= self.place.offset:
            self._diverge(f"it ends at {next_offset}, {self.place.offset} was read")
        self._is_caught_up = self.has_caught_up = True

    def _lost(self, first: int) -> None:
        if self.state is State.ENDED:
            return
        if first > self.place.offset:
            self._finish(End.FORGOTTEN, f"it begins at {first}, {self.place.offset} was read")
        else:
            self._diverge(f"it has no record after {self.place.offset}, which was read")

    def _follow(self, record: PartitionRecord) -> None:
        self._is_heard = True
        self._is_slice_read |= isinstance(record, Slice)
        self._listener.counted(record, self.place)
        if not isinstance(record, Claim):
            return
        if record.nonce == self._nonce:
            self._lead()
            return
        self.state = State.FOLLOWING
        self._draw_patience(_PATIENCE)
        if record.nonce == NO_NONCE:  # the leader answers nothing any more
            self._is_slice_read, self._slice_read_at = False, -inf
            self._draw_patience(_PATIENCE_AFTER_RESIGNATION)

    def _lead(self) -> None:
        self.state = State.LEADING
        self._epoch = self.place.epoch
        self._expectation = Expectation(self.place.offset)
        self._end = self._certain = self._confirmed = self.place.end
        self._had_space = self.has_space
        self._listener.leads(self.place)

    def _read_on(self) -> None:
        """Go on as a leader after a record that was read."""
        if self.place.is_owned_by(self._epoch, self._nonce):
            self._expectation.read(self.place.offset)
            self._answer()
        else:
            end = End.RESIGNED if self.place.nonce == NO_NONCE else End.DEPOSED
            self._finish(end, f"by epoch {self.place.epoch} at offset {self.place.offset}")

    def _reported(self, flight: _InFlight, error: Exception | None, offset: int | None) -> None:
        if self.state is State.ENDED:
            return
        if error is not None:
            self._fail(error)
        elif offset is not None and offset <= flight.read_to:
            self._diverge(f"it gave offset {offset} again, {flight.read_to} was read")
        elif isinstance(flight.record, Slice):
            flight.is_reported, flight.offset = True, offset
            if self._expectation.is_certain(offset):
                self._confirm()
            else:
                self.questions += 1
                self._answer()
        elif flight.record.nonce == NO_NONCE:
            self._finish(End.RESIGNED, f"at offset {offset}")
        else:
            self._is_heard = True  # what took the claim so long kept it from being read too
            self._produce_next_after_flight()

    def _fail(self, error: Exception) -> None:
        """Give up a claim, or the lead: what follows must not come without this."""
        if self.state is State.LEADING:
            self._finish(End.UNDELIVERED, str(error))
        else:
            self.state, self._in_flight = State.FOLLOWING, None

    # what a leader does

    def _lead_on(self) -> None:
        if self._free_at == inf:
            self._free_at = self._slice_read_at + self._timing.lease_s * LEASE_MARGIN
        if self._now - self._quiet_since >= self._longest_s:
            self._finish(End.UNDELIVERED, f"nothing was confirmed for {self._longest_s:.1f} s")
        elif self._had_space and not self.has_space:
            self.step_down(self._now)
        else:
            self._tell()
            if self._in_flight is None and self._now - self._begun_at >= self._timing.beat_s:
                self._beat()

    def _beat(self) -> None:
        """Write a slice without data, which quiets followers and renews the lease."""
        end = self._end
        self._produce(Slice(self._log_id, self._epoch, self._nonce, end, end, b""))

    def _produce_next(self) -> None:
        if self._in_flight is not None or self.state is not State.LEADING:
            return
        if self._queue:
            self._produce(self._queue.popleft())
        elif self.is_resigning:
            self._produce(Claim(self._log_id, self._epoch + 1, NO_NONCE, self._name))

    def _produce(self, record: Claim | Slice) -> None:
        flight = _InFlight(record, self._now, self.place.offset)
        self._in_flight, self._begun_at = flight, self._now
        self._partition.produce(encode(record), partial(self._reported, flight))

    def _answer(self) -> None:
        """Look whether what was read answers a question of rule B."""
        flight = self._in_flight
        if flight is None or not flight.is_reported:
            return
        record, offset = flight.record, flight.offset
        assert isinstance(record, Slice)  # reports of claims ask nothing
        is_past = offset is not None and offset <= self.place.offset
        if not record.data:
            # Copies of earlier beats look alike: only the offset tells which one it is.
            if is_past:
                self._confirm()
            elif offset is None:
                self._produce_next_after_flight()
        elif self.place.end >= record.end:
            self._confirm()
        elif is_past:
            self._diverge(f"at {offset} there is another record than the one that it took")

    def _confirm(self) -> None:
        flight = self._in_flight
        assert flight is not None
        assert isinstance(flight.record, Slice)  # claims are not confirmed
        self._confirmed_at = flight.begun_at
        self._is_heard = True
        self._in_flight = None
        # A claim cuts a log at `whole`: the middle of an append is not certain to stay.
        self._certain = flight.record.whole
        self._tell()
        self._produce_next()

    def _tell(self) -> None:
        """Tell what is confirmed, once no earlier leader may answer without it."""
        if self._certain > self._confirmed and self._now >= self._free_at:
            self._confirmed = self._certain
            self._listener.confirmed(self._confirmed)

    def _produce_next_after_flight(self) -> None:
        self._in_flight = None
        self._produce_next()

    def _draw_patience(self, shares: tuple[float, float]) -> None:
        self._patience = self._timing.silence_s * self._rng.uniform(*shares)

    def _diverge(self, detail: str) -> None:
        self._finish(End.DIVERGED, detail)

    def _finish(self, end: End, detail: str) -> None:
        self.state = State.ENDED
        self._queue.clear()
        self._listener.ended(end, detail)
