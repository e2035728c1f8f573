"""A data directory whose log is gone is told apart from a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from txmq.broker.data_directory.storage import open_directory
from txmq.config.broker import BrokerSettings
from txmq.errors import CorruptRecord
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.segment import read_log_id
from txmq.store.snapshot import write_snapshot

FS = RealFileSystem()


def started(data: Path) -> None:
    """Start in a directory, and stop at once."""
    opened = open_directory(FS, BrokerSettings(data=data), 1)
    opened.tables.close()
    opened.log.close()


def files_of(data: Path) -> set[Path]:
    return {path.relative_to(data) for path in data.rglob("*.*") if path.is_file()}


@pytest.mark.parametrize("log", ["emptied", "gone", "blank"])
def test_an_index_without_its_log_is_refused_and_left_alone(tmp_path: Path, log: str) -> None:
    """As where the log has a disk of its own, and that one is not mounted."""
    data = tmp_path / "data"
    started(data)
    [segment] = (data / "log").iterdir()
    if log == "gone":
        shutil.rmtree(data / "log")
    elif log == "emptied":
        segment.unlink()
    else:
        segment.write_bytes(bytes(segment.stat().st_size))
    before = files_of(data)
    for _ in range(2):
        with pytest.raises(
            CorruptRecord, match=r"log is missing, from which .*/index was"
        ) as found:
            started(data)
        assert "mount its disk" in str(found.value)
    assert files_of(data) == before


def test_a_snapshot_without_its_log_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    started(data)
    log_id = read_log_id(FS, str(data))
    assert log_id is not None
    write_snapshot(FS, str(data), log_id, 64, iter(()))
    for name in ("log", "index"):
        shutil.rmtree(data / name)
    with pytest.raises(CorruptRecord, match=r"log is missing, from which .*/snapshot was"):
        started(data)


def test_a_first_start_that_ended_before_its_log_is_begun_anew(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("log", "index", "snapshot"):
        (data / name).mkdir(parents=True)
    (data / "lock").touch()
    started(data)
    assert read_log_id(FS, str(data)) is not None
