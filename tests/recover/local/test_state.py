"""The store against a model: order of keys, counts, what is due, what is untold."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path
from random import Random

import pytest

from tests.recover.local.harness import History, Life
from tests.recover.local.model import check_figures, check_hand_out, contents, stored_contents
from tests.recover.local.stores import open_store


@pytest.mark.parametrize("seed", range(6))
def test_the_state_is_that_of_the_model_after_each_step(seed: int, tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    life = Life(store, History(), seed)
    rng = Random(seed)
    for _ in range(120):
        rng.choice([life.put, life.put, life.record, life.tell, life.forget])()
        assert stored_contents(store) == contents(life.model)
        check_figures(store, life.model)
    check_hand_out(store, life.model)
    store.close()


def count_rows(connection: sqlite3.Connection, table: str) -> int:
    [count] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(count)


def test_an_empty_store_has_no_rows(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    life = Life(store, History(), 3)
    for _ in range(40):
        life.put()
    store.forget([entry.place for entry in store.entries(None, 1_000)])
    for table in ("message", "content"):
        assert store._database.read(partial(count_rows, table=table)) == 0
    assert store.stats()[:4] == (0, 0, 0, 0)
    store.close()
