"""The tables of version 1: read for ever (docs/FORMATS.md 9 and 10)."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.recover.local.stores import open_store
from txmq.recover.local.batches import SPOOL
from txmq.recover.local.database import Form, checksum, create
from txmq.recover.local.rows import STORE

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize(
    ("form", "golden"), [(STORE, "consumer-store-v1.sql"), (SPOOL, "spool-v1.sql")]
)
def test_the_tables_have_not_changed(form: Form, golden: str, tmp_path: Path) -> None:
    create(str(tmp_path), form, {})
    with closing(sqlite3.connect(tmp_path / form.file)) as database:
        tables = database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        [version] = database.execute("PRAGMA user_version").fetchone()
    assert "".join(f"{sql};\n" for (sql,) in tables) == (GOLDEN / golden).read_text("utf-8")
    assert version == form.version == 1


def test_a_checksum_has_not_changed() -> None:
    assert checksum("orders", 3, None, b"\xff") == 3_096_732_110
    assert checksum("key", 1, '["a"]') == 947_557_149


def test_the_file_is_opened_by_any_tool(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.close()
    with closing(sqlite3.connect(Path(store.path, "store.db"))) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
