"""The spools of one client: those that it found without an owner, then its own.

They are drained in this order. New batches go to its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Condition
from uuid import UUID

from txmq.client.log import get_logger
from txmq.client.protocol.sender.accumulator import UNROUTED as PENDING_UNROUTED
from txmq.client.protocol.sender.batcher import SequencedBatch
from txmq.errors import DiskFull, SpoolFull
from txmq.model.message import Receipt, SpooledReceipt
from txmq.recover.local.batches import UNROUTED, SpooledBatch
from txmq.recover.local.spool import Spool
from txmq.recover.local.spools import OpenedSpool, SpoolDirectory

log = get_logger()


class SpoolChain:
    """The spools of one client, for its sender's thread.

    `changed` is notified when messages are drained. Counters may be read by any thread.
    """

    def __init__(
        self,
        directory: SpoolDirectory,
        limit: int,
        service: str | None = None,
        log_id: UUID | None = None,
        incarnation: UUID | None = None,
    ) -> None:
        """`limit` is in bytes, of all spools together.

        Raises StoreError where the directory cannot be used.
        """
        now = time.time_ns() // 1_000
        self.own = directory.open_new(service, log_id, now, incarnation)
        self.changed = Condition()
        self.closed = False
        self._refused_before = 0  # in spools that are drained
        self._limit = limit
        self._others = self._taken(directory.open_orphans(now))

    def _taken(self, found: Sequence[OpenedSpool]) -> list[Spool]:
        """Return the spools to drain; remove those with nothing in them."""
        taken: list[Spool] = []
        for path, spool, report, error in found:
            if spool is None:
                log.error("spool.not_opened", path=path, error=str(error))
                continue
            if report.damage or report.lost:
                log.error("spool.damaged", path=path, **report._asdict())
            if spool.waiting:
                log.info("spool.taken", path=path, messages=spool.waiting)
                taken.append(spool)
            else:
                spool.close()
        return taken

    @property
    def spools(self) -> list[Spool]:
        """The spools in the order of draining."""
        return [*self._others, self.own]

    @property
    def first(self) -> Spool:
        """The spool to drain now."""
        return self._others[0] if self._others else self.own

    @property
    def waiting(self) -> int:
        """Messages that wait."""
        return sum(spool.waiting for spool in self.spools)

    @property
    def refused(self) -> int:
        """Messages that the broker refused for good."""
        return self._refused_before + sum(spool.refused for spool in self.spools)

    @property
    def size(self) -> int:
        """Bytes that they occupy."""
        return sum(spool.size for spool in self.spools)

    @property
    def empty(self) -> bool:
        """True where nothing waits."""
        return not self._others and not self.own.waiting

    def require_room(self, size: int) -> None:
        """Raise SpoolFull where so many bytes would exceed the limit, DiskFull where
        the disk has no room for them.
        """
        if self.size + size > self._limit:
            raise SpoolFull(
                f"{self.own.path}: {self.size} bytes wait, and the limit is {self._limit}"
            )
        self.own.require_space(size)

    def stage(self, batches: Sequence[SequencedBatch]) -> None:
        """Stage batches of the client; `own.flush` brings them to disk."""
        self.own.stage(map(_to_spool, batches), time.time_ns() // 1_000)

    def finish_first(self) -> None:
        """Go on with the next spool, because the first one is drained. The own one
        stays.
        """
        if self._others:
            drained, *self._others = self._others
            self._refused_before += drained.refused
            drained.close()
        self.notify()

    def notify(self) -> None:
        """Wake those who wait for the spools."""
        with self.changed:
            self.changed.notify_all()

    def set_log(self, log_id: UUID, incarnation: UUID | None = None) -> None:
        """Note in the spools which broker's log answers.

        Spools of another log are left alone. Where the log was restored from a backup
        since, a warning says so.
        """
        for spool in self._others:
            if spool.identity.log_id not in (None, log_id):
                log.error(
                    "spool.of_another_log",
                    path=spool.path,
                    log_id=str(spool.identity.log_id),
                    broker=str(log_id),
                )
                self._others = [other for other in self._others if other is not spool]
                spool.abandon()
        for spool in self.spools:
            if spool.identity.log_id is not None and spool.identity.incarnation != incarnation:
                log.warning(
                    "spool.log_restored",
                    path=spool.path,
                    incarnation=str(incarnation),
                    hint="what was drained after the backup is lost; what waits is sent",
                )
            try:
                spool.set_log(log_id, incarnation)
            except DiskFull as error:  # the next connection tries again
                log.warning("spool.disk_full", path=spool.path, error=error.message)

    def close(self) -> None:
        """Release all spools; what waits stays for the next process."""
        self.closed = True
        for spool in self.spools:
            spool.close()
        self.notify()

    def abandon(self) -> None:
        """Let go of all spools in the child of a fork."""
        for spool in self.spools:
            spool.abandon()


def _to_spool(batch: SequencedBatch) -> SpooledBatch:
    topic, partition, epoch, explicit = batch.pending.destination
    return SpooledBatch.of(
        topic,
        UNROUTED if partition == PENDING_UNROUTED else partition,
        epoch,
        batch.payload[1],
        explicit=explicit,
        doubtful=batch.doubtful,
    )


def spooled_receipts(batch: SequencedBatch) -> list[Receipt]:
    """Return the receipts of a batch's messages that are on local disk."""
    topic, partition, _epoch, _explicit = batch.pending.destination
    shown = max(partition, UNROUTED)
    return [
        SpooledReceipt(f"{batch.prefix}{sequence}", topic, shown, None, duplicate=False)
        for sequence in range(batch.sequence, batch.sequence + len(batch.futures))
    ]
