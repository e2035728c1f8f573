"""Group commit: the log of a local store, written by whichever thread waits first.

    append      in memory, with the lock
    settle      returns once everything up to a position is on disk

The first thread that waits writes for all, without the lock; those that come meanwhile
wait for the next write, which is theirs together. So many callers share one fsync.

A full disk: the ballast is given up, so that outcomes can still be written. Nothing new
is taken until there is space for another one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from txmq.crashpoints import crashpoint
from txmq.errors import DiskFull, StoreClosed, StoreError
from txmq.recover.local_store.records import LAZY

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Condition

    from txmq.store.ballast import Ballast
    from txmq.store.filesystem import FileSystem
    from txmq.store.log.log import Appended, Log
    from txmq.store.log.writer import Flush


class GroupCommit:
    """Writer of a store's log. Its methods are called with the lock of `changed` held.

    `changed` is notified after each write. `failure` is empty while the store works.
    `visible` is the end of all records that readers of the store depend on.
    """

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        log: Log,
        ballast: Ballast,
        changed: Condition,
        now: Callable[[], int],
    ) -> None:
        self.log = log
        self.failure = ""
        self.visible = log.end
        self._fs, self._path, self._ballast = fs, path, ballast
        self._changed, self._now = changed, now
        self._pid = os.getpid()
        self._writing = False
        self._unwritten: Flush | None = None  # for lack of space

    @property
    def disk_full(self) -> bool:
        """True while nothing new is taken, for lack of space."""
        return self.log.read_only or self._ballast.needed

    @property
    def is_open(self) -> bool:
        return not self.failure and os.getpid() == self._pid

    def require_open(self) -> None:
        """Raise StoreClosed after a failure, after `fail`, and in a forked process."""
        if os.getpid() != self._pid:
            raise StoreClosed(
                f"{self._path}: the local store belongs to process {self._pid}",
                hint="open one after the fork, in a directory of its own",
            )
        if self.failure:
            raise StoreClosed(
                f"{self._path}: the local store {self.failure}",
                hint="open it again: what was acknowledged is on disk, and the broker has its"
                " copies",
            )

    def require_space(self) -> None:
        """Raise DiskFull unless outcomes will have space after what is put now.

        Makes the ballast again where there is space for it, and blocks then.
        """
        if not self.disk_full:
            return
        if self._fs.space(self._path).free >= 2 * self._ballast.size:
            with suppress(DiskFull):
                if self._ballast.needed:
                    self._ballast.create()
                if not self.log.read_only or self.log.try_space():
                    return
        raise DiskFull(
            f"{self._path}: no space for more messages in the local store",
            hint="free space on that disk; the store then continues by itself, and until then"
            " outcomes of what it has are still recorded",
        )

    def append(self, kind: int, head: bytes, body: bytes = b"") -> Appended:
        """Append a record. It is accepted on a full disk, too."""
        self.require_open()
        try:
            at = self.log.append(
                kind, head, body, stored_at=self._now(), boot_epoch=0, continued=True
            )
        except StoreClosed as error:
            self._stop(error)
        if kind not in LAZY:
            self.visible = at.end
        return at

    def settle(self, end: int) -> None:
        """Return once the log is on disk up to the position `end`.

        The lock is released meanwhile. Raises DiskFull where there is no space at all:
        the records stay in memory then, and the next call tries again.
        """
        while self.log.durable < end:
            self.require_open()
            if self._writing:
                self._changed.wait()
            else:
                self._write()

    def fail(self, why: str) -> None:
        """Take no more work, and wake up whoever waits."""
        self.failure = self.failure or why
        self._changed.notify_all()

    def wait_for_writer(self) -> None:
        """Return when no thread writes."""
        while self._writing:
            self._changed.wait()

    def _write(self) -> None:
        flush = self._unwritten or self.log.cut()
        assert flush is not None  # `settle` waits for nothing that was not appended
        self._unwritten = flush
        self._writing = True
        self._changed.release()
        try:
            self._bring_to_disk(flush)
        except DiskFull as error:
            self._changed.acquire()
            if not self.log.read_only:
                self._stop(error)
            raise
        except StoreError as error:
            self._changed.acquire()
            self._stop(error)
        except BaseException:
            self._changed.acquire()
            self.fail("was interrupted while it wrote")
            raise
        else:
            self._changed.acquire()
            self._unwritten = None
            self.log.complete(flush)
        finally:
            self._writing = False
            self._changed.notify_all()

    def _bring_to_disk(self, flush: Flush) -> None:
        try:
            self._write_and_sync(flush)
        except DiskFull:
            if not self.log.read_only:
                raise
            self._ballast.release()
            if not self.log.try_space():
                raise
            self._write_and_sync(flush)

    def _write_and_sync(self, flush: Flush) -> None:
        crashpoint("local_store.before_write")
        self.log.write(flush, sync=False)
        crashpoint("local_store.before_fsync")
        self.log.sync()
        crashpoint("local_store.after_fsync")

    def _stop(self, error: StoreError) -> NoReturn:
        self.fail(f"failed: {error}")
        raise StoreClosed(
            f"{self._path}: the local store failed: {error.message}",
            hint="check the kernel's messages about the disk; then open the store again: what was"
            " acknowledged is on disk, and the broker has its copies",
        ) from error
