"""The file system as the store uses it: a small Protocol, and the real one.

The one place that calls the kernel for the log and its snapshots, and the one place
where an OSError becomes one of ours: no space left is DiskFull, everything else
StoreError. `txmq.testing.simfs` is the same Protocol in memory, with power cuts;
tests/store/test_fs.py holds both to one contract.

Directories are made with mode 0700, files with 0600. Nothing is durable before its
fsync: not the contents of a file, not its name in the directory (`sync_directory`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from functools import wraps
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from txmq.errors import DirectoryInUse, DiskFull, StoreError

Bytes = bytes | memoryview

P = ParamSpec("P")
R = TypeVar("R")
_ZEROS = bytes(1 << 20)
_IOV_MAX = 1024  # Linux: buffers in one pwritev
_JOIN_LIMIT = (
    256 << 10
)  # above this, copying the buffers into one costs more than handing the kernel a list of them
# O_NOFOLLOW, O_NONBLOCK: nobody may plant a symbolic link in the data directory, nor a
# FIFO that opening waits for.
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class File(Protocol):
    """An open file. A call that returns has done all of its work; short reads happen
    only at the end of the file.
    """

    path: str

    def size(self) -> int:
        """The length in bytes."""

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes; fewer only where the file ends."""

    def pread_cached(self, length: int, offset: int) -> bytes | None:
        """As `pread`, but None where that would have to wait for the disk."""

    def pwrite(self, buffers: Sequence[Bytes], offset: int) -> None:
        """Write the buffers one after the other. After an error any part of them may
        have been written.
        """

    def write_zeros(self, offset: int, length: int) -> None:
        """Write zeros, so that the blocks belong to the file and later writes there
        change no metadata.
        """

    def truncate(self, size: int) -> None:
        """Cut the file."""

    def fdatasync(self) -> None:
        """Return when contents and length are on disk. After an error nothing is known
        of them; never try again.
        """

    def fsync(self) -> None:
        """As `fdatasync`, with all metadata."""

    def close(self) -> None:
        """Close the file; again is fine. It closes by itself when nobody refers to it
        any more.
        """


class Space(NamedTuple):
    """Of a disk, in bytes: its size, and what this process may still take."""

    size: int
    free: int


class Lock(Protocol):
    """A lock held until `release`, or until the process ends."""

    def release(self) -> None:
        """Let others have it; again is fine."""


class FileSystem(Protocol):
    """What the store asks of a file system."""

    def open(self, path: str, *, write: bool = False) -> File:
        """Open a regular file that exists."""

    def create(self, path: str) -> File:
        """Make a file that must not exist, open for writing. Its name is durable only
        after `sync_directory`.
        """

    def rename(self, source: str, target: str) -> None:
        """Give a file another name in one step, replacing what had it."""

    def remove(self, path: str) -> None:
        """Remove a file's name. Who has the file open can go on reading."""

    def listdir(self, path: str) -> list[str]:
        """The names in a directory, sorted; none if there is no such directory."""

    def makedirs(self, path: str) -> None:
        """Make a directory and those above it; fine if it exists."""

    def sync_directory(self, path: str) -> None:
        """Return when the names in the directory are on disk."""

    def space(self, path: str) -> Space:
        """What there is of the disk that a directory is on."""

    def lock(self, path: str) -> Lock:
        """Take the exclusive lock that the file `path` stands for. Raises
        DirectoryInUse at once if it is held.
        """


def store_error(doing: str, path: str, error: OSError) -> StoreError:
    """What an error of the operating system is called here."""
    text = f"{path}: {doing}: {error.strerror}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull(text, hint="free space on that disk, or raise its quota")
    if error.errno == errno.EMFILE:
        return StoreError(text, hint="raise the limit of open files (ulimit -n)")
    return StoreError(
        text, hint="see the kernel's messages about the disk, and the owner and mode of the path"
    )


def _translated(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator: OSErrors of a method leave it as errors of ours."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except OSError as error:
            path = error.filename or getattr(args[0], "path", "")
            raise store_error(method.__name__, str(path), error) from error

    return call


class RealFile:
    """An open file of the operating system."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path, self._fd = path, fd

    def __del__(self) -> None:
        # A file dropped from a cache may still be read by another thread: whoever lets
        # go of it last closes it.
        if self._fd >= 0:
            os.close(self._fd)

    @_translated
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    @_translated
    def pread(self, length: int, offset: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) == length:
            return data
        parts = [data]
        while data and (missing := length - sum(map(len, parts))):
            data = os.pread(self._fd, missing, offset + length - missing)
            parts.append(data)
        return b"".join(parts)

    @_translated
    def pread_cached(self, length: int, offset: int) -> bytes | None:
        buffer = bytearray(length)
        try:
            got = os.preadv(self._fd, [buffer], offset, os.RWF_NOWAIT)
        except OSError as error:
            # Not every file system knows the flag; there every read may wait.
            if error.errno in {errno.EAGAIN, errno.EOPNOTSUPP}:
                return None
            raise
        return bytes(buffer) if got == length else None

    @_translated
    def pwrite(self, buffers: Sequence[Bytes], offset: int) -> None:
        if sum(map(len, buffers)) <= _JOIN_LIMIT:
            self._pwritev([b"".join(buffers)], offset)
            return
        for first in range(0, len(buffers), _IOV_MAX):
            some = buffers[first : first + _IOV_MAX]
            self._pwritev(some, offset)
            offset += sum(map(len, some))

    def _pwritev(self, buffers: Sequence[Bytes], offset: int) -> None:
        written = os.pwritev(self._fd, buffers, offset)
        left = sum(map(len, buffers)) - written
        if not left:
            return
        # The kernel may stop anywhere, at a signal or a limit: join what is left and go
        # on.
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            offset += written
            written = os.pwrite(self._fd, rest, offset)
            rest = rest[written:]

    @_translated
    def write_zeros(self, offset: int, length: int) -> None:
        zeros = memoryview(_ZEROS)
        while length > 0:
            written = os.pwrite(self._fd, zeros[:length], offset)
            offset, length = offset + written, length - written

    @_translated
    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    @_translated
    def fdatasync(self) -> None:
        os.fdatasync(self._fd)

    @_translated
    def fsync(self) -> None:
        os.fsync(self._fd)

    @_translated
    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class RealLock:
    """A held flock."""

    __slots__ = ("_file",)

    def __init__(self, file: RealFile) -> None:
        self._file = file

    def release(self) -> None:
        self._file.close()


class RealFileSystem:
    """The operating system's files."""

    @_translated
    def open(self, path: str, *, write: bool = False) -> File:
        return _regular(path, os.open(path, _OPEN | (os.O_RDWR if write else os.O_RDONLY)))

    @_translated
    def create(self, path: str) -> File:
        return RealFile(path, os.open(path, _OPEN | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))

    @_translated
    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    @_translated
    def remove(self, path: str) -> None:
        os.unlink(path)

    @_translated
    def listdir(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    @_translated
    def makedirs(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    @_translated
    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @_translated
    def space(self, path: str) -> Space:
        found = os.statvfs(path)
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    @_translated
    def lock(self, path: str) -> Lock:
        fd = os.open(path, _OPEN | os.O_RDWR | os.O_CREAT, 0o600)
        file = _regular(path, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise DirectoryInUse(
                f"{os.path.dirname(path)}: in use by another process, number {holder}",
                hint="stop that process, or give this one a data directory of its own",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return RealLock(file)


def _regular(path: str, fd: int) -> RealFile:
    file = RealFile(path, fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise StoreError(
            f"{path}: not a regular file",
            hint="something else was put where the store keeps its data",
        )
    return file
