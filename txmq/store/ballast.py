"""Space that is held on the disk for what has to go on when others have filled it: a
file, given up then.

    <data>/ballast

Acks, decisions and retention need some space even on a full disk, and retention has to
write before it can remove anything. The marks of `keeping/disk.py` keep the broker from
using that up itself; nothing but a file keeps others.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING

from txmq.errors import StoreError

if TYPE_CHECKING:
    from txmq.store.fs import FileSystem

NAME, TEMPORARY = "ballast", "ballast.tmp"


class Ballast:
    """The file of a data directory; `size` in bytes, 0 = none is wanted. `there`: it
    holds so much. All calls block.
    """

    def __init__(self, fs: FileSystem, directory: str, size: int) -> None:
        self._fs, self._directory, self.size = fs, directory, size
        self._path, self._temporary = f"{directory}/{NAME}", f"{directory}/{TEMPORARY}"
        self.there = False
        if NAME in fs.listdir(directory):
            with closing(fs.open(self._path)) as file:
                self.there = file.size() == size

    @property
    def wanted(self) -> bool:
        """Whether it should be made as soon as there is space enough."""
        return self.size > 0 and not self.there

    def make(self) -> None:
        """Raises DiskFull, or what else the disk says; nothing of it is left then."""
        self._clear()
        try:
            with closing(self._fs.create(self._temporary)) as file:
                file.write_zeros(0, self.size)
                file.fsync()
            self._fs.rename(self._temporary, self._path)
        except StoreError:
            with suppress(StoreError):  # the next try removes it
                self._fs.remove(self._temporary)
            raise
        self._fs.sync_directory(self._directory)
        self.there = True

    def give_up(self) -> bool:
        """Free its space; False = there is none."""
        there, self.there = self.there, False
        if there:
            self._fs.remove(self._path)
        return there

    def _clear(self) -> None:
        """Of another size, or of a try that was interrupted."""
        for name in {NAME, TEMPORARY} & set(self._fs.listdir(self._directory)):
            self._fs.remove(f"{self._directory}/{name}")
