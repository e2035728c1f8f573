"""Read-only views and exports: beside a live owner, on a copy, on damage."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.recover.local.model import FOREVER
from tests.recover.local.stores import (
    FAILURE,
    OWNER,
    acked,
    message,
    offsets,
    open_store,
    place,
    stored,
)
from txmq.errors import InvalidExport, StoreError, UnsupportedFormat
from txmq.recover.local import State, export, read_export, scan, stores_below
from txmq.recover.local.export import export_lines


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".db-shm"]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_store_is_read_beside_its_owner_and_changes_nothing(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    bodies = [os.urandom(100) for _ in range(4)]
    store.put([(message(n, "k", body=body), n, FAILURE) for n, body in enumerate(bodies)])
    store.record(acked(0))
    before = snapshot(tmp_path)
    found = list(scan(store.path))
    assert snapshot(tmp_path) == before
    assert [one.entry for one in found] == store.untold(9)
    assert [one.message.body for one in found if one.message] == bodies
    (summary,) = stores_below(str(tmp_path / "stores"))
    assert summary.identity is not None
    assert (summary.identity.id, summary.identity.owner) == (store.id, OWNER)
    assert (summary.owner_pid, summary.problem) == (os.getpid(), "")
    store.close()
    assert stores_below(str(tmp_path / "stores"))[0].owner_pid == 0
    assert [one.entry for one in scan(store.path)] == [one.entry for one in found]


def test_damage_is_passed_over(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    for n in range(4):
        store.put([(message(n, body=b"%d-" % n * 100), n, FAILURE)])
    store.close()
    file = Path(store.path, "store.db")
    data = bytearray(file.read_bytes())
    data[data.index(b"2-" * 100) + 7] ^= 1
    file.write_bytes(data)
    found = {one.entry.place.offset: one.message is not None for one in scan(store.path)}
    assert found == {0: True, 1: True, 2: False, 3: True}


def test_what_a_killed_process_left_is_read(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(n) for n in range(3)])
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("store.db", "store.db-wal"):
        shutil.copy(Path(store.path, name), copy)
    assert list(scan(str(copy))) == list(scan(store.path))
    store.close()


def test_where_there_is_no_store_an_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no local store"):
        next(scan(str(tmp_path)))
    with pytest.raises(StoreError, match="there is no local store"):
        next(export(str(tmp_path / "missing")))
    with pytest.raises(StoreError, match="give the directory that consumers"):
        stores_below(str(tmp_path / "missing"))


def test_a_store_that_was_begun_only_is_not_listed(tmp_path: Path) -> None:
    begun = tmp_path / "stores" / OWNER.group / f"{OWNER.topic}@{OWNER.log_id}"
    begun.mkdir(parents=True, mode=0o700)
    (begun / "store.db.new").write_text("{")
    assert stores_below(str(tmp_path / "stores")) == []
    store, report = open_store(tmp_path)
    assert store.path == str(begun)
    assert report.findings() == []
    store.close()
    (begun / "store.db").unlink()
    (summary,) = stores_below(str(tmp_path / "stores"))
    assert "store.db is gone" in summary.problem


def exported(tmp_path: Path) -> list[str]:
    store, _ = open_store(tmp_path)
    store.put([(message(n, "k", body=bytes(range(256))), n, FAILURE) for n in range(3)])
    store.put([stored(9)])
    store.record(acked(0))
    store.close()
    return list(export(store.path))


def test_an_export_has_everything_exactly(tmp_path: Path) -> None:
    lines = exported(tmp_path)
    identity, messages = read_export(lines)
    store, _ = open_store(tmp_path)
    found = list(messages)
    assert (identity.id, identity.owner) == (store.id, OWNER)
    assert [one.entry for one in found] == store.untold(9)
    assert [one.message for one in found if one.entry.state is State.STORED] == [
        message(1, "k", body=bytes(range(256))),
        message(2, "k", body=bytes(range(256))),
        message(9),
    ]
    store.close()


def test_an_export_goes_into_another_store(tmp_path: Path) -> None:
    _, messages = read_export(exported(tmp_path))
    (tmp_path / "other").mkdir()
    store, _ = open_store(tmp_path / "other")
    whole = [one for one in messages if one.message and one.entry.state is State.STORED]
    store.put([(one.message, one.entry.due, one.entry.failure) for one in whole if one.message])
    assert offsets(store.due(FOREVER, 9)) == [9, 1]
    store.record(acked(1))
    assert offsets(store.due(FOREVER, 9)) == [2]
    assert store.entry(place(2)) is not None
    store.close()


def test_what_the_broker_does_not_know_goes_into_quarantine(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([(message(n, "k", body=b"%d" % n), n, FAILURE) for n in range(3)])
    before = {one.entry.place: one for one in scan(store.path)}
    assert store.quarantine([place(77)], "no such message") == 0
    assert store.quarantine([place(0), place(1), place(77)], "no such message") == 2
    assert store.quarantine([place(2)], "another reason") == 1
    assert store.stats()[:3] == (0, 0, 0)
    store.close()
    store, report = open_store(tmp_path)
    assert (report.findings(), store.untold(9)) == ([], [])
    assert stores_below(str(tmp_path / "stores"))[0].quarantined == 3
    store.close()
    with closing(sqlite3.connect(Path(store.path, "store.db"))) as database:
        rows = database.execute("SELECT reason, line FROM quarantined").fetchall()
    assert [reason for reason, _ in rows] == ["no such message"] * 2 + ["another reason"]
    lines = list(export_lines(store.identity, []))
    found = read_export([lines[0], *(line for _, line in rows), '{"end": 3}'])
    assert list(found.messages) == [before[place(n)] for n in range(3)]


BAD_LINES: dict[str, Callable[[list[str]], list[str]]] = {
    "nothing": lambda lines: lines[:0],
    "text": lambda lines: ["hello", *lines],
    "other JSON": lambda lines: ['{"a": 1}', *lines],
    "a list": lambda lines: ["[]", *lines],
    "deep JSON": lambda lines: ["[" * 100_000, *lines],
    "no header": lambda lines: lines[1:],
    "cut off": lambda lines: lines[:-1],
    "one left out": lambda lines: [*lines[:2], *lines[3:]],
    "one more": lambda lines: [*lines, lines[1]],
    "a cut line": lambda lines: [lines[0], lines[1][:50]],
    "no base64": lambda lines: [lines[0], with_field(lines[1], body="!")],
    "a negative offset": lambda lines: [lines[0], with_field(lines[1], offset=-1)],
    "no such state": lambda lines: [lines[0], with_field(lines[1], state="lost")],
    "another identity": lambda lines: [with_field(lines[0], store={"id": 7})],
}


def with_field(line: str, **fields: object) -> str:
    return json.dumps(json.loads(line) | fields)


@pytest.mark.parametrize("bad", BAD_LINES)
def test_an_export_that_is_none_is_refused(tmp_path: Path, bad: str) -> None:
    lines = BAD_LINES[bad](exported(tmp_path))
    with pytest.raises(InvalidExport, match=r"^line [1-7]: ") as raised:
        list(read_export(lines).messages)
    assert "the whole output" in raised.value.hint


def test_an_export_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    lines = exported(tmp_path)
    with pytest.raises(UnsupportedFormat):
        read_export([with_field(lines[0], version=2)])


def test_a_copy_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    lines = exported(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(next((tmp_path / "stores" / "billing").iterdir()), copy)
    for path in copy.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert list(export(str(copy))) == lines
    for path in copy.rglob("*"):
        path.chmod(0o700)
