"""Power cuts at every change, and errors at every call: what a receipt was given for is
there, in order.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from tests.recover.spool.disks import (
    SESSION,
    batch,
    bodies,
    directory_on,
    new_disk,
    open_spools,
    store,
    taken,
    waiting,
)
from txmq.errors import DiskFull, SpoolFull, StoreError
from txmq.recover.spool import Refusal, Spool, SpooledBatch
from txmq.recover.spool.refused import read_refused
from txmq.store.log import writer
from txmq.testing.simfs import SimFS, crash_points

REFUSAL = Refusal("UnknownTopic", "no", 7, "not done")


@dataclass
class History:
    """Bodies by sequence: staged, those with a receipt, and drained ones."""

    staged: list[bytes] = field(default_factory=list)
    receipts: list[bytes] = field(default_factory=list)
    drained: set[bytes] = field(default_factory=set)


def live(fs: SimFS, history: History) -> None:
    """A life: an outage, a drain with all that may happen, and another outage."""
    spool = directory_on(fs).open_new("orders", None, 1)
    sequence = 0
    for number in range(20):
        own = [b"%d.%d" % (number, row) for row in range(number % 3 + 1)]
        history.staged += own
        store(spool, batch(sequence, *(body + bytes(150) for body in own)))
        history.receipts += own
        sequence += len(own)
        if number % 4 == 3:
            drain(spool, history, number)
    spool.close()


def drain(spool: Spool, history: History, number: int) -> None:
    first, second, *_ = waiting(spool)
    if number == 3:
        spool.split(first)
    if number == 7:
        spool.renew(first)
    if number == 11:
        spool.refuse(first, REFUSAL)
    history.drained |= set(names([first]))
    spool.mark_drained(second.position, first.count)


def names(batches: list[SpooledBatch]) -> list[bytes]:
    return [body.rstrip(b"\0") for body in bodies(batches)]


def check(fs: SimFS, history: History) -> None:
    """Whatever has a receipt is there in order, or was drained or refused."""
    spools = open_spools(taken(fs))
    assert len(spools) <= 1
    there = names(waiting(spools[0])) if spools else []
    order = [body for body in history.staged if body in set(there)]
    assert there == order, "out of order, or twice"
    refused = [one for spool in spools for one, _refusal in read_refused(fs, spool.path)]
    gone = set(history.receipts) - set(there) - set(names(refused))
    assert gone <= history.drained, f"lost: {gone - history.drained}"
    for spool in spools:
        assert spool.waiting == len(there)
        resolved = [spool.renewals.resolve(SESSION, one.sequence) for one in waiting(spool)]
        assert len(set(resolved)) == len(resolved), "two messages with one sequence"
        spool.abandon()


def check_power_cuts() -> int:
    points = 0
    for fs, history in crash_points(new_disk(), live, History):
        for seed in range(3):
            check(fs.crash(Random(7 * points + seed)), history)
        check(fs.restart(), history)
        points += 1
    return points


def test_a_power_cut_at_every_change_loses_and_invents_nothing() -> None:
    assert check_power_cuts() > 100


def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.LogWriter, "_sync", lambda self: setattr(self, "synced", self.end))


def receipts_before_the_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "flush", lambda self: self._write(sync=False))


def marks_one_record_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Spool.mark_drained
    monkeypatch.setattr(
        Spool,
        "mark_drained",
        lambda self, position, messages: true(
            self, next(one.end for one in waiting(self) if one.position >= position), messages
        ),
    )


@pytest.mark.parametrize("plant", [no_fsync, receipts_before_the_fsync, marks_one_record_too_many])
def test_planted_bugs_of_the_spools_disk_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_power_cuts()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_an_error_at_every_call_is_typed_and_loses_nothing(number: int) -> None:
    clean = new_disk().copy()
    live(clean, History())
    failed = 0
    for call in range(1, clean.calls + 1):
        fs, history = new_disk(), History()
        fs.errors = {call: number}
        try:
            live(fs, history)
        except StoreError:
            failed += 1
        check(fs.restart(), history)
    assert failed > clean.calls // 2, "errors were met, and not passed over"


def test_a_full_disk_refuses_before_anything_is_staged_and_goes_on_later() -> None:
    fs = new_disk(capacity=2 << 20)
    spool = directory_on(fs).open_new(None, None, 1)
    stored = []
    for number in range(2_000):
        try:
            spool.require_space(4_000)
            store(spool, batch(number, b"%d" % number + bytes(3_000)))
        except DiskFull:
            break
        stored.append(number)
    assert 100 < len(stored) < 1_000
    assert [one.sequence for one in waiting(spool)] == stored
    fs.capacity = 8 << 20
    store(spool, batch(stored[-1] + 1, b"more"))
    assert waiting(spool)[-1].sequence == stored[-1] + 1


def test_the_limits_error_says_that_nothing_was_done() -> None:
    error = SpoolFull("full")
    assert error.retriable
    assert error.outcome == "not done"
    assert "spool_bytes" in str(error)
