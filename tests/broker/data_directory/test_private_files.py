"""Files of a data directory that other users of the machine leave alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq.broker.data_directory.first_admin import make_admin
from txmq.broker.data_directory.private_files import foreign_file, replace_file, require_private
from txmq.broker.data_directory.stored_reports import StoredReports
from txmq.errors import ConfigError, StoreError
from txmq.model.decider import DatabaseId
from txmq.store.filesystem import RealFileSystem, user_name
from txmq.tx.postgres.brokers import KnownReports
from txmq.wire.scram import make_verifier

DATABASE = DatabaseId(7, 5)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(*paths: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


@pytest.mark.usefixtures("no_umask")
def test_files_and_all_directories_are_made_for_their_owner(tmp_path: Path) -> None:
    data = tmp_path / "a" / "b" / "c"
    RealFileSystem().makedirs(f"{data}/")
    RealFileSystem().makedirs(str(data))
    assert modes(data, data.parent, data.parent.parent) == [0o700] * 3
    StoredReports(data).put(DATABASE, KnownReports(1, 2, remembered=True))
    replace_file(data / "directory", lambda inode: f"{inode}\n")
    assert modes(data / "reports", data / "directory") == [0o600] * 2
    assert (data / "directory").read_text() == f"{(data / 'directory').stat().st_ino}\n"
    assert StoredReports(data).get(DATABASE) == KnownReports(1, 2, remembered=True)


@pytest.mark.parametrize(
    ("mode", "refused"),
    [(0o700, 0), (0o750, 0), (0o755, 0), (0o2770, 0), (0o777, 1), (0o1777, 1), (0o702, 1)],
)
def test_a_directory_that_every_user_may_write_is_refused(
    tmp_path: Path, mode: int, refused: int
) -> None:
    data = tmp_path / "data"
    require_private(data)  # that will be made
    data.mkdir()
    data.chmod(mode)
    if not refused:
        require_private(data)
        return
    with pytest.raises(ConfigError, match=f"{mode:04o}") as raised:
        require_private(data)
    assert f"chmod 700 {data}" in raised.value.hint


def test_a_file_is_no_data_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"{file} is no directory"):
        require_private(file)
    with pytest.raises(ConfigError, match="Not a directory"):
        require_private(file / "data")


def test_an_admin_is_not_made_by_another_user_than_the_broker_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, fs, verifier = tmp_path / "data", RealFileSystem(), make_verifier("correct-horse")
    make_admin(fs, data, "root", verifier)  # in a new directory
    make_admin(fs, data, "root", verifier)
    files = sorted(data.rglob("*"))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to {user_name(os.getuid())}") as raised:
        make_admin(fs, data, "eve", verifier)
    assert f"run it as {user_name(os.getuid())}" in raised.value.hint
    assert sorted(data.rglob("*")) == files


def test_a_file_of_another_user_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    make_admin(RealFileSystem(), data, "root", make_verifier("correct-horse"))
    assert foreign_file(data) is None
    [segment] = (data / "log").glob("*.seg")
    monkeypatch.setattr(os, "access", lambda path, _mode: path != segment)
    assert foreign_file(data) == segment
    monkeypatch.setattr(os, "access", lambda path, _mode: path != data / "log")
    assert foreign_file(data) == data / "log"


def test_a_report_that_is_not_on_disk_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, later = KnownReports(1, 2, remembered=True), KnownReports(2, 3, remembered=True)
    reports = StoredReports(tmp_path)
    reports.put(DATABASE, known)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            reports.put(DATABASE, later)
    assert reports.get(DATABASE) == StoredReports(tmp_path).get(DATABASE) == known
    reports.put(DATABASE, later)
    assert StoredReports(tmp_path).get(DATABASE) == later
