"""Damage on disk: reported, what is whole is served, and the rest is given back."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.recover.local.model import FOREVER
from tests.recover.local.stores import FAILURE, acked, message, offsets, open_store, place, stored
from txmq.client.protocol.consumer.store_jobs import damage_alarm
from txmq.errors import StoreClosed, StoreError
from txmq.recover.local import LocalStore, State, scan
from txmq.recover.local.rows import Row

BODY = 3_000


def filled(tmp_path: Path, count: int = 9) -> Path:
    """Return the database of a closed store with messages 1 to `count`."""
    store, _ = open_store(tmp_path)
    for offset in range(1, count + 1):
        store.put([(message(offset, body=body(offset)), offset, FAILURE)])
    store.record(acked(1))
    store.close()
    return Path(store.path, "store.db")


def body(offset: int) -> bytes:
    return b"%03d-" % offset * (BODY // 4)


def flip(path: Path, text: bytes) -> None:
    """Change a byte of a text in a file."""
    data = bytearray(path.read_bytes())
    data[data.index(text) + 5] ^= 4
    path.write_bytes(data)


def test_a_store_whose_log_is_gone_says_so(tmp_path: Path) -> None:
    filled(tmp_path).unlink()
    store, report = open_store(tmp_path)
    store.close()
    assert report.emptied
    assert "the database is gone" in report.findings()[0]
    assert damage_alarm("orders", report) is not None
    store, report = open_store(tmp_path)
    store.close()
    assert report.findings() == []


def test_a_damaged_body_is_given_back_when_it_is_read(tmp_path: Path) -> None:
    flip(filled(tmp_path), body(5))
    store, report = open_store(tmp_path)
    assert report.findings() == []  # nobody has read it yet
    assert offsets(store.due(FOREVER, 100)) == [2, 3, 4, 6, 7, 8, 9]
    assert store.stats().damaged == 1
    for _ in range(2):
        returned = [e.place for e in store.untold(99) if e.state is State.RETURNED]
        assert returned == [place(5)]
        store.close()
        store, _ = open_store(tmp_path)
    store.close()


def test_a_damaged_row_is_given_back_when_it_is_read(tmp_path: Path) -> None:
    file = filled(tmp_path)
    with closing(sqlite3.connect(file)) as database:
        database.execute("UPDATE message SET attempt = 77 WHERE offset = 4")
        database.execute("UPDATE message SET state = 9 WHERE offset = 6")
        database.commit()
    store, _ = open_store(tmp_path)
    assert offsets(store.due(FOREVER, 100)) == [2, 3, 5, 7, 8, 9]
    states = {e.place.offset: e.state for e in store.untold(99)}
    assert (states[4], states[6]) == (State.RETURNED, State.RETURNED)
    store.close()


def garble_page(at: float) -> Callable[[Path], None]:
    """Return a damage of one page, at this part of the file."""

    def garble(path: Path) -> None:
        data = bytearray(path.read_bytes())
        page = int(at * (len(data) // 8192)) * 8192
        data[page : page + 8192] = Random(at).randbytes(8192)
        path.write_bytes(data)

    return garble


DAMAGES: dict[str, Callable[[Path], object]] = {
    "the first page": garble_page(0),
    "a page": garble_page(0.3),
    "a page in the middle": garble_page(0.5),
    "a later page": garble_page(0.8),
    "the last page": garble_page(0.999),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "nonsense": lambda path: path.write_bytes(b"nonsense" * 4096),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_set_aside_and_what_can_be_read_goes_on(
    tmp_path: Path, damage: str
) -> None:
    file = filled(tmp_path, 300)
    DAMAGES[damage](file)
    found = file.read_bytes()
    store, report = open_store(tmp_path)
    assert report.damage
    assert "adopt this store" in report.findings()[0]
    assert damage_alarm("orders", report) is not None
    assert damage == "empty" or Path(report.aside, "store.db").read_bytes() == found
    due = store.due(FOREVER, 1_000)
    assert all(one.body == body(one.place.offset) for one in due)
    rescued = set(offsets(due))
    if damage not in {"the first page", "empty", "nonsense", "cut in half"}:
        assert len(rescued) > 200
    known = {e.place.offset: e.state for e in store.entries(None, 1_000)}
    for offset in known.keys() - rescued - {1}:
        assert known[offset] is State.RETURNED, "the broker has it"
    assert {one.offset for one in report.returned} == known.keys() - rescued - {1}
    store.put([stored(400)])
    store.close()
    store, report = open_store(tmp_path)
    assert report.findings() == []
    store.close()


def test_a_damaged_write_ahead_log_is_reported_and_kept(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    for offset in range(9):
        store.put([(message(offset, body=body(offset)), offset, FAILURE)])
    image = tmp_path / "image"
    shutil.copytree(store.path, image, ignore=shutil.ignore_patterns("*-shm"))
    store.close()
    shutil.rmtree(store.path)
    image.rename(store.path)
    log = Path(store.path, "store.db-wal")
    flip(log, body(5))
    found = log.read_bytes()
    store, report = open_store(tmp_path)
    assert "write-ahead log" in report.damage
    assert Path(report.aside, "store.db-wal").read_bytes() == found
    assert offsets(store.due(FOREVER, 100)) == [0, 1, 2, 3, 4]
    store.close()
    store, report = open_store(tmp_path)
    assert report.findings() == []
    store.close()


def test_setting_aside_goes_on_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = filled(tmp_path, 300)
    garble_page(0.5)(file)
    renamed = 0
    rename = Path.rename

    def killed(path: Path, to: Path | str) -> Path:
        nonlocal renamed
        renamed += 1
        if renamed in {1, 3, 6, 7, 8}:
            raise KeyboardInterrupt
        done = rename(path, to)
        if renamed in {2, 4}:
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        interrupted = 0
        while True:
            try:
                store, report = open_store(tmp_path)
            except KeyboardInterrupt:
                interrupted += 1
            else:
                break
    assert interrupted > 3
    assert len(store.due(FOREVER, 1_000)) > 200
    assert [one.name for one in file.parent.glob("damaged-*")] == ["damaged-1"]
    assert report.aside.endswith("damaged-1")
    store.close()


@pytest.mark.parametrize("seed", range(16))
def test_random_damage_shows_no_wrong_message(tmp_path: Path, seed: int) -> None:
    """Bits of the database and of its write-ahead log, in the midst of a life."""
    rng = Random(seed)
    store, _ = open_store(tmp_path)
    for offset in range(1, 60):
        store.put([(message(offset, rng.choice((None, "k")), body=body(offset)), offset, FAILURE)])
        if offset == 30:
            store._database.read(lambda c: c.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
    image = tmp_path / "image"
    shutil.copytree(store.path, image, ignore=shutil.ignore_patterns("*-shm", "lock"))
    store.close()
    shutil.rmtree(store.path)
    for name in rng.choice((["store.db"], ["store.db-wal"], ["store.db", "store.db-wal"])):
        data = bytearray(Path(image, name).read_bytes())
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        Path(image, name).write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
    image.rename(store.path)
    for _ in range(2):  # what is met in use is set aside at the next start
        try:
            store, _ = open_store(tmp_path)
            try:
                serve(store)
            finally:
                store.close()
        except StoreClosed:
            continue
        except StoreError:
            pass
        break


def serve(store: LocalStore) -> None:
    while due := store.due(FOREVER, 10):
        for one in due:
            assert one.body == body(one.place.offset), "a wrong message"
            assert one.headers == {"trace": str(one.place.offset)}
        store.record(acked(*offsets(due)))
    store.untold(1_000)


def test_a_checksum_that_is_not_compared_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug."""
    monkeypatch.setattr(Row, "sound", True)
    with pytest.raises(AssertionError):
        test_a_damaged_row_is_given_back_when_it_is_read(tmp_path)


def keyed(tmp_path: Path) -> Path:
    """Return the database of a closed store: 1 and 2 of a key, 3 and 4 of their own."""
    store, _ = open_store(tmp_path)
    keys = {1: "first", 2: "first", 3: "third", 4: "fourth"}
    store.put([(message(n, key, body=body(n)), n, FAILURE) for n, key in keys.items()])
    store.close()
    return Path(store.path, "store.db")


BYTES = {  # of the first message
    "its key": ("message", "key = CAST(x'66ff' AS TEXT)"),
    "its failure": ("message", "failure = '[\"'"),
    "its tag": ("content", "tag = CAST(x'74ff' AS TEXT)"),
    "its headers": ("content", "headers = '{'"),
    "its id": ("content", "message_id = x'00'"),
}


@pytest.mark.parametrize("damage", BYTES)
def test_a_damaged_text_is_given_back_and_what_follows_goes_on(tmp_path: Path, damage: str) -> None:
    table, change = BYTES[damage]
    file = keyed(tmp_path)
    with closing(sqlite3.connect(file)) as database:
        database.execute(f"UPDATE {table} SET {change} WHERE id = 1")
        database.commit()
    assert [one.message is None for one in scan(str(file.parent))] == [True, False, False, False]
    store, report = open_store(tmp_path)
    assert report.findings() == []
    assert set(offsets(store.due(FOREVER, 100))) - {2} == {3, 4}
    assert [e.place for e in store.untold(99) if e.state is State.RETURNED] == [place(1)]
    store.forget([place(1)])
    store.release(place(2))
    assert offsets(store.due(FOREVER, 100)) == [2]
    store.close()


def test_a_message_with_damage_is_quarantined(tmp_path: Path) -> None:
    with closing(sqlite3.connect(keyed(tmp_path))) as database:
        database.execute("UPDATE message SET failure = '[\"' WHERE id = 3")
        database.commit()
    store, _ = open_store(tmp_path)
    assert store.quarantine([place(3)], "unknown") == 1
    store.close()


def test_what_is_left_of_lost_rows_is_in_nobodys_way(tmp_path: Path) -> None:
    file = keyed(tmp_path)
    with closing(sqlite3.connect(file)) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'message'"
        [page] = database.execute(query).fetchone()
    data = bytearray(file.read_bytes())
    data[(page - 1) * 8192 : page * 8192] = b"\xff" * 8192
    file.write_bytes(data)
    store, report = open_store(tmp_path)
    assert report.damage
    assert store.entries(None, 9) == []
    store.put([stored(400)])
    assert offsets(store.due(FOREVER, 9)) == [400]
    store.close()


@pytest.mark.parametrize("index", ["by_place", "by_due", "by_key", "by_untold"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, index: str) -> None:
    """Its second message would never come, or again and again."""
    file = filled(tmp_path)
    named = "SELECT * FROM sqlite_master WHERE name = ?"
    with closing(sqlite3.connect(file)) as database:
        row = database.execute("SELECT * FROM message WHERE id = 2").fetchone()
        entry = database.execute(named, (index,)).fetchone()
        database.execute("DELETE FROM message WHERE id = 2")
        database.execute("PRAGMA writable_schema = ON")
        database.execute("DELETE FROM sqlite_master WHERE name = ?", (index,))
        database.commit()
    with closing(sqlite3.connect(file)) as database:
        database.execute(f"INSERT INTO message VALUES ({', '.join('?' * len(row))})", row)
        database.execute("PRAGMA writable_schema = ON")
        database.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", entry)
        database.commit()
    store, report = open_store(tmp_path)
    assert index in report.damage
    assert report.returned == ()
    assert offsets(store.due(FOREVER, 100)) == list(range(2, 10))
    assert [entry.place.offset for entry in store.untold(99)] == list(range(1, 10))
    store.record(acked(*range(2, 10)))
    assert store.due(FOREVER, 100) == []
    store.close()


def test_an_error_that_quotes_damage_is_damage(tmp_path: Path) -> None:
    file = filled(tmp_path)
    data = file.read_bytes()
    place = data.index(b"by_place ON message") + len("by_place ON messag")
    file.write_bytes(data[:place] + b"\xe5" + data[place + 1 :])
    store, report = open_store(tmp_path)
    assert report.damage
    store.put([stored(400)])
    assert offsets(store.due(FOREVER, 9)) == [400]
    store.close()
