"""Databases of older versions get the index of letters when they are opened."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from tests.core.consumers.letters_world import LettersWorld
from txmq.broker.data_directory import storage
from txmq.core import machine, upgrades
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.tables import LETTER_CELLS, LETTER_INDEX, META, NAMES

LOG = UUID(int=7)
INDEXES = (LETTER_INDEX, LETTER_CELLS)
POSITION = 4_096


def older_directory(path: Path) -> dict[str, list[bytes]]:
    """Write tables as an older version left them. Return the keys of the index that a
    new version has.
    """
    world = LettersWorld(5)
    for _ in range(60):
        world.turn()
    world.end_plans()  # that version had no plans
    machine.save(world.state)
    tables = LmdbTables.open(path, log_id=LOG)
    for name in NAMES:
        for key, row in world.state.tables[name].range(b""):
            if name not in INDEXES and (name, key) != (META, upgrades.LETTERS_ROW):
                tables[name].put(key, row)
    commit(tables)
    tables.close()
    return {name: [key for key, _ in world.state.tables[name].range(b"")] for name in INDEXES}


def commit(tables: LmdbTables) -> None:
    frozen = tables.freeze(POSITION)
    assert frozen is not None
    tables.commit(frozen, durable=POSITION)
    tables.release(frozen)


def keys(tables: LmdbTables) -> dict[str, list[bytes]]:
    return {name: [key for key, _row in tables[name].range(b"")] for name in INDEXES}


def test_an_older_index_on_disk_gets_its_letters_in_commits_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = older_directory(tmp_path)
    assert len(wanted[LETTER_INDEX]) > 100
    monkeypatch.setattr(upgrades, "ROWS_PER_STEP", 7)
    tables = LmdbTables.open(tmp_path, log_id=LOG)
    sizes = []
    release = LmdbTables.release

    def noted(self: LmdbTables, frozen: object) -> None:
        sizes.append(frozen.rows)  # type: ignore[attr-defined]
        release(self, frozen)  # type: ignore[arg-type]

    monkeypatch.setattr(LmdbTables, "release", noted)
    storage._upgrade(tables)
    assert keys(tables) == wanted
    assert max(sizes) <= 7 * 6
    assert tables.position == POSITION, "the log is where it was"
    assert machine.load(tables).groups.by_name["g"].letters > 0
    tables.close()


@pytest.mark.parametrize("commits", [1, 3, 8])
def test_an_upgrade_that_is_killed_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    wanted = older_directory(tmp_path)
    monkeypatch.setattr(upgrades, "ROWS_PER_STEP", 7)
    tables = LmdbTables.open(tmp_path, log_id=LOG)
    for number, _step in enumerate(upgrades.upgrade(tables), 1):
        commit(tables)
        if number == commits:
            break
    tables.close()
    tables = LmdbTables.open(tmp_path, log_id=LOG)
    assert not tables.rebuilt
    storage._upgrade(tables)
    assert keys(tables) == wanted
    assert list(upgrades.upgrade(tables)) == []
    tables.close()
