"""Small files of a store that are replaced as a whole."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txmq.store.filesystem import FileSystem

LARGEST = 64 << 10
_DRAFT = ".new"


def write_file(fs: FileSystem, folder: str, name: str, data: bytes) -> None:
    """Write a file, or replace it; it is on disk at return, or the old one is."""
    draft = f"{name}{_DRAFT}"
    if draft in fs.listdir(folder):  # of a process that died here
        fs.remove(f"{folder}/{draft}")
    with closing(fs.create(f"{folder}/{draft}")) as file:
        file.pwrite([data], 0)
        file.fsync()
    fs.rename(f"{folder}/{draft}", f"{folder}/{name}")
    fs.sync_directory(folder)


def read_file(fs: FileSystem, path: str) -> bytes:
    """Return the content of a small file; what exceeds `LARGEST` is left out."""
    with closing(fs.open(path)) as file:
        return file.pread(LARGEST, 0)
