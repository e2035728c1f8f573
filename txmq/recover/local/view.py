"""Read-only views of local stores, for an operator on the machine.

They work beside a live owner, on a copy, and on a disk that is mounted read-only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from txmq.errors import StoreError
from txmq.recover.local.database import LOCK, about, is_begun_only, owner_pid, read_only
from txmq.recover.local.export import export_lines
from txmq.recover.local.rows import COLUMNS, STORE, Row, identity_of, message_of
from txmq.recover.local.values import Scanned, StoreIdentity, StoreSummary


def is_store(directory: str | Path) -> bool:
    """Return whether there is a store in a directory."""
    return Path(directory, STORE.file).exists()


def existing_identity(directory: str) -> StoreIdentity:
    """Return the identity of the store in a directory.

    Raises StoreError where there is none.
    """
    if not is_store(directory):
        lost = Path(directory, LOCK).exists()
        raise StoreError(
            f"{directory}: {f'{STORE.file} is gone' if lost else 'there is no local store'}",
            hint="give the directory of one store: `txmq recover list --data DIR` names them",
        )
    with read_only(directory, STORE) as connection:
        return identity_of(about(connection))


def scan(directory: str) -> Iterator[Scanned]:
    """Yield what the store in a directory holds, by place.

    Raises StoreError where there is no store.
    """
    topic_id = existing_identity(directory).owner.topic_id
    with read_only(directory, STORE) as connection:
        query = f"SELECT {COLUMNS} FROM message ORDER BY partition, offset"  # noqa: S608  # of ours
        for found in connection.execute(query):
            row = Row(*found)
            yield Scanned(row.entry(topic_id), message_of(connection, topic_id, row))


def export(directory: str) -> Iterator[str]:
    """Yield the lines of an export of the store in a directory, without line ends.

    It may be in use. Raises StoreError where there is no store.
    """
    yield from export_lines(existing_identity(directory), scan(directory))


def stores_below(directory: str) -> list[StoreSummary]:
    """Return the stores below the directory that a user has named for them."""
    return [
        summary(str(path))
        for group in _folders(Path(directory))
        for path in _folders(group)
        if "@" in path.name and not is_begun_only(str(path), STORE)
    ]


def summary(directory: str) -> StoreSummary:
    """Return what can be seen of a store without reading its messages."""
    identity, problem, quarantined = None, "", 0
    try:
        identity = existing_identity(directory)
        with read_only(directory, STORE) as connection:
            [quarantined] = connection.execute("SELECT count(*) FROM quarantined").fetchone()
    except StoreError as error:
        problem = str(error)
    return StoreSummary(
        directory, identity, problem, owner_pid(directory), _size(directory), quarantined
    )


def _folders(path: Path) -> list[Path]:
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror}",
            hint="give the directory that consumers were given as `local_store`",
        ) from error
    return [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]


def _size(directory: str) -> int:
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                size += Path(folder, name).lstat().st_blocks * 512
    return size
