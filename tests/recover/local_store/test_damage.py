"""Damage on disk: reported, what is whole is served, and the rest is given back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recover.local_store.model import FOREVER
from tests.recover.local_store.stores import (
    FAILURE,
    TOPIC,
    acked,
    message,
    offsets,
    open_store,
    place,
    stored,
)
from txmq.client.protocol.consumer.store_jobs import damage_alarm
from txmq.errors import CorruptRecord, StoreClosed, StoreError, UnsupportedFormat
from txmq.recover.local_store import LocalStore, State, StoreReport
from txmq.recover.local_store.records import (
    CHANGED,
    FORGOTTEN,
    RELEASED,
    STORED,
    TOLD,
    StoredHead,
    encode_stored,
)
from txmq.store.log.record import encode_start
from txmq.store.tables import IndexDamaged


def test_a_store_whose_log_is_gone_says_so(tmp_path: Path) -> None:
    path = filled(tmp_path)
    for folder in ("log", "index"):
        shutil.rmtree(path / folder)
    store, report = open_store(tmp_path)
    store.close()
    assert report.emptied
    assert "the log is gone" in report.findings()[0]
    assert damage_alarm("orders", report) is not None
    store, report = open_store(tmp_path)
    store.close()
    assert not report.emptied


def filled(tmp_path: Path, count: int = 9) -> Path:
    """Return the directory of a closed store with messages 1 to `count`."""
    store, _ = open_store(tmp_path)
    for offset in range(1, count + 1):
        store.put([(message(offset, body=b"%d-" % offset * 100), offset, FAILURE)])
    store.record(acked(1))
    store.close()
    return Path(store.path)


def segment(directory: Path) -> Path:
    return next(iter(sorted((directory / "log").glob("*.seg"))))


def flip(path: Path, text: bytes) -> None:
    """Change a byte of a text in a file."""
    data = bytearray(path.read_bytes())
    data[data.index(text) + 5] ^= 4
    path.write_bytes(data)


def forget_index(directory: Path) -> None:
    shutil.rmtree(directory / "index")


def test_a_damaged_body_is_given_back_when_it_is_read(tmp_path: Path) -> None:
    flip(segment(filled(tmp_path)), b"5-" * 100)
    store, report = open_store(tmp_path)
    assert report.findings() == []  # nobody has read it yet
    assert offsets(store.due(FOREVER, 100)) == [2, 3, 4, 6, 7, 8, 9]
    assert store.stats().damaged == 1
    assert [e.place for e in store.untold(99) if e.state is State.RETURNED] == [place(5)]
    store.close()
    store, report = open_store(tmp_path)
    assert [e.place for e in store.untold(99) if e.state is State.RETURNED] == [place(5)]
    store.close()


def test_damage_without_an_index_is_quarantined_and_reported(tmp_path: Path) -> None:
    directory = filled(tmp_path)
    flip(segment(directory), b"5-" * 100)
    forget_index(directory)
    store, report = open_store(tmp_path)
    assert [damage.reason for damage in report.damages] == ["checksum mismatch"]
    assert len(report.unnamed) == 1
    assert "adopt this store at the broker" in "\n".join(report.findings())
    assert list((directory / "log").glob("*.lost-*"))
    assert offsets(store.due(FOREVER, 100)) == [2, 3, 4, 6, 7, 8, 9]
    store.close()
    store, report = open_store(tmp_path)
    assert report.findings() == []
    store.close()


def test_a_lost_end_gives_back_what_the_index_knows(tmp_path: Path) -> None:
    directory = filled(tmp_path)
    path = segment(directory)
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"8-" * 100)])
    store, report = open_store(tmp_path)
    assert set(report.returned) == {place(8), place(9)}
    assert "partition 0 offset 8 is given back" in "\n".join(report.findings())
    assert offsets(store.due(FOREVER, 100)) == [2, 3, 4, 5, 6, 7]
    states = {entry.place.offset: entry.state for entry in store.untold(100)}
    assert (states[1], states[8], states[9]) == (State.ACKED, State.RETURNED, State.RETURNED)
    store.put([stored(10)])
    store.close()
    store, report = open_store(tmp_path)
    assert report.findings() == []
    assert sorted(offsets(store.due(FOREVER, 100))) == [2, 3, 4, 5, 6, 7, 10]
    store.close()


def test_a_torn_tail_is_cut_and_kept(tmp_path: Path) -> None:
    directory = filled(tmp_path)
    path = segment(directory)
    end = len(path.read_bytes().rstrip(b"\0"))
    with path.open("r+b") as file:
        file.seek(end + 8 & ~7)
        file.write(b"TXR1" + b"\1" * 99)
    store, report = open_store(tmp_path)
    assert report.torn is not None
    assert Path(report.torn.copy).exists()
    assert "nothing of it was acknowledged" in report.findings()[0]
    assert offsets(store.due(FOREVER, 100)) == list(range(2, 10))
    store.close()


def garble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 512):
        data[at + 100 : at + 110] = b"garbage..."
    path.write_bytes(data)


INDEX_DAMAGES: list[Callable[[Path], object]] = [
    garble,
    lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"nonsense" * 4096),
    lambda path: path.unlink(),
]


@pytest.mark.parametrize("damage", INDEX_DAMAGES)
def test_a_damaged_index_is_made_anew(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    directory = filled(tmp_path)
    before = contents(open_store(tmp_path))
    damage(directory / "index" / "data.mdb")
    found = open_store(tmp_path)
    assert found[1].replayed > 9
    assert contents(found) == before


def contents(found: tuple[LocalStore, StoreReport]) -> list[object]:
    store, report = found
    assert not report.damages
    entries: list[object] = [*store.untold(100), store.stats()[:6], *store.due(FOREVER, 100)]
    store.close()
    return entries


def test_a_damaged_row_closes_the_store_and_the_next_opening_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    store, _ = open_store(tmp_path)

    def damaged(*_: object) -> object:
        raise IndexDamaged("the index is damaged: a page")

    with monkeypatch.context() as context:
        context.setattr(store._state, "due", damaged)
        with pytest.raises(StoreClosed, match="open it again"):
            store.due(1, 1)
    with pytest.raises(StoreClosed):
        store.put([stored(20)])
    store.close()
    store, report = open_store(tmp_path)
    assert report.replayed > 9
    assert offsets(store.due(FOREVER, 100)) == list(range(2, 10))
    store.close()


def test_segments_that_are_missing_are_reported(tmp_path: Path) -> None:
    directory = filled(tmp_path)
    segment(directory).unlink()
    with pytest.raises(CorruptRecord, match="move this directory away"):
        open_store(tmp_path)
    forget_index(directory)
    store, _ = open_store(tmp_path)  # nothing says that there ever was a segment
    assert store.due(FOREVER, 9) == []
    store.close()


def append_record(directory: Path, kind: int, head: bytes, body: bytes = b"") -> None:
    """Append a record with a valid checksum to a closed store."""
    path = segment(directory)
    data = path.read_bytes()
    end = (len(data.rstrip(b"\0")) + 7) & ~7
    start = encode_start(kind, end, 0, end, 1, head, body)
    path.write_bytes(data[:end] + start + body + bytes(-len(body) & 7))


HEAD = StoredHead(TOPIC, 0, 30, None, 0, 1, 1, 0, 1, False, (), 0, 0)
# records with valid checksums that make no sense
LIES = {
    "no head": (STORED, b"\xc1"),
    "not a list": (STORED, b"\x01"),
    "another topic": (STORED, encode_stored(HEAD._replace(topic_id=8))),
    "a negative offset": (STORED, encode_stored(HEAD._replace(offset=-1))),
    "a huge partition": (STORED, encode_stored(HEAD._replace(partition=1 << 40))),
    "state 9": (STORED, encode_stored(HEAD._replace(state=9))),
    "a long key": (STORED, encode_stored(HEAD._replace(key="k" * 5_000))),
    "an outcome": (CHANGED, b"\x91\x93\x01\x02\x03"),
    "a map of states": (TOLD, b"\x81\x01\x02"),
    "a place of text": (FORGOTTEN, b"\x91\x93\x07\x00\xa1x"),
    "two positions": (RELEASED, b"\x92\x01\x02"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_record_that_makes_no_sense_is_reported_and_ignored(tmp_path: Path, lie: str) -> None:
    directory = filled(tmp_path)
    append_record(directory, *LIES[lie])
    store, report = open_store(tmp_path)
    assert len(report.findings()) == 1
    assert "a record that makes no sense" in report.findings()[0]
    assert offsets(store.due(FOREVER, 100)) == list(range(2, 10))
    store.put([stored(30)])
    store.close()


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    directory = filled(tmp_path)
    append_record(directory, 99, b"\x90")
    with pytest.raises(UnsupportedFormat):
        open_store(tmp_path)


def test_a_log_of_another_store_is_refused(tmp_path: Path) -> None:
    directory = filled(tmp_path)
    (tmp_path / "other").mkdir()
    other = filled(tmp_path / "other")
    shutil.rmtree(directory / "log")
    shutil.copytree(other / "log", directory / "log")
    forget_index(directory)
    with pytest.raises(StoreError, match="the log is that of store"):
        open_store(tmp_path)
