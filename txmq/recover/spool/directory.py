"""The directory that a user names: a spool of each process, and the topics known
last.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from errno import EACCES, EEXIST, ELOOP, ENOENT, ENOTDIR, EPERM, EROFS
from typing import NamedTuple
from uuid import UUID, uuid4

from txmq.errors import DirectoryInUse, StoreError, UnsupportedFormat
from txmq.model.units import HOUR
from txmq.recover.spool.files import names_of, read_file, remove_tree, write_file
from txmq.recover.spool.identity import Identity
from txmq.recover.spool.refused import FOLDER
from txmq.recover.spool.spool import (
    LOCK,
    PREALLOCATE,
    SEGMENT_SIZE,
    Spool,
    SpoolReport,
    is_blank,
)
from txmq.store.filesystem import FileSystem, RealFileSystem
from txmq.store.log.log import lock_directory

TOPICS = "topics.json"
BLANK_US = HOUR  # that another process may need to make its spool
_HEX = frozenset("0123456789abcdef")
_UNUSABLE = frozenset((EACCES, EEXIST, ELOOP, ENOENT, ENOTDIR, EPERM, EROFS))


class KnownTopic(NamedTuple):
    """A topic's metadata as the broker described it last."""

    partitions: int
    epoch: int
    topic_id: int


class Opened(NamedTuple):
    """A spool that was opened, or the error why it was not."""

    path: str
    spool: Spool | None
    report: SpoolReport
    error: StoreError | None = None


class SpoolDirectory:
    """The spools below a directory. Raises StoreError where it cannot be used."""

    def __init__(
        self,
        path: str,
        fs: FileSystem | None = None,
        *,
        segment_size: int = SEGMENT_SIZE,
        preallocate: int = PREALLOCATE,
    ) -> None:
        self.path = path.rstrip("/") or "/"
        self._fs = fs or RealFileSystem()
        self._sizes = (segment_size, preallocate)

    def open_new(
        self,
        service: str | None,
        log_id: UUID | None,
        now: int,
        incarnation: UUID | None = None,
    ) -> Spool:
        """Make a spool for this process."""
        try:
            return self._new_spool(service, log_id, now, incarnation)
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _UNUSABLE:
                raise StoreError(
                    f"{self.path}: cannot be used for spools: {cause.strerror}",
                    hint="give a directory that this process may write, on a local disk",
                ) from cause
            raise

    def _new_spool(
        self, service: str | None, log_id: UUID | None, now: int, incarnation: UUID | None
    ) -> Spool:
        self._fs.makedirs(self.path)
        # After all others, even where the clock was put back: names are in the order of
        # draining.
        latest = max(spool_names(self._fs, self.path), default="0")
        name = f"{max(now, int(latest[:16], 16) + 1):016x}{uuid4().hex[:16]}"
        self._fs.sync_directory(self.path.rpartition("/")[0] or "/")
        spool, _report = self._open(name, Identity(name, service, log_id, now, incarnation), now)
        return spool

    def open_orphans(self, now: int) -> list[Opened]:
        """Open the spools without an owner, oldest first.

        Those that cannot be opened come with their errors, and stay as they are.
        """
        opened = []
        for name in spool_names(self._fs, self.path):
            path = f"{self.path}/{name}"
            try:
                if is_blank(self._fs, path):
                    if int(name[:16], 16) < now - BLANK_US:
                        self._remove_blank(path)
                    continue
                spool, report = self._open(name, None, now)
            except DirectoryInUse:
                continue
            except (StoreError, UnsupportedFormat, ValueError) as error:
                if is_blank(self._fs, path):  # its owner has just removed it
                    continue
                failure = error if isinstance(error, StoreError) else StoreError(str(error))
                opened.append(Opened(path, None, SpoolReport(), failure))
            else:
                opened.append(Opened(path, spool, report))
        return opened

    def _remove_blank(self, path: str) -> None:
        """Remove what a process left that died before it had made its spool."""
        with suppress(StoreError):  # another process removes it
            lock = lock_directory(self._fs, path)
            try:
                if is_blank(self._fs, path):
                    remove_tree(self._fs, path, LOCK, ("log", FOLDER))
            finally:
                lock.release()

    def _open(self, name: str, new: Identity | None, now: int) -> tuple[Spool, SpoolReport]:
        size, step = self._sizes
        return Spool.open(
            self._fs, f"{self.path}/{name}", new, now=now, segment_size=size, preallocate=step
        )

    def topics(self) -> dict[str, KnownTopic]:
        """Return the topics as they were known last, none where the file is unreadable:
        it only saves the routing of messages for later.
        """
        if TOPICS not in self._fs.listdir(self.path):
            return {}
        with suppress(StoreError, ValueError, TypeError, AttributeError):
            fields = json.loads(read_file(self._fs, f"{self.path}/{TOPICS}"))
            topics = {name: KnownTopic(*map(int, known)) for name, known in fields.items()}
            return {name: known for name, known in topics.items() if min(known) >= 0 < known[0]}
        return {}

    def remember_topics(self, topics: Mapping[str, KnownTopic]) -> None:
        """Keep these topics for processes that start while no broker answers."""
        known = {**self.topics(), **topics}
        write_file(self._fs, self.path, TOPICS, json.dumps(known).encode() + b"\n")


def spool_names(fs: FileSystem, path: str) -> list[str]:
    """Return the names of the spools below a directory, oldest first.

    Symbolic links are ignored: they could lead anywhere.
    """
    return [
        name
        for name in sorted(names_of(fs, path))
        if len(name) == 32 and _HEX.issuperset(name) and not _is_link(f"{path}/{name}")
    ]


def _is_link(path: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        return False


def retry_refused(path: str, fs: FileSystem | None = None, now: int = 0) -> int:
    """Have the refused messages of all spools without an owner sent again, and return
    their number.
    """
    taken = 0
    for opened in SpoolDirectory(path, fs).open_orphans(now):
        if opened.spool is not None:
            try:
                taken += opened.spool.retry_refused(now or time.time_ns() // 1_000)
            finally:
                opened.spool.abandon()
    return taken
