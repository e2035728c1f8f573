"""The state tables in LMDB, held against the tables in memory, and what opening makes of a damaged cache."""

from __future__ import annotations

import mmap
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from uuid import UUID

import lmdb
import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from txmq.broker.core.tables import DUE, ENTRIES, META, NAMES, PRODUCERS, Entry, MemoryTables, Row, Tables
from txmq.errors import DiskFull, StoreError, UnsupportedFormat
from txmq.store import environment, index
from txmq.store.index import DumpRow, Frozen, LmdbTables

LOG = UUID("0190b5a0-0000-7000-8000-000000000001")
OTHER_LOG = UUID("0190b5a0-0000-7000-8000-000000000002")
USED = (ENTRIES, DUE, PRODUCERS)

Contents = dict[str, list[tuple[bytes, Row]]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def tables(path: Path) -> Iterator[LmdbTables]:
    tables = LmdbTables.open(path, log_id=LOG)
    yield tables
    tables.close()


def contents(tables: Tables) -> Contents:
    return {name: list(tables[name].range(b"")) for name in USED}


def settle(tables: LmdbTables, position: int) -> None:
    """Bring everything put so far to disk."""
    frozen = tables.freeze(position)
    assert frozen is not None
    tables.commit(frozen, durable=position)
    tables.release(frozen)


def fill(path: Path, position: int = 10) -> None:
    """A cache of log LOG with one row."""
    tables = LmdbTables.open(path, log_id=LOG)
    tables[DUE].put(b"a", (1,))
    settle(tables, position)
    tables.close()


def reopened(path: Path, *, log_id: UUID = LOG, log_end: int | None = None) -> tuple[int, str, Contents]:
    tables = LmdbTables.open(path, log_id=log_id, log_end=log_end)
    try:
        assert tables.rebuilt == bool(tables.reason)
        return tables.position, tables.reason, contents(tables)
    finally:
        tables.close()


EMPTY: Contents = {name: [] for name in USED}
ONE_ROW: Contents = EMPTY | {DUE: [(b"a", (1,))]}

keys = st.text("\x00\x01a", min_size=1, max_size=2).map(str.encode) | st.binary(min_size=1, max_size=511)
bounds = keys | st.just(b"")
values = st.recursive(
    st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
rows = st.lists(values, max_size=4).map(tuple)


class Beside(RuleBasedStateMachine):
    """LmdbTables and MemoryTables are given the same and must answer the same, also after a fall back to a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name)
        self.tables = LmdbTables.open(self.path, log_id=LOG)
        self.model = MemoryTables()
        self.frozen: Frozen | None = None
        self.position = 0
        self.history: dict[int, Contents] = {0: EMPTY}

    @rule(name=st.sampled_from(USED), key=keys, row=rows)
    def put(self, name: str, key: bytes, row: Row) -> None:
        self.tables[name].put(key, row)
        self.model[name].put(key, row)

    @rule(name=st.sampled_from(USED), key=keys)
    def delete(self, name: str, key: bytes) -> None:
        self.tables[name].delete(key)
        self.model[name].delete(key)

    @rule(name=st.sampled_from(USED), data=st.data())
    def delete_a_row_that_is_there(self, name: str, data: st.DataObject) -> None:
        if there := [key for key, _ in self.model[name].range(b"")]:
            self.delete(name, data.draw(st.sampled_from(there)))

    @rule(name=st.sampled_from(USED), key=keys)
    def get(self, name: str, key: bytes) -> None:
        assert self.tables[name].get(key) == self.model[name].get(key)

    @rule(name=st.sampled_from(USED), start=bounds, stop=st.none() | bounds, reverse=st.booleans())
    def range(self, name: str, start: bytes, stop: bytes | None, *, reverse: bool) -> None:
        found = list(self.tables[name].range(start, stop, reverse=reverse))
        assert found == list(self.model[name].range(start, stop, reverse=reverse))

    @precondition(lambda self: self.frozen is None)
    @rule()
    def settle(self) -> None:
        self.freeze()
        self.commit()
        self.release()

    @rule()
    def freeze(self) -> None:
        frozen = self.tables.freeze(self.position + 1)
        if self.frozen is None:
            assert frozen is not None
            self.frozen = frozen
            self.position += 1
            self.history[self.position] = contents(self.model)
        else:
            assert frozen is None

    @precondition(lambda self: self.frozen is not None and not self.frozen.committed)
    @rule()
    def commit(self) -> None:
        assert self.frozen is not None
        self.tables.commit(self.frozen, durable=self.position)
        assert self.tables.position == self.position

    @precondition(lambda self: self.frozen is not None and self.frozen.committed)
    @rule()
    def release(self) -> None:
        assert self.frozen is not None
        self.tables.release(self.frozen)
        self.frozen.clear()
        self.frozen = None

    @rule()
    def reopen(self) -> None:
        self.tables.close()
        self.tables = LmdbTables.open(self.path, log_id=LOG)
        assert not self.tables.rebuilt
        self.frozen, self.position = None, self.tables.position
        self.model = MemoryTables()
        for name, there in self.history[self.position].items():
            for key, row in there:
                self.model[name].put(key, row)

    @invariant()
    def same_contents(self) -> None:
        assert contents(self.tables) == contents(self.model)

    def teardown(self) -> None:
        self.tables.close()
        self.directory.cleanup()


TestBeside = Beside.TestCase
TestBeside.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def assert_same_ranges(tables: LmdbTables, model: MemoryTables, order: random.Random) -> None:
    assert contents(tables) == contents(model)
    for _ in range(300):
        first = order.randrange(60_000)
        start, stop = (number.to_bytes(2, "big") for number in (first, first + order.randrange(40)))
        bound, reverse = order.choice([stop, None]), order.random() < 0.5
        found = list(islice(tables[ENTRIES].range(start, bound, reverse=reverse), 20))
        assert found == list(islice(model[ENTRIES].range(start, bound, reverse=reverse), 20))


def test_thousands_of_rows_are_in_order_in_every_mixture_of_layers(tables: LmdbTables) -> None:
    order = random.Random(7)
    model = MemoryTables()

    def change(count: int, period: int) -> None:
        for number in range(count):
            key = order.randbytes(2)
            for side in (tables, model):
                if number % 5:
                    side[ENTRIES].put(key, (period, number))
                else:
                    side[ENTRIES].delete(key)
        assert_same_ranges(tables, model, order)

    for period in (1, 2):
        change(6000, period)
        frozen = tables.freeze(period)
        assert frozen is not None
        change(3000, period)
        tables.commit(frozen, durable=period)
        assert_same_ranges(tables, model, order)
        tables.release(frozen)
        assert_same_ranges(tables, model, order)
    settle(tables, 3)
    assert_same_ranges(tables, model, order)


def test_a_row_read_from_disk_equals_the_named_tuple_that_was_put(tables: LmdbTables) -> None:
    entry = Entry(position=64, length=200, count=3, stored_at=1_700_000_000_000_000, tag_filter=2**63, visible_at=64)
    tables[ENTRIES].put(b"key", entry)
    settle(tables, 1)
    found = tables[ENTRIES].get(b"key")
    assert found is not None
    assert Entry._make(found) == entry


def test_on_disk_rows_are_message_pack_arrays_and_meta_says_what_they_stand_for(path: Path) -> None:
    fill(path, position=300)
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


def test_a_commit_that_finds_no_space_leaves_everything_as_it_was(path: Path) -> None:
    fill(path)
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


def test_a_reader_sees_the_same_rows_all_through_a_commit(tables: LmdbTables, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert read.acquire(timeout=30)

    monkeypatch.setattr(index, "sleep", between_slices)
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(tables.commit, frozen, durable=2)
        for _ in range(0, len(numbers), index.WRITTEN_AT_ONCE):
            assert writing.acquire(timeout=30)
            assert list(tables[ENTRIES].range(b"")) == expected
            assert tables[ENTRIES].get(numbers[2]) is None
            read.release()
        commit.result(timeout=30)
    assert list(tables[ENTRIES].range(b"")) == expected
    tables.release(frozen)
    assert list(tables[ENTRIES].range(b"", reverse=True)) == expected[::-1]


def test_a_dump_stands_for_one_position_whatever_is_committed_meanwhile(tables: LmdbTables) -> None:
    tables[DUE].put(b"a", (1,))
    tables[META].put(b"own", ("row",))
    settle(tables, 1)
    with ThreadPoolExecutor(1) as pool, tables.dump() as (position, dumped):
        first = next(dumped)
        tables[DUE].put(b"b", (2,))
        frozen = tables.freeze(2)
        assert frozen is not None
        pool.submit(tables.commit, frozen, durable=2).result(timeout=30)
        tables.release(frozen)
        assert position == 1
        assert [first, *dumped] == [(DUE, b"a", b"\x91\x01"), (META, b"own", b"\x91\xa3row")]
    assert tables.position == 2


def test_what_was_dumped_can_be_loaded(tables: LmdbTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "LOADED_AT_ONCE", 100)
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
    with pytest.raises(StoreError, match="before anything is put"):
        tables.load(5, [])
    assert tables[DUE].get(b"a") == (1,)


@pytest.mark.parametrize(
    ("dumped", "error"),
    [
        ([(DUE, b"b", b"\x90"), (DUE, b"a", b"\x90")], "out of order"),
        ([(DUE, b"a", b"\x90"), (DUE, b"a", b"\x90")], "out of order"),
        ([(DUE, b"a", b"\x90"), ("nonsense", b"a", b"\x90")], "unknown table 'nonsense'"),
    ],
)
def test_a_load_that_fails_leaves_a_cache_that_is_discarded(path: Path, dumped: list[DumpRow], error: str) -> None:
    fill(path)
    tables = LmdbTables.open(path, log_id=LOG)
    with pytest.raises(StoreError, match=error):
        tables.load(20, dumped)
    tables.close()
    assert reopened(path) == (0, "it was never finished", EMPTY)


CHILD = """
import os, signal
from pathlib import Path
from uuid import UUID
from txmq.store import index

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def dying():
    yield "due", b"a", b"\\x90"
    yield "due", b"b", b"\\x90"
    die()

tables = index.LmdbTables.open(Path({path!r}), log_id=UUID({log!r}))
tables["due"].put(b"b", (2,))
tables["due"].delete(b"a")
{end}
"""
DEATHS = {
    "before the freeze": "die()",
    "between freeze and commit": "tables.freeze(20); die()",
    "within the commit": "index.sleep = die; tables.commit(tables.freeze(20), durable=20)",
    "before the release": "tables.commit(tables.freeze(20), durable=20); die()",
    "within a load": (
        "tables.close(); tables = index.LmdbTables.open(Path({path!r}), log_id=UUID({log!r}))\n"
        "index.LOADED_AT_ONCE = 1; tables.load(20, dying())"
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
def test_a_killed_process_leaves_the_last_commit(path: Path, death: str, left: tuple[int, str, Contents]) -> None:
    fill(path)
    names = {"path": str(path), "log": str(LOG)}
    script = CHILD.format(**names, end=DEATHS[death].format(**names))
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (-signal.SIGKILL, b"")
    assert reopened(path) == left


def test_the_cache_of_another_log_is_discarded(path: Path) -> None:
    fill(path)
    assert reopened(path, log_id=OTHER_LOG) == (0, "it stands for another log", EMPTY)
    assert reopened(path, log_id=OTHER_LOG) == (0, "", EMPTY)


def test_a_cache_from_the_future_is_discarded(path: Path) -> None:
    fill(path)
    assert reopened(path, log_end=10) == (10, "", ONE_ROW)
    assert reopened(path, log_end=9) == (0, "it stands for position 10, and the log ends at 9", EMPTY)


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
def test_a_damaged_file_is_discarded(path: Path, damage: Callable[[bytes], bytes], reason: str) -> None:
    fill(path)
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
    fill(path)
    raw_put(path, b"meta", key, b"")
    position, reason, rest = reopened(path)
    assert (position, rest) == (0, EMPTY)
    assert "unreadable" in reason


def test_another_versions_cache_is_refused_and_kept(path: Path) -> None:
    fill(path)
    raw_put(path, b"meta", b"version", msgpack.packb([2]))
    for _ in range(2):
        with pytest.raises(UnsupportedFormat) as caught:
            LmdbTables.open(path, log_id=LOG)
        assert (caught.value.path, caught.value.found, caught.value.known) == (str(path), 2, 1)
    raw_put(path, b"meta", b"version", msgpack.packb([1]))
    assert reopened(path) == (10, "", ONE_ROW)


def test_what_the_system_refuses_is_a_store_error_and_costs_nothing(path: Path) -> None:
    fill(path)
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


def test_a_file_whose_last_pages_lmdb_left_unwritten_is_not_taken_for_a_damaged_one(path: Path) -> None:
    fill(path)
    tables = LmdbTables.open(path, log_id=LOG)
    with environment.writing(tables._env) as txn:
        for number in range(10):
            txn.put(b"%d" % number, bytes(100_000), db=tables._databases[DUE])
        for number in range(10):
            txn.delete(b"%d" % number, db=tables._databases[DUE])
    tables.close()
    assert reopened(path) == (10, "", ONE_ROW)
