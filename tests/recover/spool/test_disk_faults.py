"""Power cuts, kills and errors at every commit: what a receipt was given for is there,
in order.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from tests.recover.spool.disks import (
    Disk,
    batch,
    bodies,
    new_disk,
    new_spool,
    open_spools,
    store,
    taken,
    waiting,
)
from txmq.errors import DiskFull, SpoolFull, StoreError
from txmq.recover.local.batches import SPOOL, Refusal, SpooledBatch, refused_batches
from txmq.recover.local.database import Database, read_only
from txmq.recover.local.spool import Spool

REFUSAL = Refusal("UnknownTopic", "no", 7, "not done")


@dataclass
class History:
    """Bodies by sequence: staged, those with a receipt, and drained ones."""

    staged: list[bytes] = field(default_factory=list)
    receipts: list[bytes] = field(default_factory=list)
    drained: set[bytes] = field(default_factory=set)


def live(disk: Disk, history: History) -> None:
    """A life: an outage, a drain with all that may happen, and another outage."""
    spool = new_spool(disk)
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
    if number == 11:
        spool.refuse(first, REFUSAL)
    history.drained |= set(names([first]))
    spool.mark_drained(second.position, first.count)


def names(batches: list[SpooledBatch]) -> list[bytes]:
    return [body.rstrip(b"\0") for body in bodies(batches)]


def refused(spool: Spool) -> list[SpooledBatch]:
    with read_only(spool.path, SPOOL) as connection:
        return [one for one, _ in refused_batches(connection)]


def check(disk: Disk, history: History) -> None:
    """Whatever has a receipt is there in order, or was drained or refused."""
    opened = taken(disk)
    assert not any(one.report.damage or one.report.lost for one in opened)
    spools = open_spools(opened)
    assert len(spools) <= 1
    there = names(waiting(spools[0])) if spools else []
    order = [body for body in history.staged if body in set(there)]
    assert there == order, "out of order, or twice"
    aside = [one for spool in spools for one in refused(spool)]
    gone = set(history.receipts) - set(there) - set(names(aside))
    assert gone <= history.drained, f"lost: {gone - history.drained}"
    for spool in spools:
        assert spool.waiting == len(there)
        sequences = [one.sequence for one in waiting(spool)]
        assert len(set(sequences)) == len(sequences), "two messages with one sequence"
        spool.abandon()


def check_power_cuts() -> int:
    points, disk, history = 0, new_disk(), History()

    def look() -> None:
        nonlocal points
        points += 1
        check(disk.crash(Random(points)), history)
        check(disk.restart(), history)

    disk.at_commit = look
    live(disk, history)
    return points


def test_a_power_cut_at_every_change_loses_and_invents_nothing() -> None:
    assert check_power_cuts() > 50


def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Database.run

    def unsynced(self: Database, work: Any, *, synced: bool = True, keep: bool = False) -> Any:
        del synced
        return true(self, work, synced=False, keep=keep)

    monkeypatch.setattr(Database, "run", unsynced)


def receipts_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Spool.flush

    def late(self: Spool) -> None:
        """Write what came before, and leave this for the next flush."""
        staged, self._staged = self._staged, getattr(self, "before", [])
        true(self)
        self.before = staged  # type: ignore[attr-defined]

    monkeypatch.setattr(Spool, "flush", late)


def marks_one_batch_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Spool.mark_drained
    monkeypatch.setattr(
        Spool,
        "mark_drained",
        lambda self, position, messages: true(self, position + 1, messages),
    )


@pytest.mark.parametrize("plant", [no_sync, receipts_before_the_commit, marks_one_batch_too_many])
def test_planted_bugs_of_the_spools_disk_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_power_cuts()


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_FULL])
def test_an_error_at_every_call_is_typed_and_loses_nothing(code: int) -> None:
    failed = 0
    for call in range(60):
        disk, history, calls = new_disk(), History(), 0

        def fail() -> None:
            nonlocal calls
            calls += 1
            if calls == call:  # noqa: B023  # called at once
                error = sqlite3.OperationalError("a failure of this test")
                error.sqlite_errorcode = code
                raise error

        disk.at_commit = fail
        try:
            live(disk, history)
        except StoreError:
            failed += 1
        check(disk.restart(), history)
    assert failed > 20, "errors were met, and not passed over"


def test_a_full_disk_refuses_before_anything_is_staged_and_goes_on_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spool = new_spool(new_disk())
    with monkeypatch.context() as patch:
        free = [1 << 21]
        patch.setattr(spool._database, "free_space", lambda: free[0])
        store(spool, batch(0, b"0"))
        free[0] = 1 << 20
        with pytest.raises(DiskFull):
            store(spool, batch(1, b"1"))
    assert [one.sequence for one in waiting(spool)] == [0]
    assert spool.waiting == 1
    store(spool, batch(1, b"more"))
    assert bodies(waiting(spool)) == [b"0", b"more"]
    spool.abandon()


def test_a_flush_without_space_may_be_made_again() -> None:
    spool = new_spool(new_disk())
    store(spool, batch(0, b"0"))
    pages = "PRAGMA max_page_count"
    database = spool._database
    database.read(lambda connection: connection.execute(f"{pages} = 1"))
    spool.stage([batch(1, bytes(100_000))], 1)
    for _ in range(2):
        with pytest.raises(DiskFull):
            spool.flush()
    database.read(lambda connection: connection.execute(f"{pages} = 1000000"))
    spool.flush()
    assert [one.sequence for one in waiting(spool)] == [0, 1]
    spool.abandon()


def test_the_limits_error_says_that_nothing_was_done() -> None:
    error = SpoolFull("full")
    assert error.retriable
    assert error.outcome == "not done"
    assert "spool_bytes" in str(error)
