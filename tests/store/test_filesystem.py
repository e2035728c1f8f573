"""One contract for the real file system and the simulated one.

The real one's use of the kernel is tested at the end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.store.simfs import SimFS
from txmq.errors import DirectoryInUse, DiskFull, StoreError
from txmq.store import filesystem
from txmq.store.filesystem import (
    Bytes,
    File,
    FileSystem,
    RealFileSystem,
    store_error,
    user_name,
)
from txmq.store.index.environment import translate_errors


@pytest.fixture(params=["real", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FileSystem, str]:
    """A file system and a directory in it."""
    if request.param == "real":
        return RealFileSystem(), str(tmp_path)
    fs = SimFS()
    fs.makedirs("/data")
    return fs, "/data"


def contents(file: File) -> bytes:
    return file.pread(1 << 20, 0)


def test_what_is_written_is_read(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    file = fs.create(f"{directory}/a")
    file.pwrite([b"one", memoryview(b"two"), b""], 0)
    file.pwrite([b"X"], 1)
    assert contents(file) == b"oXetwo"
    assert file.pread(3, 2) == b"etw"
    assert file.pread(100, 4) == b"wo"
    assert file.pread(4, 100) == b""
    assert (file.size(), file.path) == (6, f"{directory}/a")
    file.close()
    assert contents(fs.open(f"{directory}/a")) == b"oXetwo"


def test_the_space_that_is_left_is_known(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    before = fs.space(directory)
    assert 0 < before.free <= before.size
    with pytest.raises(StoreError):
        fs.space(f"{directory}/missing")


def test_a_cached_read_gives_all_or_nothing(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    file = fs.create(f"{directory}/a")
    file.pwrite([b"cached"], 0)
    assert file.pread_cached(4, 2) in {b"ched", None}
    assert file.pread_cached(100, 0) is None


def test_writing_beyond_the_end_leaves_zeros(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    file = fs.create(f"{directory}/a")
    file.pwrite([b"x"], 3)
    file.write_zeros(5, 2)
    assert contents(file) == b"\0\0\0x\0\0\0"


def test_many_and_large_buffers_arrive_in_order(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    buffers = [bytes([n % 251]) * (n % 7) for n in range(3_000)]
    large: list[Bytes] = [b"a" * 300_000, b"b", memoryview(b"c" * 300_000)]
    file = fs.create(f"{directory}/a")
    file.pwrite(buffers, 0)
    file.pwrite([*large, *buffers], 10_000)
    joined = b"".join(buffers)
    assert file.pread(len(joined), 0) == joined
    assert file.pread(1 << 20, 10_000) == b"".join([*large, *buffers])


def test_a_cut_file_grows_again_with_zeros(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    file = fs.create(f"{directory}/a")
    file.pwrite([b"abcdef"], 0)
    file.truncate(2)
    file.pwrite([b"x"], 4)
    file.fdatasync()
    file.fsync()
    assert contents(file) == b"ab\0\0x"


def test_names_are_made_changed_and_removed(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    for name in ("b", "a"):
        fs.create(f"{directory}/{name}").pwrite([name.encode()], 0)
    assert fs.listdir(directory) == ["a", "b"]
    fs.rename(f"{directory}/a", f"{directory}/b")
    assert fs.listdir(directory) == ["b"]
    opened = fs.open(f"{directory}/b")
    fs.remove(f"{directory}/b")
    fs.sync_directory(directory)
    assert fs.listdir(directory) == []
    assert contents(opened) == b"a"


def test_directories_are_made_with_those_above(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    fs.makedirs(f"{directory}/x/y")
    fs.makedirs(f"{directory}/x/y")
    fs.create(f"{directory}/x/y/z")
    assert (fs.listdir(f"{directory}/x"), fs.listdir(f"{directory}/x/y")) == (["y"], ["z"])
    assert fs.listdir(f"{directory}/none") == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda fs, directory: fs.open(f"{directory}/none"),
        lambda fs, directory: fs.open(directory),
        lambda fs, directory: fs.create(f"{directory}/there"),
        lambda fs, directory: fs.create(f"{directory}/none/x"),
        lambda fs, directory: fs.remove(f"{directory}/none"),
        lambda fs, directory: fs.rename(f"{directory}/none", f"{directory}/x"),
        lambda fs, directory: fs.makedirs(f"{directory}/there/x"),
        lambda fs, directory: fs.sync_directory(f"{directory}/none"),
        lambda fs, directory: fs.open(f"{directory}/there").pwrite([b"x"], 0),
    ],
)
def test_a_failed_call_is_a_store_error(
    place: tuple[FileSystem, str], wrong: Callable[[FileSystem, str], object]
) -> None:
    fs, directory = place
    fs.create(f"{directory}/there").close()
    with pytest.raises(StoreError, match=directory) as raised:
        wrong(fs, directory)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, f"this process runs as {user_name(os.geteuid())}: run it as the owner"),
        (errno.EPERM, f"this process runs as {user_name(os.geteuid())}: run it as the owner"),
        (errno.ENOTDIR, "it leads through a file: name a directory"),
        (errno.EIO, "check the kernel's messages"),
    ],
)
def test_an_error_of_the_system_says_what_to_do_about_it(number: int, hint: str) -> None:
    error = store_error("open", "/data/x", OSError(number, os.strerror(number)))
    assert error.hint.startswith(hint)
    with pytest.raises(StoreError) as raised, translate_errors(Path("/data/index")):
        raise OSError(number, os.strerror(number))
    assert raised.value.hint.startswith(hint) is (number in {errno.EACCES, errno.EPERM})


def test_a_full_disk_has_a_lock_whose_holder_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = str(tmp_path / "lock")
    RealFileSystem().lock(path).release()
    create = filesystem._create_locked

    def create_in_the_room_of_the_old(new: str) -> int:
        assert Path(path).stat().st_size == 0
        return create(new)

    monkeypatch.setattr(filesystem, "_create_locked", create_in_the_room_of_the_old)
    monkeypatch.setattr(os, "pwrite", full)
    lock = RealFileSystem().lock(path)
    with pytest.raises(DirectoryInUse, match="in use by the process unknown"):
        RealFileSystem().lock(path)
    lock.release()


def test_a_user_without_a_name_has_a_number() -> None:
    assert user_name(0) == "user root"
    assert user_name(3_999_999_999) == "user 3999999999"


def test_a_lock_is_held_by_one(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    lock = fs.lock(f"{directory}/lock")
    with pytest.raises(DirectoryInUse) as raised:
        fs.lock(f"{directory}/lock")
    assert raised.value.hint
    lock.release()
    lock.release()
    fs.lock(f"{directory}/lock").release()


def test_a_directory_stays_locked_when_its_lock_file_is_removed(tmp_path: Path) -> None:
    fs, path = RealFileSystem(), tmp_path / "lock"
    lock = fs.lock(str(path))
    path.unlink()
    with pytest.raises(DirectoryInUse, match="in use by the process unknown"):
        fs.lock(str(path))
    lock.require_held()
    assert path.read_text() == f"{os.getpid()}\n", "it is there again"
    with pytest.raises(DirectoryInUse, match=f"in use by the process {os.getpid()}"):
        fs.lock(str(path))
    lock.release()
    fs.lock(str(path)).release()


def test_a_holder_finds_out_that_another_process_has_replaced_its_file(tmp_path: Path) -> None:
    """As on a file system where the two do not see each other's flocks."""
    fs, path = RealFileSystem(), tmp_path / "lock"
    lock = fs.lock(str(path))
    lock.require_held()
    (tmp_path / "other").write_text("4711\n")
    (tmp_path / "other").rename(path)
    with pytest.raises(DirectoryInUse, match="taken over by the process 4711"):
        lock.require_held()
    lock.release()
    again = fs.lock(str(path))
    again.require_held()
    assert path.read_text() == f"{os.getpid()}\n", "each holder has a file of its own"


def test_files_and_directories_are_the_owners_alone(tmp_path: Path) -> None:
    fs = RealFileSystem()
    fs.makedirs(f"{tmp_path}/x")
    fs.create(f"{tmp_path}/x/file").close()
    fs.lock(f"{tmp_path}/x/lock").release()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("x", "x/file", "x/lock")]
    assert modes == [0o700, 0o600, 0o600]


def test_the_holder_of_a_lock_is_named(tmp_path: Path) -> None:
    fs = RealFileSystem()
    lock = fs.lock(f"{tmp_path}/lock")
    with pytest.raises(DirectoryInUse, match=str(os.getpid())):
        fs.lock(f"{tmp_path}/lock")
    lock.release()


def test_links_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    fs = RealFileSystem()
    for path in (f"{tmp_path}/link", f"{tmp_path}/pipe", "/dev/null"):
        with pytest.raises(StoreError, match=path):
            fs.open(path)
        with pytest.raises(StoreError, match=path):
            fs.lock(path)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EIO, StoreError),
        (errno.EMFILE, StoreError),
    ],
)
def test_errors_of_the_system_are_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[StoreError]
) -> None:
    file = RealFileSystem().create(f"{tmp_path}/a")

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StoreError, match=os.strerror(number)) as raised:
        file.fdatasync()
    assert type(raised.value) is error
    assert raised.value.hint


def test_a_sync_does_not_ask_for_the_times_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RealFileSystem().create(f"{tmp_path}/a")
    with monkeypatch.context() as patched:
        patched.delattr(os, "fstat")
        file.fdatasync()


def test_a_write_that_the_kernel_cuts_short_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, pwrite = os.pwritev, os.pwrite
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, offset: pwritev(fd, [b"".join(buffers)[:5]], offset)
    )
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    file = RealFileSystem().create(f"{tmp_path}/a")
    file.pwrite([b"0123456", b"789", b"abcdef"], 2)
    file.write_zeros(30, 7)
    assert contents(file) == b"\0\0" + b"0123456789abcdef" + bytes(19)


def test_a_read_that_the_kernel_cuts_short_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RealFileSystem().create(f"{tmp_path}/a")
    file.pwrite([b"0123456789"], 0)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 3), offset))
    assert file.pread(8, 1) == b"12345678"
    assert file.pread(100, 1) == b"123456789"


def test_a_cached_read_without_the_kernels_help_waits_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RealFileSystem().create(f"{tmp_path}/a")
    file.pwrite([b"data"], 0)
    for number in (errno.EAGAIN, errno.EOPNOTSUPP):

        def refuse(*_: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "preadv", refuse)
        assert file.pread_cached(4, 0) is None


def is_open(path: str) -> bool:
    found = list[str]()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # another thread has closed it
            found.append(str(one.readlink()))
    return path in found


def test_a_file_nobody_refers_to_is_closed(tmp_path: Path) -> None:
    file = RealFileSystem().create(f"{tmp_path}/a")
    assert is_open(f"{tmp_path}/a")
    del file
    assert not is_open(f"{tmp_path}/a")


def test_only_an_empty_directory_is_removed(place: tuple[FileSystem, str]) -> None:
    fs, directory = place
    below = f"{directory}/below"
    fs.makedirs(below)
    fs.create(f"{below}/a").close()
    with pytest.raises(StoreError):
        fs.remove_directory(below)
    fs.remove(f"{below}/a")
    fs.remove_directory(below)
    assert fs.listdir(directory) == []
    with pytest.raises(StoreError):
        fs.remove_directory(below)
