"""The process that looks for damage of an index."""

from __future__ import annotations

from pathlib import Path

import pytest

from txmq.store.filesystem import RealFileSystem
from txmq.store.index import digest


def open_files_below(directory: Path) -> str:
    """Return the files there that this process has open."""
    files = [fd.resolve() for fd in Path("/proc/self/fd").iterdir()]
    return ", ".join(str(file) for file in files if file.is_relative_to(directory))


def test_who_looks_for_damage_holds_no_lock_of_a_broker_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RealFileSystem().lock(str(tmp_path / "lock"))
    assert open_files_below(tmp_path)
    monkeypatch.setattr(digest, "walk", open_files_below)
    assert digest.find_damage(tmp_path) == ""
    lock.release()
