"""Access of other users of the machine to a data directory, and small text files that
only its owner reads.
"""

from __future__ import annotations

import os
import stat
from contextlib import closing
from typing import TYPE_CHECKING

from txmq.errors import ConfigError
from txmq.store.filesystem import RealFileSystem, not_permitted, user_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def require_private(data: Path) -> None:
    """Raise ConfigError for a data directory that cannot be one, or that every user of
    the machine may write: each of them could put another log there, with users of its
    own.

    Those of the directory's group are its owner's to choose: in containers it is often
    the group that mounts the volume.
    """
    try:
        status = data.stat()
    except FileNotFoundError:
        return  # it will be made for its owner alone
    except OSError as error:
        hint = not_permitted() if isinstance(error, PermissionError) else "name a directory"
        raise ConfigError("broker.data", f"{data}: {error.strerror}", hint=hint) from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            "broker.data",
            f"{data} is no directory",
            hint="name the directory for the broker's log, which it makes if it is missing",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(
            "broker.data",
            f"every user may write to {data} (mode {mode:04o})",
            hint=f"chmod 700 {data}, after a look at what is in it; or use a directory below it",
        )


def require_own(data: Path) -> None:
    """Raise ConfigError where a broker's files belong to another user: its broker could
    not read what this process makes beside them.
    """
    place = next((one for one in (data / "log", data) if one.exists()), None)
    if place is None or (owner := place.stat().st_uid) == os.geteuid():
        return
    name = user_name(owner)
    raise ConfigError(
        "data",
        f"{data} belongs to {name}, and this process runs as {user_name(os.geteuid())}",
        hint=f"run it as {name}, as with sudo -u: its broker could not read the new files",
    )


def foreign_file(data: Path) -> Path | None:
    """Return a file in a data directory that this process may not read and write; None
    = there is none.
    """
    folders = [data, *(one for one in data.iterdir() if one.is_dir())]
    for folder in folders:
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return folder
        for one in folder.iterdir():
            if one.is_file() and not os.access(one, os.R_OK | os.W_OK):
                return one
    return None


def replace_file(path: Path, contents: Callable[[int], str]) -> None:
    """Replace a text file durably by one that only its owner reads, whatever the umask
    is. `contents` gets the inode of the new file.
    """
    fs, draft = RealFileSystem(), path.with_suffix(".tmp")
    # one that was left behind; in a copy it might still have the inode of another
    draft.unlink(missing_ok=True)
    with closing(fs.create(str(draft))) as file:
        file.pwrite([contents(draft.stat().st_ino).encode("ascii")], 0)
        file.fsync()
    fs.rename(str(draft), str(path))
    fs.sync_directory(str(path.parent))
