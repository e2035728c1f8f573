"""Access of other users of the machine to a data directory, and small text files that
only its owner reads.
"""

from __future__ import annotations

import stat
from contextlib import closing
from typing import TYPE_CHECKING

from txmq.errors import ConfigError
from txmq.store.filesystem import RealFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def require_private(data: Path) -> None:
    """Raise ConfigError for a data directory that every user of the machine may write:
    each of them could put another log there, with users of its own.

    Those of the directory's group are its owner's to choose: in containers it is often
    the group that mounts the volume.
    """
    if not data.exists():
        return  # it will be made for its owner alone
    mode = stat.S_IMODE(data.stat().st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(
            "broker.data",
            f"every user may write to {data} (mode {mode:04o})",
            hint=f"chmod 700 {data}, after a look at what is in it; or use a directory below it",
        )


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
