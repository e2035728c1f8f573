"""Who uses the directory of a PostgreSQL server: one process at a time that runs it,
and the server's own processes.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from txmq.errors import ConfigError, DirectoryInUse


def locked(directory: Path) -> IO[bytes]:
    """Its lock, held as long as the file is open. Raises DirectoryInUse where another
    process holds it, ConfigError.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("ab")
    except OSError as error:
        raise ConfigError(
            "data", f"{directory}: {error.strerror}", hint="name one that can be written"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        message = f"another process runs a PostgreSQL server in {directory}"
        raise DirectoryInUse(message, hint="stop it, or name another directory") from None
    return lock


def processes_in(directory: Path) -> Iterator[int]:
    """Every process that works in `directory`; zombies do not. Without a /proc they are
    left to end by themselves.
    """
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if link.readlink() == directory:
                yield int(link.parent.name)
