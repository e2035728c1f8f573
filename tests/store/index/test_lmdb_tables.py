"""State tables in LMDB, compared with the tables in memory."""

from __future__ import annotations

import random
import tempfile
from itertools import islice
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.store.index.tables import EMPTY, LOG, USED, Contents, contents, path, settle, tables
from txmq.store.index.lmdb_tables import FrozenOverlays, LmdbTables
from txmq.store.tables import ENTRIES, BatchEntry, MemoryTables, Row

__all__ = ["path", "tables"]


keys = st.text("\x00\x01a", min_size=1, max_size=2).map(str.encode) | st.binary(
    min_size=1, max_size=511
)
bounds = keys | st.just(b"")
values = st.recursive(
    st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.none()
    | st.booleans(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
rows = st.lists(values, max_size=4).map(tuple)


class ComparedTables(RuleBasedStateMachine):
    """LmdbTables and MemoryTables get the same calls and must agree.

    This holds also after a fall back to a commit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name)
        self.tables = LmdbTables.open(self.path, log_id=LOG)
        self.model = MemoryTables()
        self.frozen: FrozenOverlays | None = None
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


TestBeside = ComparedTables.TestCase
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
    entry = BatchEntry(
        position=64,
        length=200,
        count=3,
        stored_at=1_700_000_000_000_000,
        tag_filter=2**63,
        visible_at=64,
    )
    tables[ENTRIES].put(b"key", entry)
    settle(tables, 1)
    found = tables[ENTRIES].get(b"key")
    assert found is not None
    assert BatchEntry._make(found) == entry
