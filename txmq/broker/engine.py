"""The engine: decisions become durable here, and nothing of them gets out before.

    command ─► decide ─► append ─► apply          at once, in memory
    tick:  cut what is pending ─► write and fdatasync ─► replies go out, readers are woken

One write is under way at a time; what arrives meanwhile goes with the next one (group
commit). It happens inline when exactly one reply waits for it or the disk is quick,
else in a thread, which costs 140 µs of work for each hand-over.

A full disk is no failure: the write that found it full is kept, with all replies that
wait for it, and made again until there is space; meanwhile new writes are refused, and
reads go on.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from twisted.python.failure import Failure

from txmq.broker.data_directory.disk_space import Disk
from txmq.broker.reactor.disk_latency import Timed
from txmq.broker.reactor.flush_policy import NEVER, Pace
from txmq.core import machine
from txmq.core.events.base import KINDS, Booted, Place, encode
from txmq.core.state.state import Outcome, Rejected
from txmq.core.transactions import batched
from txmq.errors import DiskFull, ReadOnly
from txmq.store.writer import Flush

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.reactor.protocols import Clock, InThread
    from txmq.config.storage import FlushEvery
    from txmq.core.state.state import State
    from txmq.store.log import Log

    Deliver = Callable[[Any], None]

log = structlog.get_logger()
INLINE_BYTES = (
    256 * 1024
)  # a larger write keeps the reactor busy for longer than a thread hand-off takes
FULL_DISK_S = 0.2  # between attempts to write while there is no space


class _Waiting(NamedTuple):
    end: int
    deliver: Deliver
    reply: Any


class Engine:
    """Commands in, durable replies out. All methods belong to the reactor's thread."""

    def __init__(
        self,
        store: Log,
        state: State,
        *,
        clock: Clock,
        now: Callable[[], int],
        in_thread: InThread,
        flush: FlushEvery | None = None,
        soon: Callable[[Callable[[], object]], object] | None = None,
        quick_s: float = 0.0,
    ) -> None:
        """`now` gives microseconds since the epoch; `flush` None = every reply waits
        for the disk. `soon` calls a function when all that has come is received;
        without it, the clock does. No thread where writes take `quick_s`.
        """
        self.store, self.state = store, state
        self._clock, self._now, self._in_thread, self._pace = clock, now, in_thread, Pace(flush)
        self._soon, self._timed = soon or partial(clock.callLater, 0), Timed(clock, quick_s)
        self._waiting: deque[_Waiting] = deque()
        self._written: list[
            _Waiting
        ] = []  # early replies: they wait for the write, not for the disk
        self._ticking = self._writing = False
        self._sync_at = NEVER  # by the clock
        self._kept: Flush | None = None  # there was no space to write it
        self.reader_waits = (
            False  # somebody waits at the tail: an asynchronous flush is brought forward
        )
        self.failed: Failure | None = None
        self.disk = Disk()
        self.before_answers: list[Callable[[], None]] = []
        self.on_durable: list[Callable[[], None]] = []  # called after them
        self.on_failure: Callable[[Failure], None] = _log_failure
        self._listeners: dict[type, list[Callable[[Any, Place], None]]] = {}

    @property
    def flush(self) -> FlushEvery | None:
        """The broker's own flush policy."""
        return self._pace.policy

    def now(self) -> int:
        """The broker's time: the wall clock's, but never earlier than what the log says
        already.
        """
        return max(self._now(), self.state.stored_at)

    def boot(self, name: str) -> None:
        """Record the start: a new boot epoch. Nothing is served before it is
        durable.
        """
        self.state.boot_epoch += 1
        self._record(Outcome((Booted(self.state.boot_epoch, name),)), self.now())
        self.flush_now()

    def submit(
        self,
        command: object,
        deliver: Deliver,
        *,
        early: FlushEvery | None = None,
        messages: int = 1,
    ) -> None:
        """Decide a command; `deliver` gets the reply (or a Rejected) once all that it
        rests on is durable.

        `early`: the reply, to sends and acks only, need not wait for the disk, which
        follows by this policy.
        """
        now = self.now()
        outcome = machine.decide(self.state, command, now)
        if isinstance(outcome, Rejected):
            self._answer_later(deliver, outcome)
            return
        if outcome.events and (refused := self.disk.refusal(command)):
            deliver(refused)
            return
        try:
            self._record(outcome, now)
        except DiskFull:  # not told later: nothing moves, perhaps for hours
            deliver(
                Rejected(
                    ReadOnly,
                    "the broker's disk is full: it only serves reads",
                    "free space on its disk",
                )
            )
            return
        if outcome.early:
            deliver(outcome.reply)
            self._tick_soon()
        elif early is not None:
            self._pace.add(early, messages)
            self._written.append(_Waiting(0, deliver, outcome.reply))
            self._tick_soon()
        else:
            self._answer_later(deliver, outcome.reply)

    def tell(self, deliver: Deliver, reply: object) -> None:
        """Give an answer that was read from the state, once everything decided so far
        is durable.
        """
        self._answer_later(deliver, reply)

    def listen(self, event: type, listener: Callable[[Any, Place], None]) -> None:
        """Have every event of that type told as it is applied; it may not be durable
        yet.
        """
        self._listeners.setdefault(event, []).append(listener)

    def _record(self, outcome: Outcome, now: int) -> None:
        """All events or none. Raises DiskFull, and nothing was recorded."""
        epoch = self.state.boot_epoch
        for nth, event in enumerate(outcome.events):
            kind, head, attachment = (
                KINDS[type(event)],
                encode(event),
                b"" if nth else outcome.attachment,
            )
            at = self.store.append(
                kind, head, attachment, stored_at=now, boot_epoch=epoch, more=nth > 0
            )
            place = Place(*at, now, epoch)
            machine.apply(self.state, event, place)
            listeners = self._listeners.get(batched.MEMBERS.get(type(event), type(event)), ())
            for (one, its_place), listener in product(
                batched.members(event, place) if listeners else (), listeners
            ):
                listener(one, its_place)

    def _answer_later(self, deliver: Deliver, reply: object) -> None:
        """A refusal or a repeated receipt may rest on what is not yet on disk, so it
        waits like any other reply.
        """
        if self.store.end == self.store.durable:
            deliver(reply)
            return
        self._waiting.append(_Waiting(self.store.end, deliver, reply))
        self._tick_soon()

    def _tick_soon(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._soon(self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self._writing or self.failed is not None:
            return  # the end of the write under way ticks again
        flush = self._cut()
        if (self._written or self._pace.policy is not None) and not self._must_sync():
            self._write_only(flush)
        elif flush is not None or self.store.durable < self.store.end:
            self._write_and_sync(flush)

    def _cut(self) -> Flush | None:
        kept, self._kept = self._kept, None
        fresh = self.store.cut()
        if kept is None or fresh is None:
            return kept or fresh
        return Flush(kept.runs + fresh.runs, fresh.end)

    def _keep(self, flush: Flush) -> None:
        """There is no space for it: try again soon, with whatever has come until
        then.
        """
        log.error("engine.disk_full", bytes=flush.size)
        self._kept, self._ticking = flush, True
        self._clock.callLater(FULL_DISK_S, self._tick)

    def _must_sync(self) -> bool:
        return bool(self._waiting) or self.reader_waits or self._pace.is_due

    def _write_only(self, flush: Flush | None) -> None:
        if flush is not None and not self._write(flush, sync=False):
            return
        self._answer_early(self._take_early())
        at = self._clock.seconds() + self._pace.after_s
        if at < self._sync_at and self.store.durable < self.store.end:
            self._sync_at = at
            self._clock.callLater(self._pace.after_s, self._planned_sync)

    def _planned_sync(self) -> None:
        self._sync_at = NEVER
        if not self._writing and self.failed is None and self.store.durable < self.store.end:
            self._write_and_sync(self._cut())

    def _write_and_sync(self, flush: Flush | None) -> None:
        self._pace.synced()
        early = self._take_early()
        if flush is not None and not early and self._is_quick(flush):
            if self._write(flush):
                self._done(flush, early)
            return
        self._writing = True
        work = self._in_thread(
            self._timed, *((self.store.sync,) if flush is None else (self.store.write, flush))
        )
        work.addCallbacks(
            lambda _: self._thread_done(flush, early),
            lambda why: self._thread_failed(why, flush, early),
        )
        work.addErrback(self.fail)  # an answer that could not be given is a bug

    def _is_quick(self, flush: Flush) -> bool:
        """Whether nobody gains by a thread. Where one makes room ahead, a write would
        wait for that.
        """
        return (
            (len(self._waiting) == 1 or self._timed.quick)
            and flush.size <= INLINE_BYTES
            and not self.store.busy
        )

    def _thread_done(self, flush: Flush | None, early: list[_Waiting]) -> None:
        self._writing = False
        self._done(flush, early)
        if self.store.end > self.store.durable or self._written:
            self._tick_soon()

    def _thread_failed(self, failure: Failure, flush: Flush | None, early: list[_Waiting]) -> None:
        self._writing = False
        if flush is None or not self._is_full(failure.value):
            self.fail(failure)
            return
        self._written[:0] = early
        self._keep(flush)

    def _done(self, flush: Flush | None, early: list[_Waiting]) -> None:
        if flush is None:
            self.store.settle()
        else:
            self.store.done(flush)
        for listener in self.before_answers:
            listener()
        self._answer_early(early)
        self._release()

    def _take_early(self) -> list[_Waiting]:
        """The early replies whose records are all in the write that begins now."""
        early, self._written = self._written, []
        return early

    def _answer_early(self, early: list[_Waiting]) -> None:
        for waiting in early:
            waiting.deliver(waiting.reply)

    def _release(self) -> None:
        durable = self.store.durable
        waiting = self._waiting
        while waiting and waiting[0].end <= durable:
            _end, deliver, reply = waiting.popleft()
            deliver(reply)
        for listener in self.on_durable:
            listener()

    def settle(self) -> bool:
        """Whether everything decided is durable and answered; if not, it is brought
        forward.
        """
        if self.store.end > self.store.durable:
            self.tell(
                lambda _: None, None
            )  # somebody waits for the disk, so that an asynchronous flush does not wait
        return self.store.end == self.store.durable

    def flush_now(self) -> None:
        """Write and sync everything, blocking: at the start only. Raises what
        `Log.write` raises.
        """
        flush = self._cut()
        if flush is not None:
            self.disk.insist(self.store.write, flush)
            self._done(flush, self._take_early())

    def _write(self, flush: Flush, *, sync: bool = True) -> bool:
        """Write here and now; False = there was no space, and it is kept."""
        try:
            if sync:
                self._timed(self.store.write, flush)
            else:
                self.store.write(flush, sync=False)
        except BaseException as error:
            if self._is_full(error):
                self._keep(flush)
                return False
            self.fail(Failure(error))
            raise
        return True

    def _is_full(self, error: BaseException | None) -> bool:
        return isinstance(error, DiskFull) and self.store.read_only

    def fail(self, failure: Failure) -> None:
        """The broker cannot go on, as after a failed write: no reply is sent, nothing
        is tried again (PROTOCOLS 8).
        """
        self.failed = failure
        self.on_failure(failure)


def _log_failure(failure: Failure) -> None:
    log.critical("engine.failed", error=failure.getErrorMessage())
