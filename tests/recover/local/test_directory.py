"""What lies in place of a store, or of a file of it: refused, with what to do."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest

from tests.recover.local.stores import OWNER, message, open_store, stored
from txmq.errors import (
    ForeignStore,
    LocalProtocolError,
    StoreClosed,
    StoreError,
    UnsupportedFormat,
)
from txmq.recover.local import LocalStore, store_path
from txmq.recover.local.folder import check_contents


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a closed store with one message."""
    store, _ = open_store(tmp_path)
    store.put([stored(1)])
    store.close()
    return Path(store.path)


def test_directories_and_files_are_the_owners_alone(directory: Path, tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    for path in [tmp_path / "stores", *(tmp_path / "stores").rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    store.close()


def test_a_store_says_what_it_is(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "store.db")) as database:
        fields = dict(database.execute("SELECT name, value FROM about"))
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
    assert fields.pop("id")
    assert fields == {
        "kind": "consumer store",
        "group": "billing",
        "topic": "orders",
        "topic_id": 7,
        "log_id": str(UUID(int=5)),
        "ordered": 1,
    }


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (OWNER._replace(group="audit"), "belongs to group 'billing'"),
        (OWNER._replace(topic="bills"), "belongs to group 'billing' and topic 'orders'"),
        (OWNER._replace(log_id=UUID(int=6)), "not to group 'billing' and topic 'orders'"),
        (OWNER._replace(topic_id=8), "belongs to an earlier topic 'orders'"),
    ],
)
def test_a_store_of_another_owner_is_refused(
    directory: Path, tmp_path: Path, other: object, text: str
) -> None:
    assert isinstance(other, type(OWNER))
    place = Path(store_path(str(tmp_path / "stores"), other))
    if place != directory:  # copied to where the other one looks
        place.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copytree(directory, place)
    with pytest.raises(ForeignStore, match=text) as raised:
        open_store(tmp_path, other)
    assert "move" in raised.value.hint


def edit(directory: Path, *changes: str) -> None:
    with closing(sqlite3.connect(directory / "store.db")) as database:
        for change in changes:
            database.execute(change)
        database.commit()


def test_another_kind_and_a_newer_version_are_refused(directory: Path, tmp_path: Path) -> None:
    edit(directory, "PRAGMA user_version = 2")
    with pytest.raises(UnsupportedFormat, match="format version 2"):
        open_store(tmp_path)
    edit(directory, "PRAGMA user_version = 1", "UPDATE about SET value='spool' WHERE name='kind'")
    with pytest.raises(ForeignStore, match="'spool'"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("topic_id", "x"), ("log_id", "x"), ("id", 7), ("topic", None)]
)
def test_an_identity_that_makes_no_sense_is_refused(
    directory: Path, tmp_path: Path, name: str, value: object
) -> None:
    edit(
        directory,
        f"UPDATE about SET value = {value!r} WHERE name = '{name}'"
        if value
        else f"DELETE FROM about WHERE name = '{name}'",
    )
    with pytest.raises(ForeignStore) as raised:
        open_store(tmp_path)
    assert raised.value.hint


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(path: Path) -> None:
    target = path.with_name(f"{path.name}.elsewhere")
    path.rename(target)
    if path.name in {"lock", "ballast", "store.db"}:
        away = path.parents[3] / target.name
        target.rename(away)
        target = away
    path.symlink_to(target)


def fifo(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def device(path: Path) -> None:
    remove(path)
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    remove(path)
    path.mkdir(mode=0o700)


def file(path: Path) -> None:
    remove(path)
    path.write_bytes(b"not a directory")


FILES = ["lock", "store.db", "ballast"]
FOLDERS = [".", "..", "../.."]


@pytest.mark.parametrize("replace", [link, fifo, device, folder])
@pytest.mark.parametrize("name", FILES)
def test_whatever_lies_in_place_of_a_file_is_refused(
    directory: Path, tmp_path: Path, name: str, replace: Callable[[Path], None]
) -> None:
    replace(directory / name)
    with pytest.raises(StoreError, match="in place of a regular file") as raised:
        open_store(tmp_path)
    assert "move it away" in raised.value.hint


@pytest.mark.parametrize("replace", [link, fifo, device, file])
@pytest.mark.parametrize("name", FOLDERS)
def test_whatever_lies_in_place_of_a_directory_is_refused(
    directory: Path, tmp_path: Path, name: str, replace: Callable[[Path], None]
) -> None:
    replace(Path(os.path.normpath(directory / name)))
    with pytest.raises(StoreError, match="in place of a directory") as raised:
        open_store(tmp_path)
    assert "move it away" in raised.value.hint


def test_places_that_every_user_may_write_are_refused(directory: Path, tmp_path: Path) -> None:
    directory.chmod(0o777)
    with pytest.raises(StoreError, match="every user may write there"):
        open_store(tmp_path)
    directory.chmod(0o700)
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(StoreError, match="every user may replace what is there"):
        open_store(above)
    above.chmod(0o1777)  # as /tmp is
    open_store(above)[0].close()


def test_a_directory_above_that_is_missing_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="make the directory above"):
        open_store(tmp_path / "no" / "such")


@pytest.mark.parametrize("name", ["..", "a/b", "", "x" * 200, "a@b", "\0"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LocalProtocolError):
        open_store(tmp_path, OWNER._replace(topic=name))
    with pytest.raises(LocalProtocolError):
        open_store(tmp_path, OWNER._replace(group=name))


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stores").mkdir()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        StoreError, match=f"belongs to user {owner}, this process runs as {owner + 1}"
    ):
        open_store(tmp_path)


def test_a_message_of_another_topic_is_a_mistake(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    one = message(1)
    with pytest.raises(ValueError, match="is not of topic 7"):
        store.put([(one._replace(place=one.place._replace(topic_id=8)), 0, stored(1)[2])])
    with pytest.raises(ValueError, match="where numbers belong"):
        store.put([(one._replace(attempt=-1), 0, stored(1)[2])])
    assert store.stats().messages == 0
    store.put([stored(1)])
    store.close()


def test_two_processes_cannot_share_a_store(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    program = (
        "import sys; from pathlib import Path;"
        "from tests.recover.local.stores import open_store; open_store(Path(sys.argv[1]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert f"in use by the process {os.getpid()}" in answer.stderr
    store.put([stored(1)])
    store.close()


def test_a_copy_is_a_store_of_its_own_owner(directory: Path, tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    other = tmp_path / "other machine"
    shutil.copytree(tmp_path / "stores", other / "stores", ignore=lambda *_: ["lock"])
    copy, _ = open_store(other)
    assert copy.id == store.id  # the broker tells them apart, by their members
    assert copy.untold(9) == store.untold(9)
    for one in (copy, store):
        assert isinstance(one, LocalStore)
        one.close()


def test_the_child_of_a_fork_is_refused_whatever_its_parent_was_doing(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(1)])
    store._database._pid += 1  # it is another process
    with store._database._changed:  # as of a thread that the child does not have
        for use in (lambda: store.put([stored(2)]), lambda: store.due(9, 1), store.stats):
            with pytest.raises(StoreClosed, match="forked"):
                use()
        store.close()
    store._database._pid -= 1
    store.close()


def test_files_that_a_live_owner_removes_meanwhile_are_no_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ballast, lstat = directory / "ballast", Path.lstat

    def late(path: Path) -> os.stat_result:
        if path == ballast:
            ballast.unlink()  # as an owner does on a full disk
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", late)
    check_contents(str(directory))
    assert not ballast.exists()
