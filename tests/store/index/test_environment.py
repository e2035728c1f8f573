"""Opening of state tables: after a kill, of another log or version, damaged."""

from __future__ import annotations

import mmap
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import pytest
from xxhash import xxh3_64_intdigest

from tests.store.index.tables import (
    EMPTY,
    LOG,
    ONE_ROW,
    OTHER_LOG,
    Contents,
    contents,
    one_row,
    path,
    reopened,
    settle,
    tables,
)
from txmq.errors import StoreError, UnsupportedFormat
from txmq.store.index import environment
from txmq.store.index.digest import DATA
from txmq.store.index.lmdb_tables import DumpRow, LmdbTables
from txmq.store.tables import ATTEMPTS, DUE, NAMES, IndexDamaged
from txmq.testing.wait import PATIENCE_S

__all__ = ["path", "tables"]


def test_on_disk_rows_are_message_pack_arrays_and_meta_says_what_they_stand_for(path: Path) -> None:
    one_row(path, position=300)
    with lmdb.open(str(path), max_dbs=len(NAMES), readonly=True) as env:
        assert {name.decode() for name in env.dbs()} == set(NAMES)
        due, meta = env.open_db(b"due"), env.open_db(b"meta")
        with env.begin() as txn:
            assert list(txn.cursor(due)) == [(b"a", b"\x91\x01")]
            rows = dict(txn.cursor(meta))
            body, checksum = msgpack.unpackb(rows.pop(b"digest"))
            assert checksum == xxh3_64_intdigest(body)
            position, tables = msgpack.unpackb(body)
            hashed = xxh3_64_intdigest(b"a", xxh3_64_intdigest(b"\x91\x01"))
            assert (position, tables["due"]) == (300, [1, hashed])
            assert [table for name, table in tables.items() if name != "due"] == [
                [0, 0] for _ in range(len(NAMES) - 1)
            ]
            assert rows == {
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
        [sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_S, check=False
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
    data = path / DATA
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
    assert "unreadable" in reason or "damaged" in reason


def filled(path: Path) -> Contents:
    """Make tables with rows of several pages, of several commits; return them."""
    tables = LmdbTables.open(path, log_id=LOG)
    for position in (10, 20, 30):
        for number in range(position, position + 300):
            tables[DUE].put(b"%08d" % number, (number, b"x" * 40))
        for number in range(position, position + 40):
            tables[DUE].delete(b"%08d" % (number * 3))
        settle(tables, position)
    found = contents(tables)
    tables.close()
    return found


def test_no_flipped_bit_changes_what_is_read(path: Path) -> None:
    """Fault 140. Each start finds what was written, or nothing and a reason."""
    expected, data, rng = filled(path), path / DATA, random.Random(1)
    whole, found = data.read_bytes(), set[str]()
    for _ in range(150):
        damaged = bytearray(whole)
        for _flip in range(3):
            damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        data.write_bytes(damaged)
        position, reason, rest = reopened(path)
        assert (position, rest) == ((0, EMPTY) if reason else (30, expected))
        found.add(reason)
    assert len(found - {""}) > 1, "some of the flips were in the rows"


def test_a_row_that_is_lost_or_comes_back_is_damage(path: Path) -> None:
    """A page of an older commit in the place of a newer one is whole by itself."""
    changes: list[Callable[[Any, Any], bool]] = [
        lambda txn, db: txn.delete(b"00000031", db=db),
        lambda txn, db: txn.put(b"99999999", b"\x91\x01", db=db),
        lambda txn, db: txn.put(b"00000031", b"\x91\x01", db=db),
    ]
    for change in changes:
        shutil.rmtree(path, ignore_errors=True)
        filled(path)
        with lmdb.open(str(path), max_dbs=len(NAMES)) as env, env.begin(write=True) as txn:
            assert change(txn, env.open_db(b"due", txn=txn))
        assert reopened(path) == (
            0,
            "table due is damaged: it has other rows than were written",
            EMPTY,
        )


def test_an_index_without_digests_is_made_anew(path: Path) -> None:
    one_row(path)
    with lmdb.open(str(path), max_dbs=len(NAMES)) as env, env.begin(write=True) as txn:
        txn.delete(b"digest", db=env.open_db(b"meta", txn=txn))
    assert reopened(path) == (0, "its digests are missing", EMPTY)


def test_an_index_without_a_table_of_today_is_made_anew(path: Path) -> None:
    """The log may tell more of the new table than the rows of the others."""
    one_row(path)
    with lmdb.open(str(path), max_dbs=len(NAMES)) as env, env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn=txn)
        position, digests = msgpack.unpackb(msgpack.unpackb(txn.get(b"digest", db=meta))[0])
        del digests[ATTEMPTS]
        body = msgpack.packb([position, digests])
        txn.put(b"digest", msgpack.packb([body, xxh3_64_intdigest(body)]), db=meta)
        txn.drop(env.open_db(ATTEMPTS.encode(), txn=txn))
    assert reopened(path) == (0, "it was written without table attempts", EMPTY)


def test_a_snapshot_of_a_damaged_index_is_not_finished(path: Path) -> None:
    filled(path)
    tables = LmdbTables.open(path, log_id=LOG)
    with tables._env.begin(write=True) as txn:  # as if a page changed under the broker
        txn.put(b"00000031", b"\x91\x01", db=tables._databases[DUE])
    with (
        pytest.raises(StoreError, match="table due is damaged") as raised,
        tables.dump() as (_, rows),
    ):
        list(rows)
    assert "restart the broker" in raised.value.hint
    tables.close()


def test_a_read_that_meets_a_damaged_row_says_so(path: Path) -> None:
    """Fault 140: it happens under a broker that runs."""
    filled(path)
    tables = LmdbTables.open(path, log_id=LOG)
    with tables._env.begin(write=True) as txn:
        txn.put(b"00000031", b"\xc1", db=tables._databases[DUE])
    tables._renew()
    tables[DUE].use_transaction(tables._txn)
    with pytest.raises(IndexDamaged, match="restart the broker"):
        tables[DUE].get(b"00000031")
    for reverse in (False, True):
        with pytest.raises(IndexDamaged):
            list(tables[DUE].range(b"00000031", b"00000032", reverse=reverse))
    tables.close()


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
