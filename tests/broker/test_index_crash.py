"""The power goes at every step while the index is made anew: then the broker starts, and has what its log says."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import NamedTuple

import lmdb
import pytest

from tests.broker.index_world import (
    Indexed,
    Mirror,
    Rows,
    each_write_lost,
    folded,
    new_disk,
    rows_of,
    settings_of,
    stored,
    written_back,
)
from tests.broker.random_work import POSTGRES, Everything
from tests.broker.support import BEGAN
from txmq.broker.core.decisions import Decide
from txmq.broker.core.tables import DUE, NAMES
from txmq.broker.core.topics import CreateTopic
from txmq.broker.offline import rebuild
from txmq.broker.storage import open_directory
from txmq.errors import TxmqError
from txmq.message import Decision
from txmq.store import environment, index
from txmq.store.index import DumpRow, Frozen, LmdbTables
from txmq.testing.processes import running
from txmq.testing.simfs import SimFS, crash_points

FOUND = 3  # an exit status
Run = Callable[[SimFS, Path], None]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is loaded in several transactions, and the file is not much longer than it has to be."""
    monkeypatch.setattr(index, "LOADED_AT_ONCE", 80)
    monkeypatch.setattr(environment, "AHEAD", 4_096)


class Twin(NamedTuple):
    """A data directory of a broker that was closed in good order, never touched: its disk, index, and rows. `early` is
    the index as it was before the newest snapshot.
    """

    disk: SimFS
    data: Path
    boot_epoch: int
    rows: Rows
    early: bytes
    folds: dict[int, Rows]  # what a log comes to that ends there: all of them begin alike, and time stands still


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return made_twin(tmp_path_factory.mktemp("twin") / "data")


def made_twin(data: Path) -> Twin:
    disk = new_disk(data)
    world = Indexed(disk, data)
    for name in "tu":
        world.do(CreateTopic(name, 3))
    work = Everything(world, 5)
    work.some(25)
    undecided = work.store(POSTGRES)
    world.tend()
    early, snapshots = (data / "index" / environment.DATA).read_bytes(), disk.listdir(f"{data}/snapshot")
    world.do(Decide(undecided, Decision.ROLLBACK, "test"))  # what goes of the early index must not come back
    while len(found := disk.listdir(f"{data}/snapshot")) < 2 or found == snapshots:
        work.some(6)
    work.some(5)
    world.tend()
    rows, boot_epoch = rows_of(world.state), world.state.boot_epoch
    world.close()
    keep(disk, data, (data / "index" / environment.DATA).read_bytes())
    return Twin(disk.copy(), data, boot_epoch, rows, early, {})


def keep(disk: SimFS, data: Path, content: bytes) -> None:
    """Put this index onto the simulated disk."""
    folder = f"{data}/index"
    disk.makedirs(folder)
    if environment.DATA in disk.listdir(folder):
        disk.remove(f"{folder}/{environment.DATA}")
    with closing(disk.create(f"{folder}/{environment.DATA}")) as file:
        file.pwrite([content], 0)


def whole(disk: SimFS, twin: Twin) -> None:
    """As it was left."""


def no_snapshot(disk: SimFS, twin: Twin) -> None:
    for name in disk.listdir(f"{twin.data}/snapshot"):
        disk.remove(f"{twin.data}/snapshot/{name}")


def no_index(disk: SimFS, twin: Twin) -> None:
    disk.remove(f"{twin.data}/index/{environment.DATA}")


def neither(disk: SimFS, twin: Twin) -> None:
    no_index(disk, twin)
    no_snapshot(disk, twin)


def early_index(disk: SimFS, twin: Twin) -> None:
    keep(disk, twin.data, twin.early)


def cut_index(disk: SimFS, twin: Twin) -> None:
    keep(disk, twin.data, twin.early[: len(twin.early) // 2])
    no_snapshot(disk, twin)


def by_command(disk: SimFS, data: Path) -> None:
    """`txmq log rebuild`."""
    rebuild(disk, settings_of(data), BEGAN)


def by_broker(disk: SimFS, data: Path) -> None:
    """A start, the first work of the keeper, and an end in good order."""
    world = Indexed(disk, data)
    world.tend()
    world.close()


REBUILDS: dict[str, tuple[Callable[[SimFS, Twin], None], Run]] = {
    "by the command, from a snapshot": (whole, by_command),
    "by the command, from the log alone": (no_snapshot, by_command),
    "by a broker that finds no index": (no_index, by_broker),
    "by a broker that finds nothing but the log": (neither, by_broker),
    "by a broker whose index is older than its snapshot": (early_index, by_broker),
    "by a broker whose index was cut": (cut_index, by_broker),
}


def survive(twin: Twin, name: str) -> Counter[str]:
    """Cut the power at every change; what is left must be opened, come to what the log alone does, and go on."""
    prepare, run = REBUILDS[name]
    base, counts = twin.disk.copy(), Counter[str]()
    prepare(base, twin)

    def watched(disk: SimFS, _told: list[None]) -> None:
        written_back(disk, twin.data)
        with Mirror(disk, twin.data).watching():
            run(disk, twin.data)

    for disk, _told in crash_points(base.copy(), watched, list[None]):
        counts["cuts"] += 1
        counts["cuts of the index"] += "/index" in disk.trace[-1]
        images = [disk.crash(Random(counts["cuts"]))]
        if not counts["cuts"] % 3:
            images.append(disk.restart())
        for image in images:
            counts["checked"] += 1
            check(image, twin)
        if not counts["cuts"] % 6:
            check_going_on(image, twin.data)
    return counts


def check(image: SimFS, twin: Twin) -> None:
    """The broker's tables are those of the log; as long as nothing was added to it, those of the twin."""
    written_back(image, twin.data)
    try:
        opened = open_directory(image, settings_of(twin.data), BEGAN)
    except (TxmqError, LookupError, TypeError) as error:
        raise AssertionError(f"a power cut left what cannot be opened: {error!r}") from error
    try:
        rows, end = rows_of(opened.state), opened.log.end
        expected = twin.folds.get(end) or twin.folds.setdefault(end, folded(opened.log))
        assert rows == expected, "not what the log says"
        assert opened.state.boot_epoch > twin.boot_epoch or rows == twin.rows, "not what the twin has"
    finally:
        opened.tables.close()
        opened.log.close()


def check_going_on(image: SimFS, data: Path) -> None:
    """It serves, ends in good order, and then the index alone tells the same."""
    by_broker(image, data)
    opened = open_directory(image, settings_of(data), BEGAN)
    log_id, expected = opened.log.log_id, folded(opened.log)
    opened.tables.close()
    opened.log.close()
    assert opened.replayed == 0
    assert stored(data, log_id) == (opened.log.end, expected)


@pytest.mark.parametrize("name", REBUILDS)
def test_no_power_cut_in_a_rebuild_of_the_index_changes_what_the_broker_has(twin: Twin, name: str) -> None:
    counts = survive(twin, name)
    assert counts["cuts of the index"] > 10, counts
    assert counts["checked"] > counts["cuts"] > 20, counts


def rebuild_a_wrong_one(twin: Twin) -> None:
    """An index with a row that the log does not have is made anew, and then the power goes."""
    base = twin.disk.copy()
    written_back(base, twin.data)
    with closing(open_directory(base, settings_of(twin.data), BEGAN).tables) as tables:
        tables[DUE].put(b"no such", (b"thing",))
        frozen = tables.freeze(tables.position)
        assert frozen is not None
        tables.commit(frozen, durable=tables.position)
    keep(base, twin.data, (twin.data / "index" / environment.DATA).read_bytes())
    disk = base.copy()
    with Mirror(disk, twin.data).watching():
        by_command(disk, twin.data)
    for seed in range(8):
        check(disk.crash(Random(seed)), twin)


def test_a_wrong_index_that_was_made_anew_does_not_come_back(twin: Twin) -> None:
    rebuild_a_wrong_one(twin)


def valid_before_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: LmdbTables, position: int, rows: Iterable[DumpRow]) -> None:
        with environment.writing(self._env) as txn:
            for database in self._databases.values():
                txn.drop(database, delete=False)
            environment.write_identity(txn, self._databases, self._log_id, position)
        put_all(self, rows)
        loaded(self, position)

    monkeypatch.setattr(LmdbTables, "load", load)


def snapshot_over_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there of both would count as the older state."""

    def load(self: LmdbTables, position: int, rows: Iterable[DumpRow]) -> None:
        put_all(self, rows)
        with environment.writing(self._env) as txn:
            environment.write_position(txn, self._databases, position)
        loaded(self, position)

    monkeypatch.setattr(LmdbTables, "load", load)


def put_all(tables: LmdbTables, rows: Iterable[DumpRow]) -> None:
    for part in index._slices(rows, index.LOADED_AT_ONCE):
        with environment.writing(tables._env) as txn:
            for name, key, value in part:
                txn.put(key, value, db=tables._databases[name])


def loaded(tables: LmdbTables, position: int) -> None:
    tables.position = position
    tables._renew()
    for name in NAMES:
        tables[name].read_with(tables._txn)


def position_before_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = LmdbTables.commit

    def too_soon(self: LmdbTables, frozen: Frozen, *, durable: int) -> None:
        with environment.writing(self._env) as txn:
            environment.write_position(txn, self._databases, frozen.position)
        commit(self, frozen, durable=durable)

    monkeypatch.setattr(LmdbTables, "commit", too_soon)


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    valid_before_its_rows: "by the command, from a snapshot",
    position_before_the_rows: "by the command, from the log alone",
    snapshot_over_what_is_there: "by a broker whose index is older than its snapshot",
}


@pytest.mark.parametrize("plant", PLANTED)
def test_the_check_finds_a_planted_bug(
    twin: Twin, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        survive(twin, PLANTED[plant])


def test_the_check_finds_an_index_that_comes_back(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_sync_names", lambda _path: None)
    with pytest.raises(AssertionError, match="not what the log says"):
        rebuild_a_wrong_one(twin)


def rebuild_and_lose_a_write(twin: Twin) -> int:
    """Returns how many writes of a rebuild were not synced at its end: any of them may be lost."""
    disk, lost = twin.disk.copy(), 0
    written_back(disk, twin.data)
    with Mirror(disk, twin.data).watching():
        by_command(disk, twin.data)
    for image in each_write_lost(disk, twin.data):
        lost += 1
        check(image, twin)
    return lost


def test_a_write_that_was_not_synced_may_be_lost_whole(twin: Twin) -> None:
    assert rebuild_and_lose_a_write(twin) > 0


def open_without_sync(path: Path, map_size: int) -> lmdb.Environment:
    return lmdb.open(str(path), map_size=map_size, max_dbs=len(NAMES), sync=False, max_spare_txns=1)


def unsynced(data: str) -> None:
    """A process of its own: LMDB may read pages that never came to the disk, and then it may crash."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        twin = made_twin(Path(data))
        monkeypatch.setattr(environment, "_open", open_without_sync)
        try:
            rebuild_and_lose_a_write(twin)
        except AssertionError:
            sys.exit(FOUND)


def test_the_check_finds_tables_that_are_named_whole_before_they_are_synced(tmp_path: Path) -> None:
    with running(tmp_path, str(tmp_path / "data"), command=unsynced) as process:
        assert process.status() in {FOUND, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
