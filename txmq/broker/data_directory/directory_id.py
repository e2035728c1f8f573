"""Identity of a data directory, which a copy does not share.

Log id and boot epochs are part of the data, so a copy has them too. An inode number is
not: the file `directory` names a random id together with the inode that the file had
when it was written. Where it has another inode now, the directory is a copy or a
restored backup, and gets an id of its own. A restart, a move within the file system and
a change of owner keep the inode. So do a clone of a whole volume and a backup that is
written over the original; the number of reports tells these (`stored_reports.py`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

from txmq.store.filesystem import RealFileSystem

if TYPE_CHECKING:
    from pathlib import Path

NAME: Final = "directory"


def directory_id(data: Path) -> UUID:
    """Return the id of a data directory, and make one where it has none of its own."""
    path = data / NAME
    try:
        known, inode = path.read_text("ascii").split()
        if int(inode) == path.stat().st_ino:
            return UUID(known)
    except (FileNotFoundError, ValueError):
        pass  # none yet, or a power cut left it incomplete
    return _make(path)


def _make(path: Path) -> UUID:
    made, draft = uuid4(), path.with_suffix(".tmp")
    draft.unlink(missing_ok=True)  # in a copy it might still have the inode of another
    with draft.open("x", encoding="ascii") as file:
        file.write(f"{made} {os.fstat(file.fileno()).st_ino}\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    RealFileSystem().sync_directory(str(path.parent))
    return made
