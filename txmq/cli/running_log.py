"""The log of a running broker of this machine as the source of a backup.

The broker keeps the segments and says how far the log is durable; the files are read
from its data directory.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from txmq.errors import BackupMismatch, ReadOnly
from txmq.store.backup import LogExtent
from txmq.store.log.segment import read_log_id
from txmq.store.snapshot import snapshot_positions

if TYPE_CHECKING:
    from txmq.cli.command import CommandClient
    from txmq.store.filesystem import File, FileSystem

RENEWALS: Final = 4  # of a hold, before it would end


class RunningLog:
    """The log of the broker that `client` is connected to."""

    def __init__(self, fs: FileSystem, client: CommandClient) -> None:
        self._fs, self._client = fs, client
        self._name = uuid4().hex
        self._directory = ""
        self._renew_at = 0.0

    def hold(self, position: int) -> LogExtent:
        """Hold the log. Raises BackupMismatch where its files are not on this
        machine.
        """
        reply = self._hold(position)
        self._directory = reply["data"]
        log_id = UUID(reply["log_id"])
        if not Path(self._directory).is_dir() or read_log_id(self._fs, self._directory) != log_id:
            raise BackupMismatch(
                f"the broker's data directory {self._directory} is not on this machine",
                hint="run the backup on the machine of the broker, as its user",
            )
        durable = reply["durable"]
        found = snapshot_positions(self._fs, self._directory)
        incarnation = reply["incarnation"]
        return LogExtent(
            log_id,
            None if incarnation is None else UUID(incarnation),
            tuple(reply["segments"]),
            durable,
            tuple(position for position in found if position <= durable),
            reply["at"],
        )

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

    def open(self, name: str) -> File:
        return self._fs.open(f"{self._directory}/{name}")

    def note_backup(self, taken_at: int) -> None:
        """Tell the broker that a backup has the log as it was then. One whose disk is
        full cannot note it, and the backup is whole all the same.
        """
        with suppress(ReadOnly):
            self._client.call("log.backed_up", taken_at=taken_at)

    def close(self) -> None:
        """End the hold."""
        self._client.call("log.release", hold=self._name)

    def _hold(self, position: int) -> dict[str, Any]:
        reply = self._client.call("log.hold", hold=self._name, position=position)
        self._renew_at = time.monotonic() + reply["expires_s"] / RENEWALS
        return reply
