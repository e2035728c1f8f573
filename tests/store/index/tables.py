"""State tables in LMDB for tests: fill, bring to disk, open again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.tables import DUE, ENTRIES, PRODUCERS, Row, Tables

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
    """Bring all rows to disk."""
    frozen = tables.freeze(position)
    assert frozen is not None
    tables.commit(frozen, durable=position)
    tables.release(frozen)


def one_row(path: Path, position: int = 10) -> None:
    """Create tables of log LOG with one row."""
    tables = LmdbTables.open(path, log_id=LOG)
    tables[DUE].put(b"a", (1,))
    settle(tables, position)
    tables.close()


def reopened(
    path: Path, *, log_id: UUID = LOG, log_end: int | None = None
) -> tuple[int, str, Contents]:
    tables = LmdbTables.open(path, log_id=log_id, log_end=log_end)
    try:
        assert tables.rebuilt == bool(tables.reason)
        return tables.position, tables.reason, contents(tables)
    finally:
        tables.close()


EMPTY: Contents = {name: [] for name in USED}
ONE_ROW: Contents = EMPTY | {DUE: [(b"a", (1,))]}
