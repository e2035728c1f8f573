"""The engine: makes decisions of the core durable, then lets their replies out.

    command -> decide -> append -> apply              at once, in memory
    flush:     cut pending records -> write and fdatasync -> send replies, wake readers

One write is under way at a time. Records that arrive meanwhile go with the next one
(group commit). The write happens inline when exactly one reply waits for it or the disk
is quick. Otherwise a thread does it, which costs 140 µs for each change of threads.

An exception while a reply is decided, made or sent concerns that reply alone: its
requester gets an error, and the others their replies. An exception while an event is
applied ends the broker before the record is written: log and state would differ.
A damaged index ends it as well: the next start makes another.

A full disk is no failure. The engine retries the failed write until there is space; all
replies that depend on it wait. Meanwhile the broker refuses writes and serves reads. In
a cluster it is one: another node has space.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from twisted.internet.defer import FirstError, gatherResults, maybeDeferred
from twisted.python.failure import Failure

from txmq.broker.engine.disk_space import Disk
from txmq.broker.engine.faults import Faults
from txmq.broker.engine.flush_schedule import NEVER, FlushSchedule
from txmq.core import audit, machine
from txmq.core.disk_budget import DiskBudget
from txmq.core.events.audit import OperatorActed
from txmq.core.events.base import KINDS, Booted, Event, RecordContext, TimeNoted, encode
from txmq.core.events.outcome import Outcome
from txmq.core.retention import broker_time
from txmq.core.transactions import batched
from txmq.errors import BrokerFailed, DiskFull, ReadOnly, RequestRejected
from txmq.model import limits
from txmq.store.log.writer import Flush

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.defer import Deferred

    from txmq.broker.reactor.interfaces import Clock, RunInThread
    from txmq.config.broker import FlushEvery
    from txmq.core.state.state import State
    from txmq.store.log.log import Log

    Deliver = Callable[[Any], None]
    # a function and its arguments, before the exception that the request raised
    Requester = tuple[Any, ...]
    Listener = Callable[[Any, RecordContext], None]
    # brings a flush to the other nodes
    Replicate = Callable[[Flush], Deferred[None]]

INLINE_BYTES = 256 << 10  # a larger write blocks the reactor longer than a change of threads
FULL_DISK_S = 0.2  # between attempts to write while there is no space
LATENCY_WEIGHT = 1 / 8  # of the newest write in the mean
ZEROS_SHARE = 4  # of the budget: the reply that waits for them waits little longer
log = structlog.get_logger()


class _PendingReply(NamedTuple):
    end: int  # of the records that it rests on
    deliver: Deliver
    reply: Any
    requester: Requester


def _ignore(reply: object) -> None:
    """Deliver a reply to nobody."""


class Engine:
    """Takes commands, gives durable replies. All methods belong to the reactor's
    thread.

    `on_published` is called when messages became visible while readers wait,
    `on_backlog` while large publications are under way, `on_durable` after every flush.
    """

    def __init__(
        self,
        store: Log,
        state: State,
        *,
        clock: Clock,
        now: Callable[[], int],
        in_thread: RunInThread,
        flush: FlushEvery | None = None,
        after_reads: Callable[[Callable[[], object]], object] | None = None,
        quick_s: float = 0.0,
    ) -> None:
        """`now` gives microseconds since the epoch. `flush` None = every reply waits
        for the disk. `after_reads` calls a function once this turn's input is read;
        without it, a timer does. A disk is quick while its mean write takes less than
        `quick_s`.
        """
        self.store, self.state = store, state
        self._clock, self._now, self._in_thread = clock, now, in_thread
        self.flush_policy, self._schedule = flush, FlushSchedule(flush)
        self._after_reads = after_reads or partial(clock.callLater, 0)
        self._quick_s, self._mean_write_s = quick_s, 0.0
        # with it, durable = it has brought a flush to the other nodes
        self.replicate: Replicate | None = None
        # whether a node of a cluster may answer without a write; None = it is alone
        self.lease: Callable[[], bool] | None = None
        self.budget = DiskBudget(limits.UNFLUSHED)
        self._senders_wait = False  # for the disk: an asynchronous flush is brought forward
        self._missed_write = 0  # bytes of the last write, where pending replies came too late
        self._pending: deque[_PendingReply] = deque()  # on a sync
        self._pending_write: list[_PendingReply] = []  # early replies: on a write alone
        self._in_write: list[_PendingReply] = []  # early replies of the write under way
        self._relied_on = 0  # end of the records that are not lazy
        self._flush_planned = self._writing = False
        self._waiting_since = 0.0  # by the clock: the oldest pending reply
        self._sync_at = NEVER  # by the clock
        self._unwritten: Flush | None = None  # there was no space for it
        # Topics of records with new messages, by the end of the record: readers see
        # them once it is durable.
        self._new_entries: deque[tuple[int, set[int]]] = deque()
        self.readers_waiting = False  # at the tail: an asynchronous flush is brought forward
        self.failed: Failure | None = None
        self.disk = Disk()
        self.faults = Faults(clock.seconds, now)
        self.faults.on_damage = lambda error: self.fail(Failure(error))
        self.own_requester: Requester = (self.faults.record, "reply")
        self.requester: Requester = self.own_requester  # of the request that is being carried out
        self.before_replies: list[Callable[[], None]] = []
        self.on_published: list[Callable[[set[int]], None]] = []
        self.on_backlog: list[Callable[[], None]] = []
        self.on_durable: list[Callable[[], None]] = []
        self.on_failure: Callable[[Failure], None] = _log_failure
        self._listeners: dict[type, list[Listener]] = {}

    def now(self) -> int:
        """Return the broker's time: the wall clock's, but never earlier than a time
        that the log already holds.
        """
        return max(self._now(), self.state.stored_at)

    def certain(self) -> int:
        """Return a time that is past without doubt, also where the clock may be
        wrong.
        """
        return self.state.certain(self.now())

    def boot(self, name: str, wall: int | None = None) -> None:
        """Record the start, durably: a new boot epoch. Serve nothing before; a
        replicated one is durable once `answer_when_durable` answers.

        `wall` is the wall clock's time, None where it is not doubted.
        """
        self.state.boot_epoch += 1
        now = self.now()
        events: tuple[Event, ...] = (
            Booted(self.state.boot_epoch, name),
            *audit.topic_events(self.state),
        )
        if wall is not None:
            doubted = broker_time.doubt_at_start(self.state, wall, now)
            events += (TimeNoted(doubted),) if doubted != self.state.doubted else ()
        self._record(Outcome(events), now)
        if self.replicate is None:
            self.flush_now()

    def submit(
        self,
        command: object,
        deliver: Deliver = _ignore,
        *,
        early: FlushEvery | None = None,
        messages: int = 1,
    ) -> None:
        """Decide a command. `deliver` gets the reply, or a RequestRejected, once
        everything that it rests on is durable. Without it the state alone says what has
        changed.

        `early`: the reply, to sends and acks only, need not wait for the disk; a sync
        follows by this policy.
        """
        now = self.now()
        outcome = self.decide(command, now)
        if isinstance(outcome, RequestRejected):
            self.answer_when_durable(deliver, outcome)
            return
        end = 0
        if outcome.events:
            if self.disk.refusing and (refused := self.disk.refusal(command)):
                deliver(refused)
                return
            try:
                end = self._record(outcome, now)
            except DiskFull:  # the refusal cannot wait for a flush: none may succeed for hours
                deliver(
                    ReadOnly(
                        "the broker's disk is full: it only serves reads",
                        hint="free space on its disk",
                    )
                )
                return
        if outcome.lazy:
            deliver(outcome.reply)
            return
        if outcome.early:
            deliver(outcome.reply)
        elif early is not None and self.replicate is None:
            self._schedule.add(early, messages)
            self._pending_write.append(_PendingReply(0, deliver, outcome.reply, self.requester))
        elif end:
            self._pending.append(_PendingReply(end, deliver, outcome.reply, self.requester))
        else:
            self.answer_when_durable(deliver, outcome.reply)
            return
        self._plan_flush()

    def answer_when_durable(self, deliver: Deliver, reply: object) -> None:
        """Deliver an answer that was read from the state, once everything decided so
        far is durable: a refusal or a repeated receipt may rest on unwritten records.
        """
        if self._relied_on <= self.store.durable:
            deliver(reply)
            return
        self._pending.append(_PendingReply(self._relied_on, deliver, reply, self.requester))
        self._plan_flush()

    def decide(self, command: object, now: int) -> Outcome | RequestRejected:
        """Return the outcome of a command, or its refusal. Changes and records
        nothing.
        """
        try:
            return machine.decide(self.state, command, now)
        except Exception as error:  # noqa: BLE001  # a bug
            name = type(command).__name__
            self.faults.record(name, error)
            return BrokerFailed(
                f"the broker could not decide {name}: {type(error).__name__}",
                hint="see the broker's log for the reason",
            )

    def carry_out(self, requester: Requester, function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401  # the function's own
        """Call a function for a requester, who also gets the exceptions of replies that
        it submits for. Return what it returns; None after an exception.
        """
        before, self.requester = self.requester, requester
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001  # others must have their replies
            fail, *about = requester
            fail(*about, error)
            return None
        finally:
            self.requester = before

    def later(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that a timer may call for the requester of this moment."""
        return partial(self.carry_out, self.requester, function)

    def oldest_reply_s(self) -> float:
        """Return the seconds that the oldest pending reply has waited for the disk."""
        if not (self._pending or self._pending_write or self._in_write):
            return 0.0
        return self._clock.seconds() - self._waiting_since

    @property
    def is_behind(self) -> bool:
        """Return whether all sends have to wait for the disk. One without space refuses
        them.
        """
        return self._bytes_ahead >= self.budget.bytes and not self.store.read_only

    def has_room(self, size: int) -> bool:
        """Return whether a send of so many bytes may begin. What is larger than the
        budget begins where little is ahead of it.
        """
        ahead, budget = self._bytes_ahead, self.budget.bytes
        return ahead + size <= budget or ahead <= budget >> 2 or self.store.read_only

    @property
    def _bytes_ahead(self) -> int:
        """The bytes of the two writes that a decision of this moment waits for. Between
        two writes, replies that are pending have waited for the last one already.
        """
        unflushed = self.store.end - self.store.durable
        return unflushed if self._writing else unflushed + self._missed_write

    def seconds_for(self, size: int) -> float:
        """Return the seconds in which the disk takes what is unflushed and `size`
        bytes.
        """
        return self.budget.seconds_for(self.store.end - self.store.durable + size)

    def hurry(self) -> None:
        """Bring the flush forward: senders wait for it."""
        self._senders_wait = True
        self._plan_flush()

    def listen(self, event: type, listener: Listener) -> None:
        """Call `listener` with each event of that type as it is applied; the event may
        not be durable yet.
        """
        self._listeners.setdefault(event, []).append(listener)

    def _record(self, outcome: Outcome, now: int) -> int:
        """Append and apply all events, or none, and return their end in the log. Raises
        DiskFull, and nothing was recorded.
        """
        epoch, attachment, end = self.state.boot_epoch, outcome.attachment, 0
        for nth, event in enumerate(outcome.events):
            kind = type(event)
            at = self.store.append(
                KINDS[kind],
                encode(event),
                attachment,
                stored_at=now,
                boot_epoch=epoch,
                continued=nth > 0,
            )
            context, attachment, end = RecordContext(*at, now, epoch), b"", at.end
            if not outcome.lazy:
                self._relied_on = end  # also for answers that listeners give
            try:
                machine.apply(self.state, event, context)
            except Exception:
                self.fail(Failure())  # the record is not written, so a restart is without it
                raise
            for listener in self._listeners.get(kind, ()):
                self._call(listener, event, context)
            if kind is OperatorActed or batched.BATCHED_EVENTS.get(kind) in self._listeners:
                self._call_for_parts(event, context)
        if self.state.topics_with_new_entries:
            self._new_entries.append((end, self.state.topics_with_new_entries.copy()))
            self.state.topics_with_new_entries.clear()
        return end

    def _call_for_parts(self, event: Event, context: RecordContext) -> None:
        """Call the listeners of each event in a batch, or in an operator's change."""
        for one, its_context in batched.events_in(event, context):
            for listener in self._listeners.get(type(one), ()):
                self._call(listener, one, its_context)

    def _call(self, listener: Callable[..., object], *args: object) -> None:
        """Call a listener; an exception in it ends nothing else."""
        try:
            listener(*args)
        except Exception as error:  # noqa: BLE001  # replies and other listeners come after it
            self.faults.record(getattr(listener, "__qualname__", repr(listener)), error)

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            if not self._writing:
                self._waiting_since = self._clock.seconds()
            self._after_reads(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._writing or self.failed is not None:
            return  # the end of the write under way plans the next flush
        flush = self._cut()
        if (self._pending_write or self.flush_policy is not None) and not self._must_sync():
            self._write_only(flush)
        elif flush is not None or self.store.durable < self.store.end:
            self._write_and_sync(flush)

    def _cut(self) -> Flush | None:
        unwritten, self._unwritten = self._unwritten, None
        fresh = self.store.cut()
        if unwritten is None or fresh is None:
            return unwritten or fresh
        return Flush(unwritten.writes + fresh.writes, fresh.end)

    def _retry_later(self, flush: Flush) -> None:
        """Retry a write that found no space, with the records that come until then."""
        log.error("engine.disk_full", bytes=flush.end - self.store.durable)
        self._unwritten, self._flush_planned = flush, True
        self._clock.callLater(FULL_DISK_S, self._flush)

    def _must_sync(self) -> bool:
        waiting = self.readers_waiting or self._senders_wait
        return bool(self._pending) or waiting or self._schedule.is_due

    def _write_only(self, flush: Flush | None) -> None:
        if flush is not None and not self._write(flush, sync=False):
            return
        self._deliver_all(self._take_early_replies())
        at = self._clock.seconds() + self._schedule.after_s
        if at < self._sync_at and self.store.durable < self.store.end:
            self._sync_at = at
            self._clock.callLater(self._schedule.after_s, self._scheduled_sync)

    def _scheduled_sync(self) -> None:
        self._sync_at = NEVER
        if not self._writing and self.failed is None and self.store.durable < self.store.end:
            self._write_and_sync(self._cut())

    def _write_and_sync(self, flush: Flush | None) -> None:
        self._schedule.sync_began()
        # Sends that wait make the next write large: it would write over the zeros.
        self.store.limit_zeros(0 if self._senders_wait else self.budget.bytes // ZEROS_SHARE)
        self._senders_wait = False
        self._missed_write = 0
        early = self._take_early_replies()
        if flush is not None and not early and self._writes_inline(flush):
            if self._write(flush):
                self._flushed(flush, early)
            return
        self._writing, self._in_write = True, early
        self._in_background(flush).addCallbacks(
            lambda _: self._thread_done(flush, early),
            lambda why: self._thread_failed(why, flush, early),
        ).addErrback(self.fail)  # a reply that could not be delivered is a bug

    def _in_background(self, flush: Flush | None) -> Deferred[Any]:
        """Make a flush durable, in a thread or at the other nodes."""
        if self.replicate is not None and flush is not None:
            return self._share(self.replicate, flush)
        write = (self.store.sync,) if flush is None else (self.store.write, flush)
        size = (self.store.end if flush is None else flush.end) - self.store.durable
        work: Deferred[Any] = self._in_thread(self._timed, size, *write)
        return work

    def _share(self, replicate: Replicate, flush: Flush) -> Deferred[Any]:
        """Bring a flush to the other nodes, and write it here without a sync. A leader
        whose reactor waits for its disk would fall silent, and be deposed.
        """
        shared: Deferred[Any] = maybeDeferred(replicate, flush)
        write = partial(self.store.write, flush, sync=False)
        written: Deferred[Any] = self._in_thread(self.disk.write_with_ballast, write)
        both: Deferred[Any] = gatherResults([shared, written], consumeErrors=True)
        return both.addErrback(_first_of)

    def _writes_inline(self, flush: Flush) -> bool:
        """Return whether the reactor writes itself, because a thread would gain
        nothing.

        While a thread looks for space, the reactor's write would wait for it.
        """
        return (
            self.replicate is None
            and (len(self._pending) == 1 or self._mean_write_s < self._quick_s)
            and flush.end - self.store.durable <= INLINE_BYTES
            and not self.store.busy
        )

    def _thread_done(self, flush: Flush | None, early: list[_PendingReply]) -> None:
        self._writing, self._in_write = False, []
        self._flushed(flush, early)
        if self.store.end > self.store.durable or self._pending_write:
            self._plan_flush()

    def _thread_failed(
        self, failure: Failure, flush: Flush | None, early: list[_PendingReply]
    ) -> None:
        self._writing, self._in_write = False, []
        if flush is None or not self._is_full(failure.value):
            self.fail(failure)
            return
        self._pending_write[:0] = early
        self._retry_later(flush)

    def _flushed(self, flush: Flush | None, early: list[_PendingReply]) -> None:
        before = self.store.durable
        durable = self.store.settle() if flush is None else self.store.complete(flush)
        self._missed_write = durable - before if self.store.end > durable else 0
        for listener in self.before_replies:
            self._call(listener)
        self._deliver_all(early)
        pending = self._pending
        ready: list[_PendingReply] = []
        while pending and pending[0].end <= durable:
            ready.append(pending.popleft())
        self._deliver_all(ready)
        if self._new_entries:
            self._notify_readers(durable)
        if self.state.backlog:
            for listener in self.on_backlog:
                self._call(listener)
        for listener in self.on_durable:
            self._call(listener)

    def _deliver_all(self, replies: list[_PendingReply]) -> None:
        """Deliver replies. An exception concerns its requester, whose error it
        becomes.
        """
        for _end, deliver, reply, requester in replies:
            self.requester = requester
            try:
                deliver(reply)
            except Exception as error:  # noqa: BLE001  # the others must have theirs
                fail, *args = requester
                self.faults.guard("reply", partial(fail, *args, error))()
        self.requester = self.own_requester

    def _notify_readers(self, durable: int) -> None:
        topic_ids = set[int]()
        while self._new_entries and self._new_entries[0][0] <= durable:
            topic_ids |= self._new_entries.popleft()[1]
        if topic_ids and self.readers_waiting:
            for listener in self.on_published:
                self._call(listener, topic_ids)

    def _take_early_replies(self) -> list[_PendingReply]:
        """The early replies whose records are all in the write that begins now."""
        early, self._pending_write = self._pending_write, []
        return early

    def try_drain(self) -> bool:
        """Return whether everything decided is durable and answered; if not, bring the
        flush forward.
        """
        if self.store.end > self.store.durable:
            # a reply that waits for the disk lets no asynchronous flush wait
            waits = _PendingReply(self.store.end, _ignore, None, self.requester)
            self._pending.append(waits)
            self._plan_flush()
        return self.store.end == self.store.durable

    def flush_now(self) -> None:
        """Write and sync everything, blocking: at the start only. Raises what
        `Log.write` raises.
        """
        flush = self._cut()
        if flush is not None:
            self.disk.write_with_ballast(self.store.write, flush)
            self._flushed(flush, self._take_early_replies())

    def _write(self, flush: Flush, *, sync: bool = True) -> bool:
        """Write in this thread. False = there was no space, and a retry is planned."""
        try:
            if sync:
                self._timed(flush.end - self.store.durable, self.store.write, flush)
            else:
                self.store.write(flush, sync=False)
        except BaseException as error:
            if self._is_full(error):
                self._retry_later(flush)
                return False
            self.fail(Failure(error))
            raise
        return True

    def _timed(self, size: int, write: Callable[..., None], *args: object) -> None:
        """Have `size` bytes on disk, in any thread, and measure the time that it
        takes.
        """
        began = self._clock.seconds()
        write(*args)
        taken_s = self._clock.seconds() - began
        self._mean_write_s += LATENCY_WEIGHT * (taken_s - self._mean_write_s)
        self.budget.observe(size, taken_s)

    def _is_full(self, error: BaseException | None) -> bool:
        is_alone = self.replicate is None
        return is_alone and isinstance(error, DiskFull) and self.store.read_only

    def fail(self, failure: Failure) -> None:
        """Stop for good, as after a failed write: send no reply, retry nothing. The
        kernel may have dropped the pages that a failed sync could not write.
        """
        self.failed = failure
        self.on_failure(failure)


def _first_of(several: Failure) -> Failure:
    """Return the failure that came first, out of `gatherResults`."""
    assert isinstance(several.value, FirstError)
    return several.value.subFailure


def _log_failure(failure: Failure) -> None:
    log.critical("engine.failed", error=failure.getErrorMessage())
