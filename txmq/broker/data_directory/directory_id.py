"""Identity of a data directory, which a copy does not share.

Log id and boot epochs are part of the data, so a copy has them too. An inode number is
not: the file `directory` names a random id together with the inode that the file had
when it was written. Where it has another inode now, the directory is a copy or a
restored backup, and gets an id of its own. A restart, a move within the file system and
a change of owner keep the inode. So do a clone of a whole volume and a backup that is
written over the original; the number of reports tells these (`stored_reports.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

from txmq.broker.data_directory.private_files import replace_file

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
    made = uuid4()
    replace_file(path, lambda inode: f"{made} {inode}\n")
    return made
