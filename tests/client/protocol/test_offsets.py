"""Positions in files: saved and loaded by one process at a time, for one log."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from threading import Thread
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txmq.client.protocol.offsets import FileOffsets, Offsets, OffsetsByLog
from txmq.errors import ConfigError, LocalProtocolError, LogChanged, StoreError

LOG, OTHER = UUID(int=1), UUID(int=2)
PLACES = {("orders", 0): 7, ("orders", 11): 0, ("refunds", 3): 1 << 40}
TOPICS = st.sampled_from(["orders", "a.b-c", "T_1"])


@pytest.fixture
def store(tmp_path: Path) -> FileOffsets:
    return FileOffsets(tmp_path / "offsets")


def test_a_new_name_has_no_positions(store: FileOffsets) -> None:
    assert store.load("r", LOG) == {}


def test_saved_positions_are_loaded_by_the_next_process(store: FileOffsets, tmp_path: Path) -> None:
    store.load("r", LOG)
    store.save("r", LOG, {("orders", 0): 1})
    store.save("r", LOG, PLACES)
    store.close()
    again = FileOffsets(tmp_path / "offsets")
    assert again.load("r", LOG) == PLACES
    assert again.load("other", LOG) == {}
    again.close()
    assert sorted(path.name for path in (tmp_path / "offsets").glob("r.*")) == ["r.json", "r.lock"]


@settings(max_examples=25)
@given(offsets=st.dictionaries(st.tuples(TOPICS, st.integers(0, 4_095)), st.integers(0, 1 << 62)))
def test_any_positions_can_be_saved(
    tmp_path_factory: pytest.TempPathFactory, offsets: dict[tuple[str, int], int]
) -> None:
    store = FileOffsets(tmp_path_factory.mktemp("offsets"))
    store.load("r", LOG)
    store.save("r", LOG, offsets)
    assert store.load("r", LOG) == offsets
    store.close()


def test_a_name_in_use_is_refused_until_it_is_free(store: FileOffsets, tmp_path: Path) -> None:
    store.load("r", LOG)
    other = FileOffsets(tmp_path / "offsets")
    with pytest.raises(ConfigError, match="already"):
        other.load("r", LOG)
    store.close()
    assert other.load("r", LOG) == {}
    other.close()


def test_positions_of_another_log_are_refused(store: FileOffsets) -> None:
    store.load("r", LOG)
    store.save("r", LOG, PLACES)
    with pytest.raises(LogChanged, match="log"):
        store.load("r", OTHER)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"version": 3, "log_id": "x", "offsets": {}}',
        '{"version": 1, "log_id": "x", "offsets": {"t": {"0": -1}}}',
        '{"version": 1, "log_id": "x"}',
    ],
)
def test_a_file_without_positions_is_refused(store: FileOffsets, tmp_path: Path, text: str) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "r.json").write_text(text)
    with pytest.raises(ConfigError, match="no positions"):
        store.load("r", LOG)


def test_a_write_that_was_cut_short_leaves_what_was_there(
    store: FileOffsets, tmp_path: Path
) -> None:
    store.load("r", LOG)
    store.save("r", LOG, PLACES)
    (tmp_path / "offsets" / "r.tmp").write_text("{")
    assert store.load("r", LOG) == PLACES


def test_names_are_checked(store: FileOffsets) -> None:
    with pytest.raises(LocalProtocolError):
        store.load("../r", LOG)


def test_an_unusable_directory_is_reported_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file: .*\(positions need"):
        FileOffsets(tmp_path / "file").load("r", LOG)


def test_a_full_disk_keeps_what_was_saved_last(
    store: FileOffsets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store.load("r", LOG)
    store.save("r", LOG, PLACES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            store.save("r", LOG, {("orders", 0): 8})
    store.close()
    assert FileOffsets(tmp_path / "offsets").load("r", LOG) == PLACES


def test_one_thread_at_a_time_uses_the_store_of_a_reader_of_several_logs() -> None:
    beside, overlaps = list[Thread](), list[bool]()

    class Slow:
        def load(self, name: str, log_id: UUID) -> Offsets:
            beside.append(Thread(target=by_log.save, args=("r", OTHER, {})))
            beside[0].start()
            beside[0].join(0.05)
            overlaps.append(bool(saved))
            return {}

        def save(self, name: str, log_id: UUID, offsets: Offsets) -> None:
            saved.append(name)

        def close(self) -> None: ...

    saved = list[str]()
    by_log = OffsetsByLog(Slow())
    by_log.load("r", LOG)
    beside[0].join()
    assert overlaps == [False]
    assert saved == [f"r.{OTHER}"]
