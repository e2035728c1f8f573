"""Kills, power cuts and errors of the disk: nothing acknowledged is lost.

The same check must find the bugs planted at the end of this module.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recover.local.harness import STUCK, History, Life, check_recovery, run_life
from tests.recover.local.stores import FAILURE, acked, message, offsets, open_store, place, stored
from txmq.errors import DiskFull, StoreClosed
from txmq.recover.local import LocalStore, StoredMessage
from txmq.recover.local.database import Database, _Job

SEEDS = (22, 23)


@pytest.mark.parametrize("power_cuts", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_crash_point_of_a_life_keeps_the_promises(
    seed: int,
    power_cuts: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    assert run_life(tmp_path, seed, 60, check_recovery, power_cuts=power_cuts) == 60


def failing(store: LocalStore, code: int) -> None:
    """Have commits of a store fail with an error of SQLite."""

    def fail() -> None:
        error = sqlite3.OperationalError("a failure of this test")
        error.sqlite_errorcode = code
        raise error

    store._database._commit = fail  # type: ignore[method-assign]


def working(store: LocalStore) -> None:
    del store._database._commit


def test_an_error_of_the_disk_closes_the_store(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    life = Life(store, History(), 0)
    life.put()
    failing(store, sqlite3.SQLITE_IOERR_FSYNC)
    with pytest.raises(StoreClosed, match="failed: "):
        store.put([stored(90)])
    for method in (life.put, store.next_due, lambda: store.due(1, 1), lambda: store.untold(1)):
        with pytest.raises(StoreClosed, match="open it again"):
            method()
    store.close()
    store, report = open_store(tmp_path)
    assert report.findings() == []
    assert store.stats().messages == len(life.model.held)
    store.close()


def test_a_full_disk_takes_outcomes_only_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(offset) for offset in range(5)])
    pages = "PRAGMA max_page_count=1"  # no more than there are
    store._database.read(lambda connection: connection.execute(pages))
    with pytest.raises(DiskFull, match="no space"):
        store.put([(message(50, body=bytes(100_000)), 0, FAILURE)])
    assert store.stats().disk_full
    assert store.stats().full
    monkeypatch.setattr(store._database, "free_space", lambda: 0)
    with pytest.raises(DiskFull, match="free space"):
        store.put([stored(51)])
    store.record(acked(0, 1))
    assert offsets(store.due(STUCK, 9)) == [2, 3, 4]
    monkeypatch.undo()
    monkeypatch.setattr("txmq.recover.local.store.BALLAST", 4096)
    pages = "PRAGMA max_page_count=1000000"
    store._database.read(lambda connection: connection.execute(pages))
    store.put([stored(51)])
    assert not store.stats().disk_full
    store.close()


def test_outcomes_without_any_space_are_written_later(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(offset) for offset in range(3)])
    failing(store, sqlite3.SQLITE_FULL)
    with pytest.raises(DiskFull):
        store.record(acked(0))
    with pytest.raises(DiskFull):
        store.forget([place(1)])
    for read in (lambda: store.due(STUCK, 9), lambda: store.untold(9)):
        with pytest.raises(DiskFull):
            read()
    assert store.stats().disk_full
    working(store)
    assert offsets(store.due(STUCK, 9)) == [2]
    store.close()
    store, _ = open_store(tmp_path)
    assert [entry.place for entry in store.entries(None, 9)] == [place(0), place(2)]
    store.close()


def test_a_stuck_message_does_not_keep_the_file_from_being_used_again(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store._database.read(lambda connection: connection.execute("PRAGMA wal_autocheckpoint=10"))
    store.put([(message(1, "stuck", body=b"x" * 300), STUCK, FAILURE)])
    for offset in range(100, 400):
        store.put([(message(offset, body=b"y" * 3_000), 0, FAILURE)])
        store.record(acked(offset))
        store.forget([place(offset)])
    assert store.stats().disk_bytes < 400_000
    assert store.due(STUCK, 9) == [message(1, "stuck", body=b"x" * 300)]
    store.close()


def test_a_file_that_is_almost_empty_gets_smaller_at_the_next_start(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([(message(offset, body=bytes(100_000)), 0, FAILURE) for offset in range(200)])
    store.forget([place(offset) for offset in range(1, 200)])
    store.close()
    size = Path(store.path, "store.db").stat().st_size
    store, _ = open_store(tmp_path)
    assert offsets(store.due(STUCK, 9)) == [0]
    store.close()
    assert Path(store.path, "store.db").stat().st_size < size / 20


def acks_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    do = Database._do

    def late(self: Database, jobs: list[_Job[Any]]) -> None:
        """Commit what came before, and leave these jobs for the next commit."""
        if self._connection.in_transaction:
            self._connection.execute("COMMIT")
        commit, self._commit = self._commit, lambda: None  # type: ignore[method-assign]
        try:
            do(self, jobs)
        finally:
            self._commit = commit  # type: ignore[method-assign]

    monkeypatch.setattr(Database, "_do", late)


def commits_without_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Database._set_synced
    monkeypatch.setattr(
        Database, "_set_synced", lambda self, *, synced: true(self, synced=synced and False)
    )


def keys_in_the_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    true = LocalStore._run_of

    def by_arrival(
        self: LocalStore, connection: sqlite3.Connection, message: StoredMessage
    ) -> tuple[int, bool, bool]:
        _, head, _ = true(self, connection, message)
        self._run += 1
        return self._run, head, False

    monkeypatch.setattr(LocalStore, "_run_of", by_arrival)


def followers_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    true = LocalStore._run_of

    def free(
        self: LocalStore, connection: sqlite3.Connection, message: StoredMessage
    ) -> tuple[int, bool, bool]:
        run, _, early = true(self, connection, message)
        return run, True, early

    monkeypatch.setattr(LocalStore, "_run_of", free)


def nobody_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "_promote", lambda *_: None)


PLANTED = [
    acks_before_the_commit,
    commits_without_a_sync,
    keys_in_the_order_of_arrival,
    followers_do_not_wait,
    nobody_follows,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_the_check_finds_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        survive_some_lives(tmp_path)


def survive_some_lives(directory: Path) -> None:
    for seed in SEEDS:
        for power_cuts in (False, True):
            life = directory / f"{seed}-{power_cuts}"
            run_life(life, seed, 60, check_recovery, power_cuts=power_cuts)
