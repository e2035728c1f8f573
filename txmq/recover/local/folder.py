"""The directory of a local store: its place, and who may use it.

    <directory>/GROUP/TOPIC@LOG_ID/
        store.db      the store
        lock  ballast  handed_out
        damaged-1/    a database that was damaged, as it was found

Whatever lies there instead of a directory or a regular file is refused: nothing is
followed, and nothing is waited for.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from txmq.errors import ForeignStore, StoreError
from txmq.model.message import check_name
from txmq.recover.local.damage import ASIDE
from txmq.recover.local.database import about, read_only, sync_directory
from txmq.recover.local.rows import STORE, identity_of
from txmq.recover.local.values import StoreOwner


def store_path(directory: str, owner: StoreOwner) -> str:
    """Return the directory of a store below the one that the user names."""
    check_name(owner.group, "group")
    check_name(owner.topic, "topic")
    return f"{directory}/{owner.group}/{owner.topic}@{owner.log_id}"


def prepare(directory: str, owner: StoreOwner) -> str:
    """Make the directories of a store where they do not exist, and check them.

    Returns the store's path. Raises StoreError for a place that cannot be trusted.
    """
    path = store_path(directory, owner)
    _check_above(Path(directory))
    for level in (Path(directory), Path(path).parent, Path(path)):
        try:
            level.mkdir(mode=0o700)
            sync_directory(str(level.parent))
        except FileExistsError:
            pass
        except OSError as error:
            raise StoreError(
                f"{level}: cannot make this directory: {error.strerror}",
                hint="give a directory that this process may write, on a disk with space",
            ) from error
        check_folder(level)
    check_contents(path)
    return path


def check_folder(path: Path) -> None:
    """Require a directory of this user that not every user may write."""
    try:
        found = path.lstat()
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror}", hint="give a directory that this process may use"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise StoreError(
            f"{path}: {_kind(found.st_mode)} in place of a directory of the local store",
            hint="move it away, or give another directory; links are not followed",
        )
    if found.st_uid != os.geteuid() and os.geteuid():
        raise StoreError(
            f"{path}: belongs to user {found.st_uid}, this process runs as {os.geteuid()}",
            hint="run as that user, or give this one a directory of its own",
        )
    if found.st_mode & stat.S_IWOTH:
        raise StoreError(
            f"{path}: every user may write there (mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"chmod 700 {path}, after a look at what is in it",
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(
            f"{path}: not writable for this process",
            hint=f"chmod 700 {path}, or mount the disk for writing",
        )


def check_contents(path: str) -> None:
    """Require that a store's directory holds directories and regular files only."""
    with suppress(FileNotFoundError):  # a live owner removes what it does not need
        for found in sorted(Path(path).iterdir()):
            _check_file(found, as_folder=found.name.startswith(ASIDE))


def _check_file(found: Path, *, as_folder: bool) -> None:
    try:
        mode = found.lstat().st_mode
    except FileNotFoundError:  # removed meanwhile
        return
    if stat.S_ISDIR(mode) if as_folder else stat.S_ISREG(mode):
        return
    raise StoreError(
        f"{found}: {_kind(mode)} in place of a"
        f" {'directory' if as_folder else 'regular file'} of the local store",
        hint="move it away; links are not followed",
    )


def require_owner(path: str, found: StoreOwner, owner: StoreOwner) -> None:
    """Require the store of an owner, whatever its rule of order."""
    if found._replace(ordered=owner.ordered) == owner:
        return
    if found._replace(topic_id=owner.topic_id, ordered=owner.ordered) == owner:
        raise ForeignStore(
            f"{path}: belongs to an earlier topic {owner.topic!r} (id {found.topic_id}), which"
            f" was replaced by one with id {owner.topic_id}",
            hint="its messages are gone at the broker: `txmq recover export` them if they"
            " matter, and move the directory away",
        )
    raise ForeignStore(
        f"{path}: belongs to group {found.group!r} and topic {found.topic!r} (id"
        f" {found.topic_id}) of log {found.log_id}, not to group {owner.group!r} and topic"
        f" {owner.topic!r} (id {owner.topic_id}) of log {owner.log_id}",
        hint="move it to where it belongs, or give another directory",
    )


def move_aside(directory: str, owner: StoreOwner) -> str | None:
    """Rename the store of an earlier topic of the owner's name, whose messages are gone
    at the broker. Return its new path; None if the store is not such a one.
    """
    path = store_path(directory, owner)
    with read_only(path, STORE) as connection:
        found = identity_of(about(connection)).owner
    if found.topic_id == owner.topic_id:
        return None
    if found._replace(topic_id=owner.topic_id, ordered=owner.ordered) != owner:
        return None
    aside = f"{path}.{found.topic_id}"
    Path(path).rename(aside)
    return aside


def _check_above(directory: Path) -> None:
    parent = directory.absolute().parent
    try:
        mode = parent.stat().st_mode
    except OSError as error:
        raise StoreError(
            f"{parent}: {error.strerror}", hint="make the directory above the local store first"
        ) from error
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise StoreError(
            f"{parent}: every user may replace what is there (mode {stat.S_IMODE(mode):04o})",
            hint=f"chmod o-w {parent}, or give a directory elsewhere",
        )


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFREG: "a regular file",
    }
    return kinds.get(stat.S_IFMT(mode), "something unknown")
