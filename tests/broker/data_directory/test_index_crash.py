"""Power cuts at every step of a rebuild of the index: the broker starts, and has all
that its log holds.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import lmdb
import pytest

from tests.broker.data_directory.index_rebuilds import (
    REBUILDS,
    Twin,
    by_command,
    check,
    keep,
    made_twin,
    make_small,
    survive,
)
from tests.broker.data_directory.index_world import (
    Mirror,
    each_write_lost,
    settings_of,
    written_back,
)
from tests.broker.support import BEGAN
from tests.fixtures_postgres import memory_or_disk
from txmq.broker.data_directory.storage import open_directory
from txmq.store.index import digest, environment, lmdb_tables
from txmq.store.index.digest import DATA, EMPTY, Digests, digest_of
from txmq.store.index.lmdb_tables import DumpRow, FrozenOverlays, LmdbTables
from txmq.store.tables import DUE, NAMES
from txmq.testing.processes import running
from txmq.testing.wait import PATIENCE_S

FOUND = 3  # an exit status


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def twin() -> Iterator[Twin]:
    """A twin in memory: the disk that loses power is simulated."""
    with TemporaryDirectory(prefix="txmq-twin-", dir=memory_or_disk()) as directory:
        yield made_twin(Path(directory) / "data")


@pytest.mark.parametrize("name", REBUILDS)
def test_no_power_cut_in_a_rebuild_of_the_index_changes_what_the_broker_has(
    twin: Twin, name: str
) -> None:
    counts = survive(twin, name)
    assert counts["cuts of the index"] > 10, counts
    assert counts["checked"] > counts["cuts"] > 20, counts


def rebuild_a_wrong_one(twin: Twin) -> None:
    """Rebuild an index with a row that the log does not have, up to a power cut."""
    base = twin.disk.copy()
    written_back(base, twin.data)
    with closing(open_directory(base, settings_of(twin.data), BEGAN).tables) as tables:
        tables[DUE].put(b"no such", (b"thing",))
        frozen = tables.freeze(tables.position)
        assert frozen is not None
        tables.commit(frozen, durable=tables.position)
    keep(base, twin.data, (twin.data / "index" / DATA).read_bytes())
    disk = base.copy()
    with Mirror(disk, twin.data).watching():
        by_command(disk, twin.data)
    for seed in range(8):
        check(disk.crash(Random(seed)), twin)


def test_a_wrong_index_that_was_made_anew_does_not_come_back(twin: Twin) -> None:
    rebuild_a_wrong_one(twin)


def valid_before_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: LmdbTables, position: int, rows: Iterable[DumpRow]) -> None:
        with environment.write_transaction(self._env) as txn:
            for database in self._databases.values():
                txn.drop(database, delete=False)
            listed = list(rows)
            digests = digests_of(listed)
            environment.write_identity(txn, self._databases, self._log_id, position, digests)
        put_all(self, listed)
        loaded(self, position, digests)

    monkeypatch.setattr(LmdbTables, "load", load)
    # The digests would tell.
    monkeypatch.setattr(environment, "find_damage", lambda _path: "")


def snapshot_over_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a snapshot over existing rows; a mixture would count as the older state."""

    def load(self: LmdbTables, position: int, rows: Iterable[DumpRow]) -> None:
        put_all(self, rows)
        with environment.write_transaction(self._env) as txn:
            # As whoever forgets the rows that are there forgets them in the digests.
            digests = {name: digest_of(self._env, txn, name, at_most=1 << 60) for name in NAMES}
            environment.write_position(txn, self._databases, position, digests)
        loaded(self, position, digests)

    monkeypatch.setattr(LmdbTables, "load", load)


def put_all(tables: LmdbTables, rows: Iterable[DumpRow]) -> None:
    for part in lmdb_tables._slices(rows, lmdb_tables.LOADED_AT_ONCE):
        with environment.write_transaction(tables._env) as txn:
            for name, key, value in part:
                txn.put(key, value, db=tables._databases[name])


def digests_of(rows: Iterable[DumpRow]) -> Digests:
    digests = dict(EMPTY)
    for name, key, value in rows:
        digests[name] = digests[name].plus([(key, value)])
    return digests


def loaded(tables: LmdbTables, position: int, digests: Digests) -> None:
    tables.position, tables._digests = position, digests
    tables._renew()
    for name in NAMES:
        tables[name].use_transaction(tables._txn)


def position_before_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = LmdbTables.commit

    def too_soon(self: LmdbTables, frozen: FrozenOverlays, *, durable: int) -> None:
        with environment.write_transaction(self._env) as txn:
            environment.write_position(txn, self._databases, frozen.position, self._digests)
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


def test_the_check_finds_an_index_that_comes_back(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_sync_names", lambda _path: None)
    with pytest.raises(AssertionError, match="not what the log says"):
        rebuild_a_wrong_one(twin)


def rebuild_and_lose_a_write(twin: Twin) -> int:
    """Return the number of unsynced writes at the end of a rebuild: any of them may be
    lost.
    """
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


def open_without_sync(path: Path, map_size: int, _layout: object) -> lmdb.Environment:
    return lmdb.open(str(path), map_size=map_size, max_dbs=len(NAMES), sync=False, max_spare_txns=1)


def unsynced(data: str) -> None:
    """Run in a process of its own: LMDB may read pages that never reached the disk, and
    crash.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        twin = made_twin(Path(data))
        monkeypatch.setattr(environment, "_open", open_without_sync)
        # It would find the pages that never reached the disk.
        monkeypatch.setattr(digest, "require_sound", lambda _file: None)
        try:
            rebuild_and_lose_a_write(twin)
        except AssertionError:
            sys.exit(FOUND)


def test_the_check_finds_tables_that_are_named_whole_before_they_are_synced(tmp_path: Path) -> None:
    with running(tmp_path, str(tmp_path / "data"), command=unsynced) as process:
        assert process.status(PATIENCE_S) in {
            FOUND,
            -signal.SIGSEGV,
            -signal.SIGBUS,
            -signal.SIGABRT,
        }
