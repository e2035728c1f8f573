"""The copy of the leader's log, for a node that lacks what the partition has forgotten.

A node may copy what it could have read while the partition still had it. So it logs in
with what the leader has written there: whoever may read the topic knows that, and
nobody else.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from txmq.broker.cluster.kafka_genesis import find_leader
from txmq.errors import ConfigError, DirectoryInUse, DiskFull, TxmqError, UnsupportedFormat
from txmq.store.log.log import lock_directory
from txmq.store.log_copy import ForeignCopy, copy_log, mend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from txmq.broker.cluster.kafka_client import KafkaAddress
    from txmq.store.backup import BackupSource
    from txmq.store.filesystem import FileSystem
    from txmq.store.log.decoder import Damage

    # the log of the node at an address, for who has its password
    LogAt: TypeAlias = "Callable[[str, str], AbstractContextManager[BackupSource]]"

# as `txmq log backup` by default: docs/FIGURES.md has what it costs a broker
BYTES_PER_S: Final = 32 << 20
REPORT_S: Final = 10.0
RETRY_S: Final = 1.0
FINAL: Final = (ConfigError, DirectoryInUse, DiskFull, ForeignCopy, UnsupportedFormat)
log = structlog.get_logger()


def password_of(nonce: bytes) -> str:
    """Return the password of nodes at the leader that claims with a nonce."""
    return nonce.hex()


def copy_from_leader(
    kafka: KafkaAddress, topic: str, fs: FileSystem, data: Path, keep: int, log_at: LogAt
) -> None:
    """Copy the leader's log into a data directory, which has it up to `keep`. Blocks
    until it is whole: where the leader ends, the next one goes on.

    Raises ConfigError, ForeignCopy, DiskFull and UnsupportedFormat.
    """
    lock = lock_directory(fs, str(data))
    try:
        while True:
            try:
                leader = find_leader(kafka, topic)
                log.info("copy.begins", leader=leader.node, address=leader.address)
                with log_at(leader.address, password_of(leader.nonce)) as source:
                    end = copy_log(fs, source, str(data), _Pace(), keep)
            except FINAL:
                raise
            except TxmqError as error:
                log.warning("copy.waits", reason=str(error))
                time.sleep(RETRY_S)
            else:
                log.info("copy.whole", end=end)
                return
    finally:
        lock.release()


def mend_from(
    fs: FileSystem, data: Path, damages: list[Damage], leader: tuple[str, str], log_at: LogAt
) -> list[Damage]:
    """Mend spans of a copy with what the leader has; return those that are whole then.
    `leader` is its address, and its password for nodes. Blocks.
    """
    watch = _Pace()
    watch.begin(sum(damage.end - damage.position for damage in damages))
    with log_at(*leader) as source:
        return mend(fs, source, str(data), damages, watch)


class _Pace:
    """Watches a copy: it takes little of the leader's disk, and says how far it is."""

    def begin(self, total: int) -> None:
        self._total, self._read = total, 0
        self._began = self._report_at = time.monotonic()

    def passed(self, read: int) -> None:
        self._read += read
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            log.info("copy.goes_on", read=self._read, of=self._total)
        if (ahead := self._began + self._read / BYTES_PER_S - now) > 0:
            time.sleep(ahead)
