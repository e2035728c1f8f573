"""The process that looks for damage of an index."""

from __future__ import annotations

import gc
import os
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


def test_the_garbage_of_its_parent_closes_nothing_in_the_process_that_walks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = str(tmp_path / "file")
    file = RealFileSystem().create(text)
    number = file._fd  # type: ignore[attr-defined]  # what a finalizer closes
    circle: list[object] = [file]
    circle.append(circle)

    def walk(_path: Path) -> str:
        os.dup2(os.open(text, os.O_RDONLY), number)
        gc.collect()
        os.fstat(number)
        return ""

    monkeypatch.setattr(digest, "walk", walk)
    gc.disable()
    try:
        del file, circle
        assert digest.find_damage(tmp_path) == ""
    finally:
        gc.enable()
