"""The log of a running broker as the source of a backup, or of the copy of a node.

The broker keeps the segments and says how far the log is durable. A backup reads the
files from its data directory, on its machine; a copy reads them through the broker.
"""

from __future__ import annotations

import time
from base64 import b64decode
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from txmq.cli.command import connect
from txmq.errors import BackupMismatch, ReadOnly, TxmqError
from txmq.store.backup import LogExtent
from txmq.store.log.segment import position_of_segment, read_log_id
from txmq.store.snapshot import position_of_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.cli.command import CommandClient
    from txmq.store.filesystem import FileSystem, ReadableFile

RENEWALS: Final = 4  # of a hold, before it would end


class HeldLog:
    """The log of the broker that `client` is connected to."""

    def __init__(self, client: CommandClient) -> None:
        self._client = client
        self._name = uuid4().hex
        self._renew_at = 0.0

    def hold(self, position: int) -> LogExtent:
        """Hold the log from a position on."""
        return _extent(self._hold(position))

    def keep_holding(self, position: int) -> None:
        """Renew the hold now and then. Raises BackupMismatch where the log has lost
        segments, because the broker was restarted meanwhile, or its disk is full.
        """
        if time.monotonic() < self._renew_at:
            return
        firsts = self._hold(position)["segments"]
        if firsts[0] > position:
            raise BackupMismatch(
                f"the log begins at {firsts[0]} by now, and the backup has come to {position}",
                hint="run the backup again: it goes on from there",
            )

    def close(self) -> None:
        """End the hold."""
        self._client.call("log.release", hold=self._name)

    def _hold(self, position: int) -> dict[str, Any]:
        reply = self._client.call("log.hold", hold=self._name, position=position)
        self._renew_at = time.monotonic() + reply["expires_s"] / RENEWALS
        return reply


def _extent(reply: dict[str, Any]) -> LogExtent:
    incarnation = reply["incarnation"]
    return LogExtent(
        UUID(reply["log_id"]),
        None if incarnation is None else UUID(incarnation),
        tuple(reply["segments"]),
        reply["durable"],
        tuple(reply["snapshots"]),
        reply["at"],
    )


class RunningLog(HeldLog):
    """The log of a broker of this machine."""

    def __init__(self, fs: FileSystem, client: CommandClient) -> None:
        super().__init__(client)
        self._fs = fs
        self._directory = ""

    def hold(self, position: int) -> LogExtent:
        """Hold the log. Raises BackupMismatch where its files are not on this
        machine.
        """
        reply = self._hold(position)
        self._directory, extent = reply["data"], _extent(reply)
        is_here = Path(self._directory).is_dir()
        if not is_here or read_log_id(self._fs, self._directory) != extent.log_id:
            raise BackupMismatch(
                f"the broker's data directory {self._directory} is not on this machine",
                hint="run the backup on the machine of the broker, as its user",
            )
        return extent

    def open(self, name: str) -> ReadableFile:
        return self._fs.open(f"{self._directory}/{name}")

    def note_backup(self, taken_at: int) -> None:
        """Tell the broker that a backup has the log as it was then. One whose disk is
        full cannot note it, and the backup is whole all the same.
        """
        with suppress(ReadOnly):
            self._client.call("log.backed_up", taken_at=taken_at)


class RemoteLog(HeldLog):
    """The log of a broker of any machine."""

    def open(self, name: str) -> ReadableFile:
        return _RemoteFile(self._client, name)


class _RemoteFile:
    """A file of the broker's log, for reading."""

    def __init__(self, client: CommandClient, name: str) -> None:
        self.path, self._client = name, client
        position = position_of_segment(name)
        self._file = "snapshot" if position is None else "segment"
        self._position = position_of_snapshot(name) if position is None else position

    def size(self) -> int:
        return int(self._read(0, 0)["size"])

    def pread(self, length: int, offset: int) -> bytes:
        return b64decode(self._read(length, offset)["data"])

    def close(self) -> None:
        """Do nothing: the broker has it open for one read at a time."""

    def _read(self, size: int, offset: int) -> dict[str, Any]:
        return self._client.call(
            "log.read", file=self._file, position=self._position, offset=offset, size=size
        )


@contextmanager
def remote_log(url: str) -> Iterator[RemoteLog]:
    """Open the log of the broker at a URL."""
    with closing(connect(url)) as client:
        log = RemoteLog(client)
        try:
            yield log
        finally:
            with suppress(TxmqError):  # the hold ends by itself
                log.close()
