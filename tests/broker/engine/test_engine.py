"""Durability: replies wait for the disk, replies share writes; the engine retries on a
full disk and stops on a failed one.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from tests.store.simfs import SimFS
from txmq import errors
from txmq.batch import encode_one, verify
from txmq.broker.engine.engine import FULL_DISK_S, Engine
from txmq.config.broker import FlushEvery
from txmq.core import machine
from txmq.core.disk_budget import DiskBudget
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.model.message import Message
from txmq.store.log.log import Log
from txmq.store.log.record import LOST
from txmq.store.log.segment import segment_path
from txmq.store.log.writer import Flush
from txmq.store.tables import MemoryTables
from txmq.wire.data_requests import SendReceipt

STEP = 4_096  # bytes of room made ahead
DATA = "/data"


class Rig:
    """An engine on a simulated disk, with a thread that works when the test says so."""

    def __init__(
        self,
        fs: SimFS | None = None,
        flush: FlushEvery | None = None,
        quick_s: float = 0.0,
        step: int = STEP,
    ) -> None:
        self.fs = fs or SimFS()
        self.clock = Clock()
        self.thread: list[tuple[Deferred[Any], Callable[..., Any], tuple[object, ...]]] = []
        self.failures: list[BaseException | None] = []
        self.replies: list[Any] = []
        self.sequence = 0
        self.log, _ = Log.open(self.fs, DATA, now=1, segment_size=1 << 20, preallocate=step)
        state = machine.load(MemoryTables())
        self.engine = Engine(
            self.log,
            state,
            clock=self.clock,
            now=lambda: 1_000,
            in_thread=self._in_thread,
            flush=flush,
            quick_s=quick_s,
        )
        self.engine.on_failure = lambda failure: self.failures.append(failure.value)
        self.engine.boot("test")
        self.engine.submit(CreateTopic("t", 1), self.replies.append)
        self.turn()
        self.work()
        self.replies.clear()
        self.fs.trace.clear()

    def _in_thread(self, function: Callable[..., Any], *args: object) -> Deferred[Any]:
        done: Deferred[Any] = Deferred()
        self.thread.append((done, function, args))
        return done

    def work(self) -> None:
        """Let the thread do all its work."""
        while self.thread:
            done, function, args = self.thread.pop(0)
            try:
                result = function(*args)
            except errors.StoreError as error:
                done.errback(error)
            else:
                done.callback(result)

    def turn(self, seconds: float = 0) -> None:
        """Make one turn of the reactor."""
        self.clock.advance(seconds)

    def send(self, size: int = 100, *, early: bool = True, flush: FlushEvery | None = None) -> None:
        """Send a message; `flush` is the topic's own policy."""
        batch = encode_one(
            Message(bytes(size)), producer_id=b"p" * 16, epoch=0, sequence=self.sequence, born_at=1
        )
        self.sequence += 1
        flush = (flush or self.engine.flush_policy) if early else None
        self.engine.submit(
            StoreBatch("t", 0, 0, batch, verify(batch)), self.replies.append, early=flush
        )

    @property
    def offsets(self) -> list[int]:
        """Return the offsets of the acknowledged sends."""
        return [reply.offset for reply in self.replies if isinstance(reply, SendReceipt)]

    def stored(self) -> int:
        """Return the number of records that a power cut would leave at least."""
        fs = self.fs.copy()
        self.log.close()
        log, _ = Log.open(fs, DATA, now=1)
        return sum(record.kind != LOST for record in log.scan(log.first))


def syncs(rig: Rig) -> int:
    return sum("fdatasync" in call for call in rig.fs.trace)


def test_a_lone_send_is_written_inline_and_answered_once_it_is_durable() -> None:
    rig = Rig()
    rig.send()
    assert rig.replies == []
    assert syncs(rig) == 0
    rig.turn()
    assert rig.thread == []
    assert rig.offsets == [0]
    assert syncs(rig) == 1
    assert rig.log.durable == rig.log.end


def test_several_sends_of_a_turn_share_one_write_in_the_thread() -> None:
    rig = Rig()
    for _ in range(5):
        rig.send()
    rig.turn()
    assert (rig.offsets, len(rig.thread)) == ([], 1)
    rig.work()
    assert rig.offsets == [0, 1, 2, 3, 4]
    assert syncs(rig) == 1


def test_records_that_arrive_during_a_write_go_with_the_next_one() -> None:
    rig = Rig()
    rig.send()
    rig.send()
    rig.turn()
    rig.send()
    rig.turn()
    assert len(rig.thread) == 1
    rig.work()
    assert rig.offsets == [0, 1]
    rig.turn()
    rig.work()
    assert rig.offsets == [0, 1, 2]
    assert syncs(rig) == 2


def test_no_thread_waits_for_a_quick_disk_until_it_turns_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(quick_s=0.001)
    write, took_s = rig.log.write, [0.0005]

    def timed(flush: Flush, *, sync: bool = True) -> None:
        write(flush, sync=sync)
        rig.clock.rightNow += took_s[0]

    def turn_of_two() -> bool:
        """Return whether the write was made inline."""
        rig.send()
        rig.send()
        rig.turn()
        inline = not rig.thread
        rig.work()
        return inline

    monkeypatch.setattr(rig.log, "write", timed)
    assert [turn_of_two() for _ in range(20)] == [True] * 20
    took_s[0] = 0.1
    assert [turn_of_two() for _ in range(3)] == [True, False, False]
    took_s[0] = 0.0005
    assert [turn_of_two() for _ in range(50)][-1]
    assert rig.offsets == list(range(146))


def test_a_lone_send_goes_to_the_thread_while_something_else_blocks_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    monkeypatch.setattr(Log, "busy", True)
    rig.send()
    rig.turn()
    assert (rig.offsets, len(rig.thread)) == ([], 1)
    rig.work()
    assert rig.offsets == [0]


def test_a_refusal_and_a_repeated_receipt_wait_for_the_records_they_rest_on() -> None:
    rig = Rig()
    rig.send()
    rig.sequence = 0
    rig.send()
    rig.sequence = 7
    rig.send()
    assert rig.replies == []
    rig.turn()
    rig.work()
    assert [getattr(reply, "duplicate", None) for reply in rig.replies] == [False, True, None]
    assert type(rig.replies[2]) is errors.SequenceGap


def test_under_an_asynchronous_flush_a_send_waits_for_the_write_alone() -> None:
    rig = Rig(flush=FlushEvery(every_ms=10, messages=100))
    rig.send()
    rig.send()
    assert rig.replies == []
    rig.turn()
    assert rig.offsets == [0, 1]
    assert syncs(rig) == 0
    assert rig.log.durable < rig.log.end
    rig.turn(0.01)
    rig.work()
    assert syncs(rig) == 1
    assert rig.log.durable == rig.log.end


def test_a_topic_may_flush_less_often_than_its_broker() -> None:
    rig = Rig()
    rig.send(flush=FlushEvery(every_ms=10, messages=3))
    rig.turn()
    assert (rig.offsets, syncs(rig)) == ([0], 0)
    rig.turn(0.01)
    rig.work()
    assert syncs(rig) == 1
    assert rig.log.durable == rig.log.end
    rig.send(flush=FlushEvery(every_ms=10, messages=3))
    rig.send()
    rig.turn()
    rig.work()
    assert (rig.offsets, syncs(rig)) == ([0, 1, 2], 2), (
        "who waits for the disk takes all others along"
    )


def test_of_several_policies_the_strictest_counts() -> None:
    rig = Rig(flush=FlushEvery(every_ms=60_000, messages=1_000))
    rig.send()
    rig.turn()
    rig.send(flush=FlushEvery(every_ms=10, messages=100))
    rig.turn()
    assert syncs(rig) == 0
    rig.turn(0.01)
    rig.work()
    assert syncs(rig) == 1
    for _ in range(2):
        rig.send(flush=FlushEvery(every_ms=10, messages=2))
    rig.turn()
    rig.work()
    assert syncs(rig) == 2


def test_an_asynchronous_flush_syncs_after_so_many_messages() -> None:
    rig = Rig(flush=FlushEvery(every_ms=1_000, messages=3))
    for _ in range(3):
        rig.send()
    rig.turn()
    rig.work()
    assert rig.offsets == [0, 1, 2]
    assert syncs(rig) == 1


def test_a_reader_at_the_tail_brings_an_asynchronous_flush_forward() -> None:
    rig = Rig(flush=FlushEvery(every_ms=1_000, messages=100))
    seen: list[int] = []
    rig.engine.on_durable.append(lambda: seen.append(rig.log.durable))
    rig.engine.readers_waiting = True
    rig.send()
    rig.turn()
    rig.work()
    assert seen == [rig.log.end]


def test_readers_are_told_of_what_was_recorded_during_a_write_once_that_is_durable() -> None:
    rig = Rig()
    told: list[int] = []
    rig.engine.on_published.append(lambda _topics: told.append(rig.log.durable))
    rig.engine.readers_waiting = True
    ends = []
    for _ in range(2):  # the second one while the thread is to write the first
        rig.send()
        rig.send()
        rig.turn()
        ends.append(rig.log.end)
    rig.work()
    rig.turn()
    rig.work()
    assert told == ends


def test_all_but_plain_sends_wait_for_the_disk_even_under_an_asynchronous_flush() -> None:
    rig = Rig(flush=FlushEvery(every_ms=1_000, messages=100))
    rig.send(early=False)
    rig.turn()
    rig.work()
    assert rig.offsets == [0]
    assert syncs(rig) == 1


@pytest.mark.parametrize("sends", [1, 3])
@pytest.mark.parametrize("flush", [None, FlushEvery(every_ms=10, messages=2)])
def test_a_failed_write_answers_nothing_and_stops_everything(
    sends: int, flush: FlushEvery | None
) -> None:
    rig = Rig(flush=flush)
    rig.fs.errors = dict.fromkeys(range(len(rig.fs.trace), 1_000), errno.EIO)
    for _ in range(sends):
        rig.send()
    with suppress(errors.StoreError):  # of a write in the reactor's own thread
        rig.turn()
    rig.work()
    assert [type(failure) for failure in rig.failures] == [errors.StoreError]
    assert rig.engine.failed is not None
    rig.turn(10)
    assert rig.thread == []
    assert rig.replies == []


def full(flush: FlushEvery | None = None) -> Rig:
    """A rig whose disk has no space beyond the preallocated part."""
    rig = Rig(flush=flush)
    rig.fs.capacity = 0
    return rig


@pytest.mark.parametrize("sends", [1, 3])
@pytest.mark.parametrize("flush", [None, FlushEvery(every_ms=10, messages=2)])
def test_a_write_that_finds_the_disk_full_is_made_again_when_there_is_space(
    sends: int, flush: FlushEvery | None
) -> None:
    rig = full(flush)
    for _ in range(sends):
        rig.send(2 * STEP)
    for _ in range(3):
        rig.turn(FULL_DISK_S)
        rig.work()
    assert rig.replies == []
    assert rig.log.read_only
    rig.fs.capacity = None
    for _ in range(3):
        rig.turn(FULL_DISK_S)
        rig.work()
    assert rig.offsets == list(range(sends))
    assert rig.failures == []
    assert rig.log.durable == rig.log.end
    assert rig.stored() == 4 + sends


def test_a_full_disk_refuses_new_writes_at_once_until_there_is_space() -> None:
    rig = full()
    rig.send(2 * STEP)
    rig.turn()
    rig.send()
    [refusal] = rig.replies
    assert type(refusal) is errors.ReadOnly
    assert "space" in refusal.hint
    assert rig.engine.state.topics["t"].end_offsets == [1]
    rig.fs.capacity = None
    assert rig.log.try_space()
    rig.turn(FULL_DISK_S)
    rig.work()
    rig.sequence = 1
    rig.send()
    rig.turn()
    rig.work()
    assert rig.offsets == [0, 1]


def test_records_decided_while_a_write_found_the_disk_full_are_written_after_it() -> None:
    rig = full()
    rig.send(2 * STEP)
    rig.send()
    rig.turn()
    rig.send()  # the thread has not begun
    rig.work()
    assert rig.log.read_only
    assert rig.replies == []
    rig.fs.capacity = None
    rig.turn(FULL_DISK_S)
    rig.work()
    assert rig.offsets == [0, 1, 2]
    assert rig.stored() == 7


def test_durable_messages_can_be_read_while_the_disk_is_full() -> None:
    rig = Rig()
    rig.send()
    rig.turn()
    rig.fs.capacity = 0
    rig.send(2 * STEP)
    rig.turn()
    assert rig.log.read_only
    [entry] = [
        row for _key, row in rig.engine.state.entries.range(b"") if row[5] <= rig.log.durable
    ]
    assert verify(rig.log.read(entry[0], entry[1])).sequence == 0


def test_a_decision_waits_for_two_writes_with_one_budget_between_them() -> None:
    rig = Rig()
    engine = rig.engine
    engine.budget = DiskBudget(10_000)
    rig.send(6_000)
    rig.send(1)
    rig.turn()
    assert len(rig.thread) == 1, "a write is under way"
    assert not engine.has_room(6_000)
    assert engine.has_room(3_000)
    rig.send(1)  # as a decision would
    seen = list[tuple[bool, bool]]()
    engine.on_durable.append(lambda: seen.append((engine.has_room(6_000), engine.is_behind)))
    [(done, function, args)], rig.thread = rig.thread, []
    done.callback(function(*args))
    assert seen == [(False, False)], "what waits has waited for the large write"
    rig.turn()
    assert engine.has_room(6_000), "of a small write, sends may go with the next"
    rig.work()
    assert seen[-1] == (True, False)


def test_zeros_for_later_records_are_a_quarter_of_the_budget_at_most() -> None:
    rig = Rig(step=64 << 10)
    path = segment_path(DATA, 0)
    rig.engine.budget = DiskBudget(8_000)
    ahead = list[int]()
    for _ in range(40):
        rig.send(early=False)
        rig.turn()
        rig.work()
        ahead.append(rig.fs.open(path).size() - rig.log.end)
    later = ahead[20:]  # the boot's write, before any was measured, added 4 KiB
    assert 300 < max(later) <= 8_000 // 4
    assert len(set(later)) > 2


def test_a_write_brings_no_zeros_while_senders_wait_for_the_disk() -> None:
    rig = Rig(step=64 << 10)
    path = segment_path(DATA, 0)

    def zeros_behind(*, waiting: bool) -> list[int]:
        found = list[int]()
        for _ in range(40):
            rig.send(early=False)
            if waiting:
                rig.engine.hurry()
            rig.turn()
            rig.work()
            found.append(rig.fs.open(path).size() - rig.log.end)
        return found

    assert zeros_behind(waiting=True)[-1] == 0, "those of the boot are used up"
    assert zeros_behind(waiting=False)[-1] > 0


def test_what_is_larger_than_the_budget_begins_where_little_is_ahead() -> None:
    rig = Rig()
    engine = rig.engine
    engine.budget = DiskBudget(10_000)
    assert engine.has_room(1 << 20)
    rig.send(1_000)
    assert engine.has_room(1 << 20)
    rig.send(2_000)
    assert not engine.has_room(1 << 20)
    rig.turn()
    rig.work()
    assert engine.has_room(1 << 20)
