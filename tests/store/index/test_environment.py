"""Opening of state tables: after a kill, of another log or version, damaged."""

from __future__ import annotations

import mmap
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgpack
import pytest

from tests.store.index.tables import (
    EMPTY,
    LOG,
    ONE_ROW,
    OTHER_LOG,
    Contents,
    one_row,
    path,
    reopened,
    tables,
)
from txmq.errors import StoreError, UnsupportedFormat
from txmq.store.index import environment
from txmq.store.index.lmdb_tables import DumpRow, LmdbTables
from txmq.store.tables import DUE, NAMES

__all__ = ["path", "tables"]


def test_on_disk_rows_are_message_pack_arrays_and_meta_says_what_they_stand_for(path: Path) -> None:
    one_row(path, position=300)
    with lmdb.open(str(path), max_dbs=len(NAMES), readonly=True) as env:
        assert {name.decode() for name in env.dbs()} == set(NAMES)
        due, meta = env.open_db(b"due"), env.open_db(b"meta")
        with env.begin() as txn:
            assert list(txn.cursor(due)) == [(b"a", b"\x91\x01")]
            assert dict(txn.cursor(meta)) == {
                b"log_id": b"\x91\xc4\x10" + LOG.bytes,
                b"position": b"\x91\xcd\x01\x2c",
                b"version": b"\x91\x01",
            }


@pytest.mark.parametrize(
    ("dumped", "error"),
    [
        ([(DUE, b"b", b"\x90"), (DUE, b"a", b"\x90")], "out of order"),
        ([(DUE, b"a", b"\x90"), (DUE, b"a", b"\x90")], "out of order"),
        ([(DUE, b"a", b"\x90"), ("nonsense", b"a", b"\x90")], "unknown table 'nonsense'"),
    ],
)
def test_a_load_that_fails_leaves_a_cache_that_is_discarded(
    path: Path, dumped: list[DumpRow], error: str
) -> None:
    one_row(path)
    tables = LmdbTables.open(path, log_id=LOG)
    with pytest.raises(StoreError, match=error):
        tables.load(20, dumped)
    tables.close()
    assert reopened(path) == (0, "it was never finished", EMPTY)


CHILD = """
import os, signal
from pathlib import Path
from uuid import UUID
from txmq.store.index import lmdb_tables

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def dying():
    yield "due", b"a", b"\\x90"
    yield "due", b"b", b"\\x90"
    die()

tables = lmdb_tables.LmdbTables.open(Path({path!r}), log_id=UUID({log!r}))
tables["due"].put(b"b", (2,))
tables["due"].delete(b"a")
{end}
"""
DEATHS = {
    "before the freeze": "die()",
    "between freeze and commit": "tables.freeze(20); die()",
    "within the commit": "lmdb_tables.sleep = die; tables.commit(tables.freeze(20), durable=20)",
    "before the release": "tables.commit(tables.freeze(20), durable=20); die()",
    "within a load": (
        "tables.close(); "
        "tables = lmdb_tables.LmdbTables.open(Path({path!r}), log_id=UUID({log!r}))\n"
        "lmdb_tables.LOADED_AT_ONCE = 1; tables.load(20, dying())"
    ),
}


@pytest.mark.parametrize(
    ("death", "left"),
    [
        ("before the freeze", (10, "", ONE_ROW)),
        ("between freeze and commit", (10, "", ONE_ROW)),
        ("within the commit", (10, "", ONE_ROW)),
        ("before the release", (20, "", EMPTY | {DUE: [(b"b", (2,))]})),
        ("within a load", (0, "it was never finished", EMPTY)),
    ],
)
def test_a_killed_process_leaves_the_last_commit(
    path: Path, death: str, left: tuple[int, str, Contents]
) -> None:
    one_row(path)
    names = {"path": str(path), "log": str(LOG)}
    script = CHILD.format(**names, end=DEATHS[death].format(**names))
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, check=False
    )
    assert (child.returncode, child.stderr) == (-signal.SIGKILL, b"")
    assert reopened(path) == left


def test_the_cache_of_another_log_is_discarded(path: Path) -> None:
    one_row(path)
    assert reopened(path, log_id=OTHER_LOG) == (0, "it stands for another log", EMPTY)
    assert reopened(path, log_id=OTHER_LOG) == (0, "", EMPTY)


def test_a_cache_from_the_future_is_discarded(path: Path) -> None:
    one_row(path)
    assert reopened(path, log_end=10) == (10, "", ONE_ROW)
    assert reopened(path, log_end=9) == (
        0,
        "it stands for position 10, and the log ends at 9",
        EMPTY,
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _: b"", "it was never finished"),
        (lambda data: bytes(len(data)), "unreadable"),
        (lambda data: random.Random(1).randbytes(len(data)), "unreadable"),
        (lambda data: data[:3 * mmap.PAGESIZE], "cut short"),
        (lambda data: data[:100], "unreadable"),
    ],
    ids=["empty", "zeros", "garbage", "cut", "cut in the header"],
)  # fmt: skip
def test_a_damaged_file_is_discarded(
    path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    one_row(path)
    data = path / environment.DATA
    data.write_bytes(damage(data.read_bytes()))
    position, found, rest = reopened(path)
    assert (position, rest) == (0, EMPTY)
    assert reason in found
    assert reopened(path) == (0, "", EMPTY)


def raw_put(path: Path, table: bytes, key: bytes, value: bytes) -> None:
    with lmdb.open(str(path), max_dbs=len(NAMES)) as env, env.begin(write=True) as txn:
        txn.put(key, value, db=env.open_db(table, txn=txn))


@pytest.mark.parametrize("key", [b"version", b"log_id", b"position"])
def test_a_meta_row_that_is_no_row_makes_the_cache_unreadable(path: Path, key: bytes) -> None:
    one_row(path)
    raw_put(path, b"meta", key, b"")
    position, reason, rest = reopened(path)
    assert (position, rest) == (0, EMPTY)
    assert "unreadable" in reason


def test_another_versions_cache_is_refused_and_kept(path: Path) -> None:
    one_row(path)
    raw_put(path, b"meta", b"version", msgpack.packb([2]))
    for _ in range(2):
        with pytest.raises(UnsupportedFormat) as caught:
            LmdbTables.open(path, log_id=LOG)
        assert (caught.value.path, caught.value.found, caught.value.known) == (str(path), 2, 1)
    raw_put(path, b"meta", b"version", msgpack.packb([1]))
    assert reopened(path) == (10, "", ONE_ROW)


def test_a_failure_of_the_system_is_a_store_error_and_loses_nothing(path: Path) -> None:
    one_row(path)
    with pytest.raises(StoreError, match="lower the map size"):
        LmdbTables.open(path, log_id=LOG, map_size=1 << 60)
    tables = LmdbTables.open(path, log_id=LOG)
    with pytest.raises(StoreError, match="already open"):
        LmdbTables.open(path, log_id=LOG)
    tables.close()
    (path.parent / "file").touch()
    with pytest.raises(StoreError, match=r"Not a directory|File exists"):
        LmdbTables.open(path.parent / "file", log_id=LOG)
    assert reopened(path) == (10, "", ONE_ROW)


def test_a_file_with_unwritten_last_pages_is_not_discarded(
    path: Path,
) -> None:
    one_row(path)
    tables = LmdbTables.open(path, log_id=LOG)
    with environment.write_transaction(tables._env) as txn:
        for number in range(10):
            txn.put(b"%d" % number, bytes(100_000), db=tables._databases[DUE])
        for number in range(10):
            txn.delete(b"%d" % number, db=tables._databases[DUE])
    tables.close()
    assert reopened(path) == (10, "", ONE_ROW)
