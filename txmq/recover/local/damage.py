"""Opening of a database that may be damaged: what can be read of it goes on in a new
one, and the damaged file is set aside.

    damaged-1/        the files as they were found; SQLite's own tools may read more
    damaged-1.new/    the same, while the new database is made of them
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from txmq.errors import StoreError
from txmq.recover.local.database import (
    DRAFT,
    FEW_PAGES,
    PAGE,
    Damaged,
    Database,
    DirectoryLock,
    Form,
    about,
    connect,
    create,
    gone,
    is_begun_only,
    open_connection,
    os_errors,
    sync_directory,
)

ASIDE = "damaged-"
_LOG_HEADER, _FRAME = 32, 24 + PAGE  # of SQLite's write-ahead log
LARGEST_GAP = 1 << 32  # of ids, between readable rows
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)  # some errors quote what is damaged


class Opened(NamedTuple):
    """An open database, and what it says of itself.

    `created`: there was none. `lost`: there had been one. `damage`: why it was set
    aside, empty if it was not; `aside`: where it is.
    """

    database: Database
    about: dict[str, Any]
    created: bool
    lost: bool
    damage: str
    aside: str


def open_database(
    path: str, form: Form, new: Mapping[str, object] | None, *, renew: bool = False
) -> Opened:
    """Open the database in a directory for its owner. Where there is none, make one
    that says `new` of itself; with `renew` also where there had been one.

    Raises DirectoryInUse, UnsupportedFormat, ForeignStore and StoreError.
    """
    lock = DirectoryLock(path)
    try:
        created = lost = False
        unfinished = _unfinished(path)
        if not unfinished and not Path(path, form.file).exists():
            created, lost = True, not is_begun_only(path, form)
            _create(path, form, None if lost and not renew else new)
        lock.name_owner()
        damage, aside = "", ""
        connection = None
        try:
            if unfinished:
                damage = "its start was interrupted"
            else:
                connection = open_connection(path, form)
                damage = _problem(connection)
        except Damaged as error:
            damage = str(error)
        if damage:
            if connection is not None:
                connection.close()
            aside = _mend(path, form, new or {})
            connection = open_connection(path, form)
        assert connection is not None, "it is sound, or was mended"
        if not damage and _lost_its_end(connection, Path(f"{path}/{form.file}-wal")):
            damage = "commits at the end of its write-ahead log cannot be read"
            aside = _copy_log(path, form)
        _shrink(connection)
        says = about(connection)
        return Opened(Database(path, form, connection, lock), says, created, lost, damage, aside)
    except BaseException as error:
        lock.release()
        if isinstance(error, Damaged):
            raise StoreError(f"{path}/{form.file}: {error}", hint="look after the disk") from error
        raise


def _create(path: str, form: Form, new: Mapping[str, object] | None) -> None:
    """Make a database that says `new` of itself; None: there should be one."""
    if new is None:
        raise gone(path, form)
    for end in ("-wal", "-shm"):  # of a database that is gone, and of no other one
        with os_errors("remove", path):
            Path(f"{path}/{form.file}{end}").unlink(missing_ok=True)
    create(path, form, new)


def _problem(connection: sqlite3.Connection) -> str:
    """Return what is wrong with a database, empty if nothing is.

    Indexes are compared as well: with a damaged one a message would never come, or
    again and again.
    """
    try:
        [[found], *_] = connection.execute("PRAGMA integrity_check(1)").fetchall()
    except UNREADABLE as error:
        return str(error)
    return "" if found == "ok" else str(found)


def _lost_its_end(connection: sqlite3.Connection, log: Path) -> bool:
    """Return whether a write-ahead log has commits that SQLite has passed over.

    It ends a log at the first frame that is not whole. That is right for a commit that
    was not finished: nothing follows it.
    """
    [_, frames, _] = connection.execute("PRAGMA wal_checkpoint").fetchone()
    if frames < 0 or not log.exists():
        return False
    committed = False
    with log.open("rb") as file:
        salts = file.read(_LOG_HEADER)[16:24]
        for at in range(_LOG_HEADER + frames * _FRAME, log.stat().st_size, _FRAME):
            file.seek(at)
            header = file.read(24)
            if header[8:16] == salts:
                if committed:
                    return True
                committed = header[4:8] != bytes(4)
    return False


def _copy_log(path: str, form: Form) -> str:
    folder = Path(path, f"{ASIDE}{_next_number(path)}")
    with os_errors("set aside", path):
        folder.mkdir(mode=0o700)
        shutil.copyfile(f"{path}/{form.file}-wal", folder / f"{form.file}-wal")
    return str(folder)


def _shrink(connection: sqlite3.Connection) -> None:
    """Give back the space of a file that is almost empty."""
    [free] = connection.execute("PRAGMA freelist_count").fetchone()
    [pages] = connection.execute("PRAGMA page_count").fetchone()
    if free > max(FEW_PAGES, pages * 3 // 4):
        with suppress(sqlite3.Error):  # of a full disk
            connection.execute("VACUUM")


def _unfinished(path: str) -> Path | None:
    return next(iter(sorted(Path(path).glob(f"{ASIDE}*{DRAFT}"))), None)


def _mend(path: str, form: Form, new: Mapping[str, object]) -> str:
    """Set a database aside, and make another one of what can be read of it. Return
    where the damaged one is. After a crash the next call goes on.
    """
    folder = _unfinished(path) or Path(path, f"{ASIDE}{_next_number(path)}{DRAFT}")
    file, moved = Path(path, form.file), folder / form.file
    done = folder.with_suffix("")
    with os_errors("set aside", path):
        folder.mkdir(mode=0o700, exist_ok=True)
        if not moved.exists():
            file.rename(moved)
        if not file.exists():
            for end in ("-wal", "-shm"):
                with suppress(FileNotFoundError):
                    Path(f"{file}{end}").rename(f"{moved}{end}")
            sync_directory(str(folder))
            _rescue(str(moved), path, form, new)
        folder.rename(done)
    sync_directory(path)
    return str(done)


def _rescue(moved: str, path: str, form: Form, new: Mapping[str, object]) -> None:
    """Make a database of the readable rows of another one."""
    with closing(connect(moved, "mode=ro")) as damaged:
        says = dict(new)
        with suppress(*UNREADABLE):
            says |= about(damaged)

        def fill(connection: sqlite3.Connection) -> None:
            names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'about'"
            for (table,) in connection.execute(names).fetchall():
                for row in _readable_rows(damaged, table):
                    marks = ", ".join("?" * len(row))
                    connection.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)  # noqa: S608  # names of ours

        create(path, form, says, fill)


def _readable_rows(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table by their ids, without those that cannot be read."""

    def next_row(at: int) -> tuple[Any, ...] | None:
        """Return the next row, or an empty one. None: it cannot be read."""
        with suppress(*UNREADABLE):
            found: tuple[Any, ...] = connection.execute(query, (at,)).fetchone() or ()
            return found if not found or found[0] > at else None
        return None

    query = f"SELECT rowid, * FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT 1"  # noqa: S608  # of ours
    at: int | None = 0
    while at is not None:
        row = next_row(at)
        if row is None:
            at = _next_readable(next_row, at)
        elif row:
            at = row[0]
            yield row[1:]
        else:
            return


def _next_readable(next_row: Callable[[int], object], last: int) -> int | None:
    """Return an id behind which rows can be read again, None if there are none.

    Steps grow with the gap, so that a damaged page costs few.
    """
    unreadable, gap = last, 1
    while next_row(last + gap) is None:
        unreadable = last + gap
        gap += max(1, gap // 8)
        if gap > LARGEST_GAP:
            return None
    found = last + gap
    while found - unreadable > 1:
        middle = (found + unreadable) // 2
        if next_row(middle) is None:
            unreadable = middle
        else:
            found = middle
    return found


def _next_number(path: str) -> int:
    return 1 + len(list(Path(path).glob(f"{ASIDE}*")))
