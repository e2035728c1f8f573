"""One spool: what it keeps, what its notes change, and what it refuses."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any
from uuid import UUID

import pytest

from tests.recover.spool.disks import (
    SESSION,
    Disk,
    batch,
    bodies,
    directory_on,
    new_disk,
    new_spool,
    open_spools,
    store,
    taken,
    waiting,
)
from txmq.client.protocol.sender.spool_chain import SpoolChain
from txmq.errors import DirectoryInUse, StoreError, UnsupportedFormat
from txmq.model.message import message_id
from txmq.model.units import HOUR
from txmq.recover.local.batches import SPOOL, Refusal
from txmq.recover.local.spool import Spool
from txmq.recover.local.spools import (
    KnownTopic,
    OpenedSpool,
    SpoolDirectory,
    drop_refused,
    scan,
    spools_below,
)

REFUSAL = Refusal("UnknownTopic", "there is no such topic", 7, "not done")


def reopened(disk: Disk) -> Spool:
    """The spool as another process finds it after a power cut."""
    other = disk.crash(Random(1))
    _kept.append(other)
    [spool] = open_spools(taken(other))
    return spool


_kept: list[Disk] = []  # while their spools are used


@pytest.fixture(autouse=True)
def _disks() -> Iterator[None]:
    yield
    _kept.clear()


def test_batches_come_back_in_order_with_the_sequences_that_they_had() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, batch(0, b"a", b"b"), batch(2, b"c"))
    store(spool, batch(3, b"d"))
    again = reopened(disk)
    assert bodies(waiting(again)) == [b"a", b"b", b"c", b"d"]
    assert [one.sequence for one in waiting(again)] == [0, 2, 3]
    assert (again.waiting, again.identity) == (4, spool.identity)
    assert again.size > 0
    assert again.oldest_at == spool.oldest_at > 0


def test_what_is_drained_does_not_come_back() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    for number in range(40):
        store(spool, batch(number, b"%d" % number * 100))
    size = spool.size
    first = waiting(spool)
    spool.mark_drained(first[29].end, 30)
    assert spool.size * 3 < size
    store(spool, batch(40, b"last"))  # which brings the mark to disk
    again = reopened(disk)
    assert [one.sequence for one in waiting(again)] == list(range(30, 41))
    assert again.waiting == spool.waiting == 11


def test_a_split_batch_comes_row_by_row_with_the_sequences_of_its_rows() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, batch(5, b"a", b"b", b"c"))
    spool.split(waiting(spool)[0])
    for opened in (spool, reopened(disk)):
        rows = waiting(opened)
        assert [(row.sequence, row.count, row.partition) for row in rows] == [
            (5, 1, -1),
            (6, 1, -1),
            (7, 1, -1),
        ]
        assert bodies(rows) == [b"a", b"b", b"c"]


def test_a_refused_batch_is_kept_with_its_error_and_is_not_sent_again() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, batch(0, b"a"), batch(1, b"b"), batch(2, b"c"))
    spool.refuse(waiting(spool)[1], REFUSAL)
    for opened in (spool, reopened(disk)):
        assert bodies(waiting(opened)) == [b"a", b"c"]
        assert opened.refused == 1
        assert opened.refusal_of(SESSION, 1) == "UnknownTopic: there is no such topic"
        assert opened.refused_before(waiting(opened)[1])


def test_what_a_process_left_that_died_before_the_identity_is_removed(tmp_path: Path) -> None:
    with_draft, empty = (tmp_path / f"{n:032x}" for n in (1, 2))
    with_draft.mkdir()
    empty.mkdir()
    (with_draft / "spool.db.new").write_text("{")
    assert spools_below(str(tmp_path)) == []
    assert list(scan(str(tmp_path))) == []
    assert SpoolDirectory(str(tmp_path)).open_orphans(HOUR) == []
    assert len(list(tmp_path.iterdir())) == 2, "another process may be making them"
    assert SpoolDirectory(str(tmp_path)).open_orphans(2 * HOUR) == []
    assert list(tmp_path.iterdir()) == []


def test_a_spool_whose_log_is_gone_is_reported_and_stays() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, batch(0, b"a"))
    other = disk.restart()
    [file] = other.root.glob("*/spool.db")
    for left in file.parent.glob("spool.db*"):
        left.unlink()
    for _ in range(2):
        [lost] = taken(other)
        assert "spool.db is gone" in str(lost.error)
        assert lost.spool is None
    assert "spool.db is gone" in spools_below(str(other.root))[0].problem


def test_the_identity_has_the_incarnation_of_the_log() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, batch(0, b"a"))
    spool.set_log(UUID(int=1), UUID(int=2))
    assert reopened(disk).identity[2:] == (UUID(int=1), 1, UUID(int=2))


def test_a_spool_of_a_restored_log_is_drained_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, log_id = new_disk(), UUID(int=1)
    spool = new_spool(disk)
    store(spool, batch(0, b"a"))
    spool.set_log(log_id, None)
    other = disk.restart()
    chain = SpoolChain(directory_on(other), 1 << 30)
    for _connection in range(2):
        chain.set_log(log_id, UUID(int=2))
        assert caplog.text.count("spool.log_restored") == 1
        assert chain.waiting == 1
        assert {one.identity.incarnation for one in chain.spools} == {UUID(int=2)}
    chain.set_log(UUID(int=9), None)
    assert chain.waiting == 0, "the spool of another log is left alone"


def test_an_empty_spool_removes_itself_and_one_with_messages_does_not() -> None:
    disk = new_disk()
    spool, other, third = (new_spool(disk) for _ in range(3))
    store(other, batch(0, b"a"))
    store(third, batch(0, b"a"))
    third.refuse(waiting(third)[0], REFUSAL)
    third.mark_drained(third.end, 1)
    for each in (spool, other, third):
        each.close()
        each.close()
    assert sorted(map(str, disk.root.iterdir())) == sorted((other.path, third.path))


def test_a_spool_has_one_owner() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, batch(0, b"a"))
    assert taken(disk) == []
    spool.abandon()
    [again] = open_spools(taken(disk))
    assert bodies(waiting(again)) == [b"a"]


def test_a_process_that_looks_for_spools_leaves_alone_those_being_made_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks whenever the name of a file is made or removed."""
    directory, seen, looks = SpoolDirectory(str(tmp_path)), list[OpenedSpool](), False

    def look() -> None:
        nonlocal looks
        if not looks:
            looks = True
            seen.extend(directory.open_orphans(1))
            looks = False

    def looking(true: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            look()
            done = true(*arguments, **options)
            look()
            return done

        return call

    for name in ("mkdir", "touch", "rename", "unlink", "rmdir"):
        monkeypatch.setattr(Path, name, looking(getattr(Path, name)))
    spool = directory.open_new("orders", None, 1)
    store(spool, batch(0, b"a"))
    spool.mark_drained(spool.end, 1)
    spool.close()
    monkeypatch.undo()
    assert seen == []
    assert list(tmp_path.iterdir()) == []


def test_spools_are_listed_beside_processes_that_come_and_go(tmp_path: Path) -> None:
    directory = SpoolDirectory(str(tmp_path))

    def come_and_go() -> None:
        for now in range(1, 30):
            spool = directory.open_new(None, None, now)
            store(spool, batch(0, b"a"))
            spool.mark_drained(spool.end, 1)
            spool.close()

    process = Thread(target=come_and_go)
    process.start()
    problems = set[str]()
    while process.is_alive():
        problems |= {found.problem for found in spools_below(str(tmp_path))}
    process.join()
    assert problems <= {""}
    assert list(tmp_path.iterdir()) == []


def test_files_that_sqlite_makes_for_a_reader_do_not_keep_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = SpoolDirectory(str(tmp_path)).open_new("orders", None, 1)
    store(spool, batch(0, b"a"))
    spool.mark_drained(spool.end, 1)
    [directory] = tmp_path.iterdir()
    made = [directory / f"{SPOOL.file}{end}" for end in ("-shm", "-wal")]
    remove = Path.rmdir

    def rmdir(path: Path) -> None:
        if made:
            made.pop().touch()
        remove(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    spool.close()
    assert (made, list(tmp_path.iterdir())) == ([], [])


def test_damage_is_put_aside_with_a_report_and_the_rest_comes() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    for number in range(3):
        store(spool, batch(number, b"%d" % number * 500))
    spool.refuse(waiting(spool)[2], REFUSAL)
    spool.abandon()
    [file] = disk.root.glob("*/spool.db")
    data = bytearray(file.read_bytes())
    data[data.index(b"1" * 500) + 9] ^= 1
    file.write_bytes(data)
    for _ in range(2):
        [(_path, found, report, error)] = taken(disk)
        assert error is None
        assert found is not None
        assert bodies(waiting(found)) == [b"0" * 500]
        assert (report.lost, found.refused) == (1, 1)
        found.abandon()
    with closing(sqlite3.connect(file)) as database:
        [(aside,)] = database.execute("SELECT encoded FROM damaged")
    assert aside.count(b"1") > 490, "it is readable"
    [(_path, found, _report, _error)] = taken(disk)
    assert found is not None
    found.mark_drained(found.end, 1)
    assert found.drop_refused(None) == 1
    found.close()
    assert file.exists(), "what is damaged stays"


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE batch SET topic = CAST(x'74ff' AS TEXT) WHERE id = 2",
        "UPDATE refused SET topic = CAST(x'74ff' AS TEXT)",
        "UPDATE refused SET text = CAST(x'74ff' AS TEXT), outcome = CAST(x'74ff' AS TEXT)",
    ],
)
def test_a_damaged_text_leaves_the_rest_to_be_sent(damage: str) -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, *(batch(number, b"%d" % number) for number in range(5)))
    spool.refuse(waiting(spool)[3], REFUSAL)
    spool.abandon()
    [file] = disk.root.glob("*/spool.db")
    with closing(sqlite3.connect(file)) as database:
        database.execute(damage)
        database.commit()
    [(_path, found, report, error)] = taken(disk)
    assert error is None
    assert found is not None
    sent = [b"0", b"2", b"4"] if "batch" in damage else [b"0", b"1", b"2", b"4"]
    assert set(sent) <= set(bodies(waiting(found)))
    assert report.lost == ("topic" in damage)
    assert [one.problem for one in spools_below(str(disk.root))] == [""]
    assert len(list(scan(str(disk.root)))) >= 4
    found.abandon()


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9])
def test_of_a_damaged_file_the_other_batches_come_in_order(part: float) -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, *(batch(number, b"%03d" % number * 300) for number in range(200)))
    spool.set_log(UUID(int=1), None)
    spool.abandon()
    [file] = disk.root.glob("*/spool.db")
    data = bytearray(file.read_bytes())
    page = int(part * (len(data) // 8192)) * 8192
    data[page : page + 8192] = Random(part).randbytes(8192)
    file.write_bytes(data)
    [(_path, found, report, error)] = taken(disk)
    assert error is None
    assert found is not None
    there = [one.sequence for one in waiting(found)]
    assert there == sorted(there)
    assert len(there) > 150
    assert found.waiting == len(there)
    assert found.identity.log_id == UUID(int=1)
    assert report.damage
    assert Path(report.aside, "spool.db").read_bytes() == data
    found.abandon()


def test_spools_stay_in_order_when_the_clock_is_put_back() -> None:
    disk = new_disk()
    directory = directory_on(disk)
    made = [directory.open_new(None, None, now) for now in (10**16, 5, 0, -3, 10**15)]
    for number, spool in enumerate(made):
        store(spool, batch(0, b"%d" % number))
        spool.abandon()
    found = open_spools(taken(disk))
    assert [bodies(waiting(spool)) for spool in found] == [[b"%d" % n] for n in range(5)]


def test_a_torn_tail_is_cut() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, batch(0, b"0"))
    other = disk.restart()
    [log] = other.root.glob("*/spool.db-wal")
    log.write_bytes(log.read_bytes() + b"torn" * 3_000)
    [(_path, found, report, _error)] = taken(other)
    assert found is not None
    assert bodies(waiting(found)) == [b"0"]
    assert report == ("", "", 0)
    found.abandon()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("PRAGMA user_version = 2", UnsupportedFormat),
        ("UPDATE about SET value = 'consumer store' WHERE name = 'kind'", StoreError),
        ("UPDATE about SET value = 'x' WHERE name = 'log_id'", StoreError),
    ],
)
def test_what_is_no_spool_of_this_version_is_left_alone(
    tmp_path: Path, change: str, error: type[StoreError]
) -> None:
    directory = SpoolDirectory(str(tmp_path))
    spool = directory.open_new(None, None, 1)
    store(spool, batch(0, b"a"))
    spool.abandon()
    with closing(sqlite3.connect(Path(spool.path, "spool.db"), isolation_level=None)) as database:
        database.execute(change)
    [(_path, found, _report, refusal)] = directory.open_orphans(1)
    assert found is None
    assert isinstance(refusal, error)
    assert str(tmp_path) in str(refusal)


def test_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "spool"
    directory = SpoolDirectory(str(root))
    spool = directory.open_new(None, None, 1)
    store(spool, batch(0, b"a"))
    spool.refuse(waiting(spool)[0], REFUSAL)
    directory.remember_topics({"orders": KnownTopic(1, 2, 3)})
    for folder, _folders, files in os.walk(root):
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        assert all((Path(folder) / name).stat().st_mode & 0o777 == 0o600 for name in files)
    spool.abandon()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ("0" * 32)).symlink_to(spool.path)
    assert SpoolDirectory(str(tmp_path / "other")).open_orphans(1) == []
    assert spools_below(str(tmp_path / "other")) == []


def test_a_pipe_in_place_of_the_lock_is_refused_and_not_waited_for() -> None:
    disk = new_disk()
    spool = new_spool(disk)
    store(spool, batch(0, b"a"))
    spool.abandon()
    lock = Path(spool.path, "lock")
    lock.unlink()
    os.mkfifo(lock)
    [(_path, found, _report, error)] = taken(disk)
    assert found is None
    assert "lock" in str(error)


def test_topics_are_known_to_a_later_process_and_a_bad_file_is_no_harm(tmp_path: Path) -> None:
    directory = SpoolDirectory(str(tmp_path))
    assert directory.topics() == {}
    directory.remember_topics({"orders": KnownTopic(8, 3, 1)})
    directory.remember_topics({"bills": KnownTopic(1, 1, 2)})
    assert directory.topics() == {"orders": (8, 3, 1), "bills": (1, 1, 2)}
    for bad in ("[]", "{", '{"orders": 3}', '{"orders": [1]}'):
        (tmp_path / "topics.json").write_text(bad)
        assert directory.topics() == {}


def test_operators_see_a_spool_beside_its_owner(tmp_path: Path) -> None:
    directory = SpoolDirectory(str(tmp_path))
    spool = directory.open_new("orders", None, 1)
    store(spool, batch(0, b"a", b"b"), batch(2, b"c"), batch(3, b"d"))
    first = waiting(spool)
    spool.split(first[0])
    spool.refuse(waiting(spool)[1], REFUSAL)
    spool.mark_drained(first[0].position, 0)
    [summary] = spools_below(str(tmp_path))
    assert (summary.owned, summary.service, summary.messages, summary.refused) == (
        True,
        "orders",
        3,
        1,
    )
    assert (summary.id, summary.path) == (spool.identity.id, spool.path)
    assert summary.oldest_at == spool.oldest_at
    found = list(scan(str(tmp_path)))
    assert [(one.body, one.key, one.topic, one.partition) for one in found] == [
        (b"a", "a", "orders", None),
        (b"c", "a", "orders", 0),
        (b"d", "a", "orders", 0),
        (b"b", "a", "orders", None),
    ]
    assert [one.message_id for one in found] == [message_id(SESSION, n) for n in (0, 2, 3, 1)]
    assert found[-1].refusal == REFUSAL
    with pytest.raises(DirectoryInUse):
        drop_refused(str(tmp_path))
    spool.abandon()
    assert spools_below(str(tmp_path))[0].owned is False
    assert drop_refused(str(tmp_path), {message_id(SESSION, 2)}) == 0
    assert drop_refused(str(tmp_path), {message_id(SESSION, 1)}) == 1
    assert spools_below(str(tmp_path))[0].refused == 0


def test_a_place_that_is_no_directory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(StoreError, match="cannot be used for spools") as raised:
            SpoolDirectory(str(place)).open_new(None, None, 1)
        assert "this process may write" in str(raised.value)
