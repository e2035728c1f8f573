"""Comparison after random work, row by row: the index, the fold of the whole log, and
the newest snapshot with the rest of the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from tests.broker.data_directory.index_world import Indexed, Rows, new_disk, settings_of, stored
from tests.broker.data_directory.random_everything import Everything
from tests.broker.data_directory.retention_world import ARCHIVE
from tests.broker.support import BEGAN
from tests.store.simfs import SimFS
from txmq.broker.data_directory import storage
from txmq.broker.data_directory.offline import rebuild
from txmq.broker.data_directory.storage import open_directory
from txmq.broker.data_directory.verify import LogFiles
from txmq.core import machine
from txmq.core.events.base import KINDS, Event, RecordContext
from txmq.core.state.state import State
from txmq.core.topics import key_order
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions import large_bundles
from txmq.store.index import lmdb_tables
from txmq.store.index.digest import TableDigest
from txmq.store.index.lmdb_tables import FrozenOverlays, LmdbTables
from txmq.store.log.segment import read_log_id
from txmq.store.tables import NAMES, Row

SEEDS, LIVES, STEPS = 4, 3, 110
PART = 40  # rows


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make bundles of a few keys large, so that they wait for each other piece by
    piece.
    """
    monkeypatch.setattr(large_bundles, "KEYS_PER_PIECE", 4)
    monkeypatch.setattr(key_order, "MAX_KEYS_PER_RELEASE", 6)


def worked(data: Path, seed: int, lives: int = LIVES) -> SimFS:
    """Run lives of a broker with checkpoints in the midst of its work; some end in good
    order.
    """
    disk, rng, now = new_disk(data), Random(seed), BEGAN
    work: Everything | None = None
    for life in range(lives):
        world = Indexed(disk, data, now=now)
        if work is None:
            for name in "tu":
                world.do(CreateTopic(name, 3))
            work = Everything(world, seed)
        else:
            work.go_on_with(world)
        work.some(STEPS)
        now = world.now()
        if life == lives - 1:
            world.tend()
        if life == lives - 1 or rng.random() < 0.5:
            world.close()
        else:
            world.die()
    return disk


def moved_to(disk: SimFS, data: Path, other: Path, *, folders: tuple[str, ...]) -> SimFS:
    """Return the files of these folders as another data directory's, on a disk of its
    own.
    """
    fs = new_disk(other)
    for folder in folders:
        base, _, name = folder.rpartition("/")
        fs.makedirs(f"{other}/{name}")
        for file in disk.listdir(f"{base or data}/{name}"):
            with closing(disk.open(f"{base or data}/{name}/{file}")) as source:
                content = source.pread(source.size(), 0)
            with closing(fs.create(f"{other}/{name}/{file}")) as copy:
                copy.pwrite([content], 0)
    return fs.copy()


def differences(ours: Rows, theirs: Rows) -> list[tuple[str, str]]:
    """Return tables and keys of rows that differ, or that only one of the two has."""
    return sorted({(name, key.hex()) for name, key, _row in set(ours) ^ set(theirs)})


def compare(disk: SimFS, data: Path, elsewhere: Path) -> int:
    """Compare the index with a fold of the whole log, archive included, and of the
    newest snapshot and the later records, written in parts. Return its rows.
    """
    log_id = read_log_id(disk, str(data))
    assert log_id is not None
    position, rows = stored(data, log_id)
    for name, folders in {"all": (f"{ARCHIVE}/log", "log"), "rest": ("log", "snapshot")}.items():
        other = elsewhere / name
        fs = moved_to(disk, data, other, folders=folders)
        with patch.multiple(storage, CROWDED_ROWS=PART, RECORDS_BETWEEN_LOOKS=1):
            made = rebuild(fs, settings_of(other), BEGAN)
        assert (made.snapshot > 0) is (name == "rest")
        again, found = stored(other, log_id)
        assert (again, made.position) == (position, position)
        assert differences(rows, found) == []
        assert rows == found
    return len(rows)


def met(disk: SimFS, data: Path, elsewhere: Path) -> Counter[str]:
    """Count the events of the whole log, and the rows of the index by table."""
    files = LogFiles(
        moved_to(disk, data, elsewhere, folders=(f"{ARCHIVE}/log", "log")), str(elsewhere)
    )
    names = {number: kind.__name__ for kind, number in KINDS.items()}
    log_id = read_log_id(disk, str(data))
    assert log_id is not None
    return Counter(names[r.kind] for r in files.scan(0)) + Counter(
        name for name, _k, _v in stored(data, log_id)[1]
    )


def test_a_start_without_an_index_has_few_rows_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = worked(tmp_path / "whole", 1, lives=1)
    sizes: list[int] = []
    fs = moved_to(disk, tmp_path / "whole", tmp_path / "log", folders=("log",))
    release = LmdbTables.release

    def noted(self: LmdbTables, frozen: FrozenOverlays) -> None:
        sizes.append(frozen.rows)
        release(self, frozen)

    monkeypatch.setattr(LmdbTables, "release", noted)
    monkeypatch.setattr(storage, "CROWDED_ROWS", PART)
    monkeypatch.setattr(storage, "RECORDS_BETWEEN_LOOKS", 1)
    opened = open_directory(fs, settings_of(tmp_path / "log"), BEGAN)
    assert (opened.indexed, opened.replayed > STEPS) == (0, True)
    assert opened.tables.position > 0
    assert opened.tables.overlay_rows < PART
    assert len(sizes) > 5
    assert max(sizes) < 3 * PART, "a record changes some rows"
    opened.tables.close()
    opened.log.close()


def test_the_index_is_what_a_rebuild_makes_after_any_work(tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in range(SEEDS):
        data = tmp_path / f"{seed}"
        disk = worked(data, seed)
        assert compare(disk, data, tmp_path / f"{seed} again") > 200, seed
        seen += met(disk, data, tmp_path / f"{seed} whole")
    events, tables = {kind.__name__ for kind in KINDS} & set(seen), set(NAMES) & set(seen)
    assert len(events) > 40, sorted(events)
    assert len(tables) > 24, sorted(tables)


def topics_are_saved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug: later changes of a topic reach the log, and not the index."""
    save, saved = machine.save, dict[int, set[int]]()

    def forgetful(state: State) -> None:
        before = saved.setdefault(id(state), set())
        state.dirty_topics -= before
        before |= state.dirty_topics
        save(state)

    monkeypatch.setattr(machine, "save", forgetful)


def deleted_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    write = lmdb_tables._write

    def careless(
        txn: Any, database: Any, rows: dict[bytes, Row | None], digest: TableDigest | None
    ) -> TableDigest | None:
        kept: dict[bytes, Row | None] = {key: row for key, row in rows.items() if row is not None}
        return write(txn, database, kept, digest)

    monkeypatch.setattr(lmdb_tables, "_write", careless)


def replay_takes_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug: `apply` reads a clock, which differs when the log is read again."""
    roll = storage._apply

    def later(state: State, event: Event, place: RecordContext) -> None:
        roll(state, event, place._replace(stored_at=place.stored_at + 1))

    monkeypatch.setattr(storage, "_apply", later)


@pytest.mark.parametrize(
    "plant", [topics_are_saved_once, deleted_rows_stay, replay_takes_other_times]
)
def test_the_comparison_finds_a_planted_bug(
    tmp_path: Path, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare(worked(tmp_path / "data", 0, lives=1), tmp_path / "data", tmp_path)
