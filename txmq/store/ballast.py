"""Ballast: a file that reserves disk space for an emergency.

    <data>/ballast

Acks, decisions and retention need some space even on a full disk, and retention has to
write before it can remove anything. The thresholds of the broker's disk service keep
the broker from using up that space. The ballast keeps it from other processes: the
broker removes it when the disk is full.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING

from txmq.errors import StoreError

if TYPE_CHECKING:
    from txmq.store.filesystem import FileSystem

NAME, TEMPORARY = "ballast", "ballast.tmp"


class Ballast:
    """The ballast file of a data directory; `size` in bytes, 0 = none. All calls block.

    `exists`: the file has this size.
    """

    def __init__(self, fs: FileSystem, directory: str, size: int) -> None:
        self._fs, self._directory, self.size = fs, directory, size
        self._path, self._temporary = f"{directory}/{NAME}", f"{directory}/{TEMPORARY}"
        self.exists = False
        if NAME in fs.listdir(directory):
            with closing(fs.open(self._path)) as file:
                self.exists = file.size() == size

    @property
    def needed(self) -> bool:
        """True if the file should be made as soon as there is space."""
        return self.size > 0 and not self.exists

    def create(self) -> None:
        """Make the file. Raises DiskFull or StoreError; nothing of it is left then."""
        self._clear()
        try:
            with closing(self._fs.create(self._temporary)) as file:
                file.write_zeros(0, self.size)
                file.fsync()
            self._fs.rename(self._temporary, self._path)
        except StoreError:
            with suppress(StoreError):  # the next attempt removes it
                self._fs.remove(self._temporary)
            raise
        self._fs.sync_directory(self._directory)
        self.exists = True

    def release(self) -> bool:
        """Free the space; return False where there was no file."""
        existing, self.exists = self.exists, False
        if existing:
            self._fs.remove(self._path)
        return existing

    def _clear(self) -> None:
        """Remove a file of another size, and the rest of an interrupted attempt."""
        for name in {NAME, TEMPORARY} & set(self._fs.listdir(self._directory)):
            self._fs.remove(f"{self._directory}/{name}")
