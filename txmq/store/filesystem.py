"""File system as a Protocol, and its implementation by the operating system.

Only this module calls the kernel for the log and the snapshots. Only this module turns
an OSError into an error of txmq: DiskFull where no space is left, else StoreError.
`tests.store.simfs` implements the same Protocol in memory, with power cuts;
tests/store/test_filesystem.py holds both to one contract.

Directories get mode 0700, files 0600. Nothing is durable before its fsync: neither the
contents of a file nor its name in the directory (`sync_directory`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pwd
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Final, NamedTuple, ParamSpec, Protocol, TypeVar

from txmq.errors import DirectoryInUse, DiskFull, StoreError

Bytes = bytes | memoryview

P = ParamSpec("P")
R = TypeVar("R")
_ZEROS = bytes(1 << 20)
_IOV_MAX = 1024  # Linux: buffers in one pwritev
# Above this size, one joined buffer costs more than a list of buffers for the kernel.
_JOIN_LIMIT = 256 << 10
# O_NOFOLLOW, O_NONBLOCK: a symbolic link or a FIFO that was planted in the data
# directory is an error, and opening never waits.
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# statx(2); FORCE_SYNC: the file system of a mount asks its server
_STATX: Final = getattr(ctypes.CDLL(None), "statx", None)
_AT_EMPTY_PATH, _AT_STATX_FORCE_SYNC, _STATX_NLINK = 0x1000, 0x2000, 0x4
_STATX_BYTES, _STX_NLINK = 256, slice(16, 20)


class ReadableFile(Protocol):
    """An open file, for reading.

    Each call does all of its work; reads are short only at the end of the file.
    """

    path: str

    def size(self) -> int:
        """Return the length in bytes."""

    def pread(self, length: int, offset: int) -> bytes:
        """Return `length` bytes; fewer only where the file ends."""

    def close(self) -> None:
        """Close the file. Idempotent.

        A file without references closes itself.
        """


class File(ReadableFile, Protocol):
    """An open file of the file system."""

    def pread_cached(self, length: int, offset: int) -> bytes | None:
        """Return as `pread` does, but None where it would have to wait for the disk."""

    def pwrite(self, buffers: Sequence[Bytes], offset: int) -> None:
        """Write the buffers in sequence. After an error any part may be written."""

    def write_zeros(self, offset: int, length: int) -> None:
        """Write zeros.

        The blocks then belong to the file, so that later writes there change no
        metadata.
        """

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""

    def fdatasync(self) -> None:
        """Return once contents and length are on disk, in a file that has a name: they
        would end with this process where somebody has deleted it.

        After an error their state is unknown; do not retry.
        """

    def fsync(self) -> None:
        """Return as `fdatasync` does, with all metadata on disk."""


class Space(NamedTuple):
    """Bytes of a disk: its size, and the bytes that this process may still allocate."""

    size: int
    free: int


class FileLock(Protocol):
    """A lock held until `release`, or until the process ends."""

    def require_held(self) -> None:
        """Require that no other process has taken the place of this one, though it
        could not see the lock. Raises DirectoryInUse.
        """

    def release(self) -> None:
        """Release the lock. Idempotent."""


class FileSystem(Protocol):
    """The file system calls of the store."""

    def open(self, path: str, *, write: bool = False) -> File:
        """Open a regular file that exists."""

    def create(self, path: str) -> File:
        """Create a file that must not exist, open for writing.

        Its name is durable only after `sync_directory`.
        """

    def rename(self, source: str, target: str) -> None:
        """Rename a file atomically, replacing a file of the new name."""

    def remove(self, path: str) -> None:
        """Remove a file's name. Readers that have the file open can still read it."""

    def listdir(self, path: str) -> list[str]:
        """Return the sorted names in a directory, none if it does not exist."""

    def makedirs(self, path: str) -> None:
        """Create a directory and its parents, where they do not exist."""

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""

    def sync_directory(self, path: str) -> None:
        """Return once the names in the directory are on disk."""

    def space(self, path: str) -> Space:
        """Return the space of the disk that holds a directory."""

    def lock(self, path: str) -> FileLock:
        """Acquire the exclusive lock of the file `path`.

        Raises DirectoryInUse at once if another process holds it.
        """


def store_error(doing: str, path: str, error: OSError) -> StoreError:
    """Return the StoreError for an error of the operating system."""
    text = f"{path}: {doing}: {error.strerror}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull(text, hint="free space on that disk, or raise the quota")
    if error.errno == errno.EMFILE:
        return StoreError(text, hint="raise the limit of open files (ulimit -n)")
    if error.errno == errno.EFBIG:
        return StoreError(text, hint="raise the limit of file sizes (ulimit -f)")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return StoreError(text, hint=not_permitted())
    if error.errno == errno.ENOTDIR:
        return StoreError(text, hint="it leads through a file: name a directory, or move the file")
    return StoreError(
        text, hint="check the kernel's messages about the disk, and owner and mode of the path"
    )


def not_permitted() -> str:
    """Return what to do where this process may not do something with a file."""
    return (
        f"this process runs as {user_name(os.geteuid())}: run it as the owner of the files, "
        "or give them to it (chown -R)"
    )


def user_name(number: int) -> str:
    """Return the name of a user of the machine, or the number where there is none."""
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:  # a container's user may have no name
        return f"user {number}"


def deleted_error(path: str) -> StoreError:
    """Return the error for an open file whose last name somebody has removed."""
    return StoreError(
        f"{path}: somebody has deleted it while this process was writing to it",
        hint="restore it from a backup; nothing else may clean up in that directory",
    )


def _translate_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method so that its OSErrors become errors of txmq."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except OSError as error:
            # one of a file that is open, such as a full disk's, names none
            given = next((one for one in args[1:] if isinstance(one, str)), "")
            path = error.filename or getattr(args[0], "path", given)
            raise store_error(method.__name__, str(path), error) from error

    return call


class RealFile:
    """An open file of the operating system."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path, self._fd = path, fd

    def __del__(self) -> None:
        # Another thread may still read a file that a cache has dropped: the last
        # reference closes it.
        if self._fd >= 0:
            os.close(self._fd)

    @_translate_errors
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    @_translate_errors
    def pread(self, length: int, offset: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) == length:
            return data
        chunks = [data]
        while data and (missing := length - sum(map(len, chunks))):
            data = os.pread(self._fd, missing, offset + length - missing)
            chunks.append(data)
        return b"".join(chunks)

    @_translate_errors
    def pread_cached(self, length: int, offset: int) -> bytes | None:
        buffer = bytearray(length)
        try:
            got = os.preadv(self._fd, [buffer], offset, os.RWF_NOWAIT)
        except OSError as error:
            # Some file systems do not support the flag: there every read may wait.
            if error.errno in {errno.EAGAIN, errno.EOPNOTSUPP}:
                return None
            raise
        return bytes(buffer) if got == length else None

    @_translate_errors
    def pwrite(self, buffers: Sequence[Bytes], offset: int) -> None:
        if sum(map(len, buffers)) <= _JOIN_LIMIT:
            self._pwritev([b"".join(buffers)], offset)
            return
        for first in range(0, len(buffers), _IOV_MAX):
            group = buffers[first : first + _IOV_MAX]
            self._pwritev(group, offset)
            offset += sum(map(len, group))

    def _pwritev(self, buffers: Sequence[Bytes], offset: int) -> None:
        written = os.pwritev(self._fd, buffers, offset)
        remaining = sum(map(len, buffers)) - written
        if not remaining:
            return
        # The kernel may stop anywhere, at a signal or a limit.
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            offset += written
            written = os.pwrite(self._fd, rest, offset)
            rest = rest[written:]

    @_translate_errors
    def write_zeros(self, offset: int, length: int) -> None:
        zeros = memoryview(_ZEROS)
        while length > 0:
            written = os.pwrite(self._fd, zeros[:length], offset)
            offset, length = offset + written, length - written

    @_translate_errors
    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    @_translate_errors
    def fdatasync(self) -> None:
        os.fdatasync(self._fd)
        if not _has_name(self._fd):
            raise deleted_error(self.path)

    @_translate_errors
    def fsync(self) -> None:
        os.fsync(self._fd)

    @_translate_errors
    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class RealLock:
    """A held lock: the flocks of a directory, and of a file in it.

    A file can be removed, and another one locked in its place; so the directory is
    locked, too. Where processes do not see each other's flocks, as on some network file
    systems, the file tells: each new holder replaces it.
    """

    __slots__ = ("_directory", "_file", "_path")

    def __init__(self, path: str, directory: int, file: int) -> None:
        self._path, self._directory, self._file = path, directory, file

    @_translate_errors
    def require_held(self) -> None:
        if os.fstat(self._file).st_nlink:
            return
        try:  # it was only removed, or somebody has put another one there
            file = _create_locked(self._path)
        except FileExistsError:
            raise _in_use(self._path, "has been taken over by") from None
        os.close(self._file)
        self._file = file

    def release(self) -> None:
        for fd in (self._file, self._directory):
            if fd >= 0:
                os.close(fd)
        self._file = self._directory = -1


class RealFileSystem:
    """The operating system's files."""

    @_translate_errors
    def open(self, path: str, *, write: bool = False) -> File:
        return _regular(path, os.open(path, _OPEN | (os.O_RDWR if write else os.O_RDONLY)))

    @_translate_errors
    def create(self, path: str) -> File:
        return RealFile(path, os.open(path, _OPEN | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))

    @_translate_errors
    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    @_translate_errors
    def remove(self, path: str) -> None:
        os.unlink(path)

    @_translate_errors
    def listdir(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    @_translate_errors
    def makedirs(self, path: str) -> None:
        _make_directories(path)

    @_translate_errors
    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    @_translate_errors
    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @_translate_errors
    def space(self, path: str) -> Space:
        stats = os.statvfs(path)
        return Space(stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize)

    @_translate_errors
    def lock(self, path: str) -> FileLock:
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return RealLock(path, directory, _replace_locked(path, directory))
        except BaseException:
            os.close(directory)
            raise


def _make_directories(path: str) -> None:
    """Make a directory and those above it, all of them for their owner alone.

    `os.makedirs` leaves the modes of those above to the umask, under which every user
    could perhaps put another directory in the place of the last one.
    """
    above = os.path.dirname(path.rstrip("/"))
    if above and not os.path.exists(above):
        _make_directories(above)
    try:
        os.mkdir(path, 0o700)
    except OSError:
        if not os.path.isdir(path):
            raise


def _replace_locked(path: str, directory: int) -> int:
    """Lock the directory, and put another file in place of the last holder's. Return
    the new one, open and locked.
    """
    if not _flock(directory):
        raise _in_use(path, "in use by")
    with suppress(FileNotFoundError):
        old = os.open(path, _OPEN | os.O_RDONLY)
        try:
            _require_regular(path, old)
            os.truncate(path, 0)  # gives its room to the new one, on a full disk
        finally:
            os.close(old)
    with suppress(FileNotFoundError):  # of a process that died here
        os.unlink(f"{path}.new")
    new = _create_locked(f"{path}.new")
    os.rename(f"{path}.new", path)
    return new


def _create_locked(path: str) -> int:
    fd = os.open(path, _OPEN | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _flock(fd)
    with suppress(OSError):  # on a full disk the holder has no name
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(path: str, how: str) -> DirectoryInUse:
    holder = "unknown"
    with suppress(OSError), open(path, "rb") as file:
        holder = file.read(32).decode("ascii", "replace").strip() or holder
    return DirectoryInUse(
        f"{os.path.dirname(path)}: {how} the process {holder}",
        hint="stop that process, or give this one a directory of its own",
    )


def _has_name(fd: int) -> bool:
    """Return whether somebody can still find a file that is being written.

    It must not ask for the file's times, as `fstat` does: from Linux 6.13 on the next
    write would get a time of its own, which the kernel journals, and its sync would
    take half as long again (docs/decisions/0005).
    """
    found, flags = ctypes.create_string_buffer(_STATX_BYTES), _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC
    if _STATX is None or _STATX(fd, b"", flags, _STATX_NLINK, found):
        return os.fstat(fd).st_nlink > 0  # the system, or a filter of its calls, lacks it
    return int.from_bytes(found.raw[_STX_NLINK], sys.byteorder) > 0


def _regular(path: str, fd: int) -> RealFile:
    file = RealFile(path, fd)  # which closes it
    _require_regular(path, fd)
    return file


def _require_regular(path: str, fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise StoreError(
            f"{path}: not a regular file",
            hint="remove it: the data directory holds regular files only",
        )
