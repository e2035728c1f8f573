"""A file system in memory that loses unsynced data: power cuts, errors and full disks.

The content that a program sees differs from the content that survives. Changes of a
file since its last fsync, and changes of names since the last fsync of their directory,
survive a power cut in part and in any order, torn at sectors of 512 bytes. `crash`
draws one of the possible disks. `restart` is the death of the process only, which keeps
the page cache. Data that an fsync failed to write is lost to later ones too, as on
Linux.

`crash_at=n` cuts the power during the n-th call that changes or syncs data. `errors={n:
errno.EIO}` makes the n-th call of any kind fail. `capacity` is the size of the disk in
bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from typing import TypeVar

from tests.store.simdisk import SimDirectory, SimInode, used_bytes
from txmq.errors import DirectoryInUse
from txmq.store.filesystem import Bytes, Space, deleted_error, store_error

H = TypeVar("H")


class PowerCut(BaseException):
    """The power was cut.

    It is not an Exception, so that code under test cannot handle it as an error.
    """


class SimFS:
    """A simulated file system in memory.

    `trace` names the calls so far, and `changes` counts those that changed or synced
    data.
    """

    def __init__(
        self,
        *,
        crash_at: int = 0,
        errors: dict[int, int] | None = None,
        capacity: int | None = None,
    ) -> None:
        self.crash_at = crash_at
        self.errors = errors or {}
        self.capacity = capacity
        self.trace: list[str] = []
        self.changes = 0
        self._power_is_cut = False
        self._root = SimDirectory()
        self._locked: set[str] = set()

    @property
    def calls(self) -> int:
        return len(self.trace)

    @property
    def power_is_cut(self) -> bool:
        """True after the power cut."""
        return self._power_is_cut

    def crash(self, rng: Random) -> SimFS:
        """Return a disk that a power cut may leave now."""
        return self._with(self._root.after_power_cut(rng))

    def copy(self) -> SimFS:
        """Return a copy as the program sees it, fully durable."""
        return self._with(self._root.copy())

    def restart(self) -> SimFS:
        """Return the same disk and page cache, as after the death of the process."""
        return self._with(self._root)

    def open(self, path: str, *, write: bool = False) -> SimFile:
        self.begin("open", path)
        return SimFile(self, path, self._inode(path, "open"), write=write)

    def create(self, path: str) -> SimFile:
        self.begin("create", path)
        directory, name = self._parent(path, "create")
        if name in directory.names:
            raise _error("create", path, errno.EEXIST)
        inode = SimInode()
        directory.change({name: inode})
        self.end()
        return SimFile(self, path, inode, write=True)

    def rename(self, source: str, target: str) -> None:
        self.begin("rename", source)
        directory, name = self._parent(source, "rename")
        other, new_name = self._parent(target, "rename")
        if directory is not other:
            raise _error("rename", target, errno.EXDEV)
        directory.change({name: None, new_name: self._inode(source, "rename")})
        self.end()

    def remove(self, path: str) -> None:
        self.begin("remove", path)
        self._inode(path, "remove")
        directory, name = self._parent(path, "remove")
        directory.change({name: None})
        self.end()

    def names(self, path: str, inode: SimInode) -> bool:
        """Return whether the path is the name of this inode."""
        return self._find(path) is inode

    def listdir(self, path: str) -> list[str]:
        self.begin("listdir", path)
        node = self._find(path)
        return sorted(node.names) if isinstance(node, SimDirectory) else []

    def makedirs(self, path: str) -> None:
        self.begin("makedirs", path)
        directory = self._root
        for name in _names(path):
            node = directory.names.get(name)
            if node is None:
                node = SimDirectory()
                directory.change({name: node})
            if not isinstance(node, SimDirectory):
                raise _error("makedirs", path, errno.ENOTDIR)
            directory = node
        self.end()

    def remove_directory(self, path: str) -> None:
        self.begin("remove_directory", path)
        node = self._find(path)
        if not isinstance(node, SimDirectory) or node.names:
            raise _error("remove_directory", path, errno.ENOTEMPTY if node else errno.ENOENT)
        directory, name = self._parent(path, "remove_directory")
        directory.change({name: None})
        self.end()

    def sync_directory(self, path: str) -> None:
        self.begin("sync_directory", path)
        directory = self._find(path)
        if not isinstance(directory, SimDirectory):
            raise _error("sync_directory", path, errno.ENOENT)
        self.end()
        directory.sync()

    def space(self, path: str) -> Space:
        self.begin("space", path)
        if not isinstance(self._find(path), SimDirectory):
            raise _error("space", path, errno.ENOENT)
        free = self.free_bytes()
        return Space(free + used_bytes(self._root), free)

    def lock(self, path: str) -> SimLock:
        self.begin("lock", path)
        if path in self._locked:
            raise DirectoryInUse(f"{path}: locked", hint="stop the other process")
        directory, name = self._parent(path, "lock")
        directory.change({name: directory.names.get(name) or SimInode()})
        self.end()
        self._locked.add(path)
        return SimLock(self._locked, path)

    def begin(self, name: str, path: str) -> None:
        """Count a call, and raise the planned error."""
        if self._power_is_cut:
            raise PowerCut  # clean-up code runs without power, too
        self.trace.append(f"{name} {path}")
        if self.calls in self.errors:
            raise _error(name, path, self.errors[self.calls])

    def end(self) -> None:
        """Count a change, and cut the power if it is the planned one.

        The change may be lost then, and a sync has no effect.
        """
        self.changes += 1
        if self.changes == self.crash_at:
            self._power_is_cut = True
            raise PowerCut

    def free_bytes(self) -> int:
        """Return the free space of the disk."""
        return (
            (1 << 62) if self.capacity is None else max(0, self.capacity - used_bytes(self._root))
        )

    def _with(self, root: SimDirectory) -> SimFS:
        other = SimFS(capacity=self.capacity)
        other._root = root
        return other

    def _find(self, path: str) -> SimInode | SimDirectory | None:
        node: SimInode | SimDirectory | None = self._root
        for name in _names(path):
            node = node.names.get(name) if isinstance(node, SimDirectory) else None
        return node

    def _inode(self, path: str, doing: str) -> SimInode:
        node = self._find(path)
        if not isinstance(node, SimInode):
            raise _error(doing, path, errno.ENOENT if node is None else errno.EISDIR)
        return node

    def _parent(self, path: str, doing: str) -> tuple[SimDirectory, str]:
        above, _, name = path.rpartition("/")
        directory = self._find(above)
        if not isinstance(directory, SimDirectory):
            raise _error(doing, path, errno.ENOENT)
        return directory, name


class SimLock:
    """A lock that is held."""

    def __init__(self, locked: set[str], path: str) -> None:
        self._locked = locked
        self._path = path

    def require_held(self) -> None:
        if self._path not in self._locked:
            raise DirectoryInUse(f"{self._path}: taken over", hint="stop the other process")

    def release(self) -> None:
        self._locked.discard(self._path)


class SimFile:
    """An open file of the simulated file system."""

    def __init__(self, fs: SimFS, path: str, inode: SimInode, *, write: bool) -> None:
        self.path = path
        self._fs = fs
        self._inode = inode
        self._write = write

    def size(self) -> int:
        self._fs.begin("size", self.path)
        return len(self._inode.content)

    def pread(self, length: int, offset: int) -> bytes:
        self._fs.begin("pread", self.path)
        return bytes(self._inode.content[offset : offset + length])

    def pread_cached(self, length: int, offset: int) -> bytes | None:
        data = self.pread(length, offset)
        return data if len(data) == length else None

    def pwrite(self, buffers: Sequence[Bytes], offset: int) -> None:
        self._change("pwrite", offset, b"".join(buffers))

    def write_zeros(self, offset: int, length: int) -> None:
        self._change("write_zeros", offset, bytes(length))

    def truncate(self, size: int) -> None:
        self._begin("truncate")
        self._inode.change(size, bytes(max(0, len(self._inode.content) - size)), size)
        self._fs.end()

    def fdatasync(self) -> None:
        self._sync("fdatasync")
        if not self._fs.names(self.path, self._inode):
            raise deleted_error(self.path)

    def fsync(self) -> None:
        self._sync("fsync")

    def close(self) -> None:
        # an unfinished generator closes its file when it is collected
        if not self._fs.power_is_cut:
            self._fs.begin("close", self.path)

    def _change(self, name: str, offset: int, data: bytes) -> None:
        self._begin(name)
        before = len(self._inode.content)
        fits = data[: max(0, before - offset) + self._fs.free_bytes()]
        self._inode.change(offset, fits, max(before, offset + len(fits)))
        self._fs.end()
        if len(fits) < len(data):
            raise _error(name, self.path, errno.ENOSPC)

    def _begin(self, name: str) -> None:
        self._fs.begin(name, self.path)
        if not self._write:
            raise _error(name, self.path, errno.EBADF)

    def _sync(self, name: str) -> None:
        try:
            self._fs.begin(name, self.path)
        except BaseException:
            self._inode.fail_sync()
            raise
        self._fs.end()
        self._inode.sync()


def crash_points(
    disk: SimFS, run: Callable[[SimFS, H], object], history: Callable[[], H]
) -> Iterator[tuple[SimFS, H]]:
    """Run `run` on copies of `disk`, with a power cut at each change in turn.

    Yields the file system of each run, to be crashed or restarted, and its `history`.
    """
    for change in count(1):
        fs, record = disk.copy(), history()
        fs.crash_at = change
        try:
            run(fs, record)
        except PowerCut:
            yield fs, record
        else:
            return


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _error(doing: str, path: str, number: int) -> Exception:
    return store_error(doing, path, OSError(number, os.strerror(number)))
