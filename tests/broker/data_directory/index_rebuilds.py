"""Rebuilds of an index, by the command and by brokers, with power cuts; and checks of
the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from tests.broker.data_directory.index_world import (
    Indexed,
    Mirror,
    Rows,
    folded,
    new_disk,
    rows_of,
    settings_of,
    stored,
    written_back,
)
from tests.broker.data_directory.random_everything import Everything
from tests.broker.data_directory.random_work import POSTGRES
from tests.broker.support import BEGAN
from tests.store.simfs import SimFS, crash_points
from txmq.broker.data_directory.offline import rebuild
from txmq.broker.data_directory.storage import open_directory
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import TxmqError
from txmq.model.message import Decision
from txmq.store.index import environment, lmdb_tables
from txmq.store.index.digest import DATA, walk

Run = Callable[[SimFS, Path], None]


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a snapshot load in several transactions, keep the index file short, and look
    for damage in this process.
    """
    monkeypatch.setattr(lmdb_tables, "LOADED_AT_ONCE", 80)
    monkeypatch.setattr(environment, "AHEAD", 4_096)
    # A fork of a process of tests takes longer than the look. No damage of these disks
    # crashes LMDB, or the test has a process of its own.
    monkeypatch.setattr(environment, "find_damage", walk)


class Twin(NamedTuple):
    """A data directory of a broker that was closed in good order, never touched: its
    disk, index and rows. `early` is the index before the newest snapshot.
    """

    disk: SimFS
    data: Path
    boot_epoch: int
    rows: Rows
    early: bytes
    # what a log comes to that ends there: all of them begin alike, and time stands
    # still
    folds: dict[int, Rows]


def made_twin(data: Path) -> Twin:
    disk = new_disk(data)
    world = Indexed(disk, data)
    for name in "tu":
        world.do(CreateTopic(name, 3))
    work = Everything(world, 5)
    work.some(25)
    undecided = work.store(POSTGRES)
    world.tend()
    early, snapshots = (
        (data / "index" / DATA).read_bytes(),
        disk.listdir(f"{data}/snapshot"),
    )
    # what goes of the early index must not come back
    world.do(DecideTransaction(undecided, Decision.ROLLBACK, "test"))
    while len(found := disk.listdir(f"{data}/snapshot")) < 2 or found == snapshots:
        work.some(6)
    work.some(5)
    world.tend()
    rows, boot_epoch = rows_of(world.state), world.state.boot_epoch
    world.close()
    keep(disk, data, (data / "index" / DATA).read_bytes())
    return Twin(disk.copy(), data, boot_epoch, rows, early, {})


def keep(disk: SimFS, data: Path, content: bytes) -> None:
    """Put this index onto the simulated disk."""
    folder = f"{data}/index"
    disk.makedirs(folder)
    if DATA in disk.listdir(folder):
        disk.remove(f"{folder}/{DATA}")
    with closing(disk.create(f"{folder}/{DATA}")) as file:
        file.pwrite([content], 0)


def whole(disk: SimFS, twin: Twin) -> None:
    """Return the directory unchanged."""


def no_snapshot(disk: SimFS, twin: Twin) -> None:
    for name in disk.listdir(f"{twin.data}/snapshot"):
        disk.remove(f"{twin.data}/snapshot/{name}")


def no_index(disk: SimFS, twin: Twin) -> None:
    disk.remove(f"{twin.data}/index/{DATA}")


def neither(disk: SimFS, twin: Twin) -> None:
    no_index(disk, twin)
    no_snapshot(disk, twin)


def early_index(disk: SimFS, twin: Twin) -> None:
    keep(disk, twin.data, twin.early)


def cut_index(disk: SimFS, twin: Twin) -> None:
    keep(disk, twin.data, twin.early[: len(twin.early) // 2])
    no_snapshot(disk, twin)


def by_command(disk: SimFS, data: Path) -> None:
    """Rebuild by `txmq log rebuild`."""
    rebuild(disk, settings_of(data), BEGAN)


def by_broker(disk: SimFS, data: Path) -> None:
    """Rebuild by a start, the first work of the storage service, and a stop in good
    order.
    """
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
    """Cut the power at every change. The remaining directory must open, equal a fold of
    the log, and keep working.
    """
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
    """Check that the broker's tables are those of the log and, as long as nothing was
    added, those of the twin.
    """
    written_back(image, twin.data)
    try:
        opened = open_directory(image, settings_of(twin.data), BEGAN)
    except (TxmqError, LookupError, TypeError) as error:
        raise AssertionError(f"a power cut left what cannot be opened: {error!r}") from error
    try:
        rows, end = rows_of(opened.state), opened.log.end
        expected = twin.folds.get(end) or twin.folds.setdefault(end, folded(opened.log))
        assert rows == expected, "not what the log says"
        assert opened.state.boot_epoch > twin.boot_epoch or rows == twin.rows, (
            "not what the twin has"
        )
    finally:
        opened.tables.close()
        opened.log.close()


def check_going_on(image: SimFS, data: Path) -> None:
    """Check that the broker serves, stops in good order, and leaves the same rows in
    the index alone.
    """
    by_broker(image, data)
    opened = open_directory(image, settings_of(data), BEGAN)
    log_id, expected = opened.log.log_id, folded(opened.log)
    opened.tables.close()
    opened.log.close()
    assert opened.replayed == 0
    assert stored(data, log_id) == (opened.log.end, expected)
