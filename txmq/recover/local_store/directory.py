"""The directory of a local store: its place, its identity, and who may use it.

    <directory>/GROUP/TOPIC@LOG_ID/
        lock  identity.json  ballast
        log/*.seg     the store: messages and outcomes
        index/        LMDB, made from the log
        quarantine/   exports of messages that the broker did not know

The identity is written before the first record. Whatever lies there instead of a
directory or a regular file is refused: nothing is followed, and nothing is waited for.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from txmq.crashpoints import crashpoint
from txmq.errors import CorruptRecord, ForeignStore, StoreError, UnsupportedFormat
from txmq.model.message import check_name
from txmq.recover.local_store.files import read_file, write_file
from txmq.recover.local_store.values import StoreIdentity, StoreOwner
from txmq.store.filesystem import RealFileSystem

if TYPE_CHECKING:
    from txmq.store.filesystem import FileSystem

IDENTITY = "identity.json"
KIND, VERSION = "consumer store", 1
QUARANTINE = "quarantine"
_FOLDERS = frozenset(("log", "index", QUARANTINE))


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
            RealFileSystem().sync_directory(str(level.parent))
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
    folders = [Path(path), *(Path(path, name) for name in sorted(_FOLDERS))]
    for folder in folders:
        if not os.path.lexists(folder):
            continue
        if folder != folders[0]:
            check_folder(folder)
        with suppress(FileNotFoundError):  # a live owner removes what it does not need
            for found in sorted(folder.iterdir()):
                _check_file(found, as_folder=folder == folders[0] and found.name in _FOLDERS)


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


def open_identity(fs: FileSystem, path: str, owner: StoreOwner) -> tuple[StoreIdentity, bool]:
    """Return the identity of the store in `path`, written if there is none yet, and
    whether its rule of order was another one.

    Raises ForeignStore for a store of another owner.
    """
    identity = read_identity(fs, path)
    if identity is None:
        identity = StoreIdentity(uuid4(), owner)
        crashpoint("local_store.before_identity")
        write_identity(fs, path, identity)
        crashpoint("local_store.after_identity")
        return identity, False
    _require_owner(path, identity.owner, owner)
    if identity.owner.ordered == owner.ordered:
        return identity, False
    identity = identity._replace(owner=owner)
    write_identity(fs, path, identity)
    return identity, True


def write_identity(fs: FileSystem, path: str, identity: StoreIdentity) -> None:
    """Write the identity of a store."""
    fields = {"kind": KIND, "version": VERSION, **identity_json(identity)}
    fields["begun"] = identity.begun
    write_file(fs, path, IDENTITY, json.dumps(fields, indent=1).encode() + b"\n")


def identity_json(identity: StoreIdentity) -> dict[str, Any]:
    """Return an identity as JSON carries it."""
    owner = identity.owner
    return {
        "id": identity.id.hex,
        "group": owner.group,
        "topic": owner.topic,
        "topic_id": owner.topic_id,
        "log_id": str(owner.log_id),
        "ordered": owner.ordered,
    }


def parse_identity(fields: dict[str, Any]) -> StoreIdentity:
    """Return the identity in JSON. Raises KeyError, TypeError or ValueError."""
    owner = StoreOwner(
        fields["group"],
        fields["topic"],
        fields["topic_id"],
        UUID(fields["log_id"]),
        fields["ordered"],
    )
    if [type(value) for value in owner] != [str, str, int, UUID, bool]:
        raise TypeError("fields of other types")
    return StoreIdentity(UUID(hex=fields["id"]), owner)


def read_identity(fs: FileSystem, path: str) -> StoreIdentity | None:
    """Return the identity of the store in `path`, None where there never was a store.

    Raises UnsupportedFormat for a newer version, CorruptRecord for a damaged file,
    ForeignStore for a directory of something else.
    """
    file = f"{path}/{IDENTITY}"
    names = fs.listdir(path)
    if IDENTITY not in names:
        if fs.listdir(f"{path}/log"):
            raise _no_identity(file, "it is missing, and there are records")
        return None
    try:
        fields = json.loads(read_file(fs, file))
        kind, version = fields["kind"], fields["version"]
        if kind == KIND and version == VERSION:
            return parse_identity(fields)._replace(begun=fields["begun"] is True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_identity(file, f"unreadable: {type(error).__name__}: {error}") from error
    if kind != KIND:
        raise ForeignStore(
            f"{path}: a {str(kind)[:40]!r}, no local store of a consumer",
            hint="give the consumer a directory of its own",
        )
    raise UnsupportedFormat(file, version, VERSION)


def _no_identity(file: str, why: str) -> CorruptRecord:
    return CorruptRecord(
        file,
        0,
        why,
        hint="bring that file back from a copy; or move the directory away, and adopt the store"
        " at the broker, which delivers its own copies",
    )


def _require_owner(path: str, found: StoreOwner, owner: StoreOwner) -> None:
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
