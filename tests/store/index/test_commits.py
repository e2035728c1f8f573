"""Freeze, commit, release, dump and load of the state tables."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.store.index.tables import (
    LOG,
    ONE_ROW,
    USED,
    contents,
    one_row,
    path,
    reopened,
    settle,
    tables,
)
from txmq.errors import DiskFull, StoreError
from txmq.store.index import lmdb_tables
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.tables import DUE, ENTRIES, META
from txmq.testing.wait import PATIENCE_S

__all__ = ["path", "tables"]


def test_the_overlay_counts_what_the_next_commit_will_write(tables: LmdbTables) -> None:
    tables[DUE].put(b"a", (1,))
    tables[DUE].put(b"a", (2,))
    tables[ENTRIES].delete(b"b")
    assert tables.overlay_rows == 2
    frozen = tables.freeze(1)
    assert frozen is not None
    assert (frozen.rows, tables.overlay_rows) == (2, 0)
    tables.commit(frozen, durable=1)
    tables.release(frozen)
    frozen.clear()
    assert frozen.rows == 0
    assert tables[DUE].get(b"a") == (2,)


def test_a_commit_never_leads_the_log(tables: LmdbTables) -> None:
    tables[DUE].put(b"a", (1,))
    frozen = tables.freeze(100)
    assert frozen is not None
    with pytest.raises(StoreError, match="durable up to 99"):
        tables.commit(frozen, durable=99)
    assert tables.position == 0
    tables.commit(frozen, durable=100)
    assert tables.position == 100


def test_the_frozen_layer_is_kept_until_it_is_on_disk(tables: LmdbTables) -> None:
    tables[DUE].put(b"a", (1,))
    frozen = tables.freeze(1)
    assert frozen is not None
    with pytest.raises(StoreError, match="not the commit"):
        tables.release(frozen)
    assert tables[DUE].get(b"a") == (1,)
    tables.commit(frozen, durable=1)
    tables.release(frozen)
    with pytest.raises(StoreError, match="not the commit"):
        tables.release(frozen)


def test_positions_do_not_go_back(tables: LmdbTables) -> None:
    settle(tables, 50)
    with pytest.raises(StoreError, match="cannot go back to 49"):
        tables.freeze(49)


def test_a_commit_without_space_changes_nothing(path: Path) -> None:
    one_row(path)
    tables = LmdbTables.open(path, log_id=LOG, map_size=512 << 10)
    for number in range(1000):
        tables[DUE].put(b"%d" % number, (bytes(1000),))
    frozen = tables.freeze(20)
    assert frozen is not None
    with pytest.raises(DiskFull):
        tables.commit(frozen, durable=20)
    assert (tables.position, frozen.committed) == (10, False)
    assert tables[DUE].get(b"999") == (bytes(1000),)
    tables.close()
    assert reopened(path) == (10, "", ONE_ROW)


def test_a_reader_sees_the_same_rows_all_through_a_commit(
    tables: LmdbTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [number.to_bytes(4, "big") for number in range(2000)]
    for key in numbers:
        tables[ENTRIES].put(key, (1,))
    settle(tables, 1)
    for key in numbers[::2]:
        tables[ENTRIES].delete(key)
    for key in numbers[1::2]:
        tables[ENTRIES].put(key, (2,))
    frozen = tables.freeze(2)
    assert frozen is not None
    tables[ENTRIES].put(numbers[0], (3,))
    expected = [(numbers[0], (3,)), *((key, (2,)) for key in numbers[1::2])]
    writing, read = threading.Semaphore(0), threading.Semaphore(0)

    def between_slices(seconds: float) -> None:
        writing.release()
        assert read.acquire(timeout=PATIENCE_S)

    monkeypatch.setattr(lmdb_tables, "sleep", between_slices)
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(tables.commit, frozen, durable=2)
        for _ in range(0, len(numbers), lmdb_tables.WRITTEN_AT_ONCE):
            assert writing.acquire(timeout=PATIENCE_S)
            assert list(tables[ENTRIES].range(b"")) == expected
            assert tables[ENTRIES].get(numbers[2]) is None
            read.release()
        commit.result(timeout=PATIENCE_S)
    assert list(tables[ENTRIES].range(b"")) == expected
    tables.release(frozen)
    assert list(tables[ENTRIES].range(b"", reverse=True)) == expected[::-1]


def test_a_dump_stands_for_one_position_despite_commits(tables: LmdbTables) -> None:
    tables[DUE].put(b"a", (1,))
    tables[META].put(b"own", ("row",))
    settle(tables, 1)
    with ThreadPoolExecutor(1) as pool, tables.dump() as (position, dumped):
        first = next(dumped)
        tables[DUE].put(b"b", (2,))
        frozen = tables.freeze(2)
        assert frozen is not None
        pool.submit(tables.commit, frozen, durable=2).result(timeout=PATIENCE_S)
        tables.release(frozen)
        assert position == 1
        assert [first, *dumped] == [(DUE, b"a", b"\x91\x01"), (META, b"own", b"\x91\xa3row")]
    assert tables.position == 2


def test_a_dump_can_be_loaded(
    tables: LmdbTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_tables, "LOADED_AT_ONCE", 100)
    for name in (*USED, META):
        for number in range(150):
            tables[name].put(b"row %d" % number, (name, number))
    settle(tables, 7)
    other = LmdbTables.open(tmp_path / "other", log_id=LOG)
    other[DUE].put(b"older", (1,))
    settle(other, 3)
    with tables.dump() as (position, dumped):
        other.load(position, dumped)
    assert (other.position, contents(other)) == (7, contents(tables))
    assert other[META].get(b"row 5") == (META, 5)
    other.close()
    assert reopened(tmp_path / "other") == (7, "", contents(tables))


def test_a_snapshot_is_loaded_before_anything_is_put(tables: LmdbTables) -> None:
    tables[DUE].put(b"a", (1,))
    with pytest.raises(StoreError, match="before the first put"):
        tables.load(5, [])
    assert tables[DUE].get(b"a") == (1,)
