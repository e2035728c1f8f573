"""Spools on disks that lose power: batches, openings, and what is in them."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from weakref import finalize

from txmq.batch import BatchView, encode
from txmq.model.message import Message
from txmq.recover.local.batches import SpooledBatch
from txmq.recover.local.spool import Spool
from txmq.recover.local.spools import OpenedSpool, SpoolDirectory

SESSION = bytes(range(16))
FULL = 2  # PRAGMA synchronous
FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
_nows = count(1_000)


class Disk:
    """A directory with spools. `at_commit` is called around each of their commits.

    A copy is what a killed process leaves. After a power cut, what was not synced is
    missing from the end of the write-ahead logs, or is garbage.
    """

    def __init__(self) -> None:
        directory = mkdtemp(prefix="txmq-spools-", dir=FAST)
        finalize(self, shutil.rmtree, directory)
        self.root = Path(directory, "spools")
        self.at_commit: Callable[[], None] = lambda: None
        self._synced: dict[Path, int] = {}  # bytes of write-ahead logs

    def watch(self, *spools: Spool) -> None:
        """Note what the commits of open spools have synced."""
        for spool in spools:
            database = spool._database
            log = Path(f"{database.file}-wal")
            if log not in self._synced:
                self._synced[log] = _size(log)
                database._commit = self._watched(database._connection, database._commit, log)  # type: ignore[method-assign]

    def _watched(
        self, connection: sqlite3.Connection, commit: Callable[[], None], log: Path
    ) -> Callable[[], None]:
        def watched() -> None:
            self.at_commit()
            [how] = connection.execute("PRAGMA synchronous").fetchone()
            commit()
            if how == FULL:
                self._synced[log] = _size(log)
            self.at_commit()

        return watched

    def restart(self) -> Disk:
        """Return the disk as it is when the process is killed."""
        other = Disk()
        if self.root.exists():
            shutil.copytree(self.root, other.root, ignore=_left_out)
        return other

    copy = restart

    def crash(self, rng: Random) -> Disk:
        """Return the disk after a power cut."""
        other = self.restart()
        for log, synced in self._synced.items():
            copy = other.root / log.relative_to(self.root)
            if copy.exists():
                data = copy.read_bytes()
                kept = rng.randint(min(synced, len(data)), len(data))
                garbage = rng.randbytes(rng.choice((0, len(data) - kept)))
                copy.write_bytes(data[:kept] + garbage)
        return other


def _left_out(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith("-shm")]


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def new_disk() -> Disk:
    return Disk()


def directory_on(disk: Disk) -> SpoolDirectory:
    return SpoolDirectory(str(disk.root))


def new_spool(disk: Disk) -> Spool:
    spool = directory_on(disk).open_new("orders", None, 1)
    disk.watch(spool)
    return spool


def batch(
    sequence: int, *bodies: bytes, topic: str = "orders", key: str = "a", session: bytes = SESSION
) -> SpooledBatch:
    """A batch of these bodies for partition 0."""
    messages = [Message(body, key=key) for body in bodies]
    encoded = encode(
        messages, producer_id=session, epoch=0, sequence=sequence, born_at=[1] * len(bodies)
    )
    return SpooledBatch.of(topic, 0, 1, encoded)


def store(spool: Spool, *batches: SpooledBatch) -> None:
    spool.stage(batches, next(_nows))
    spool.flush()


def waiting(spool: Spool) -> list[SpooledBatch]:
    return [batch for record in spool.read(spool.drained) for batch in record.batches]


def bodies(batches: Iterable[SpooledBatch]) -> list[bytes]:
    return [body for batch in batches for body in BatchView(batch.encoded).bodies]


def taken(disk: Disk) -> list[OpenedSpool]:
    """The spools that another process finds on this disk."""
    return directory_on(disk).open_orphans(next(_nows))


def open_spools(opened: Sequence[OpenedSpool]) -> list[Spool]:
    assert all(found.error is None for found in opened), opened
    return [found.spool for found in opened if found.spool is not None]
