"""Small files of a spool that are replaced as a whole."""

from __future__ import annotations

from contextlib import closing, suppress

from txmq.errors import StoreError
from txmq.store.filesystem import FileSystem

_DRAFT = ".new"


def write_file(fs: FileSystem, folder: str, name: str, data: bytes) -> None:
    """Write a file, or replace it; it is on disk at return, or the old one is."""
    draft = f"{folder}/{name}{_DRAFT}"
    with suppress(StoreError):  # of a process that died here
        fs.remove(draft)
    with closing(fs.create(draft)) as file:
        file.pwrite([data], 0)
        file.fsync()
    fs.rename(draft, f"{folder}/{name}")
    fs.sync_directory(folder)


def read_file(fs: FileSystem, path: str) -> bytes:
    """Return the content of a file."""
    with closing(fs.open(path)) as file:
        return file.pread(file.size(), 0)


def names_of(fs: FileSystem, folder: str) -> list[str]:
    """Return the names in a folder, without drafts."""
    return [name for name in fs.listdir(folder) if not name.endswith(_DRAFT)]


def remove_tree(fs: FileSystem, folder: str, keep: str, inner: tuple[str, ...]) -> None:
    """Remove a folder with its files and these folders in it, the file `keep` last.

    A crash leaves `keep` there, or nothing.
    """
    for name in inner:
        below = f"{folder}/{name}"
        for file in fs.listdir(below):
            fs.remove(f"{below}/{file}")
        with suppress(StoreError):  # it may not exist
            fs.remove_directory(below)
    for file in fs.listdir(folder):
        if file != keep:
            fs.remove(f"{folder}/{file}")
    fs.sync_directory(folder)
    with suppress(StoreError):
        fs.remove(f"{folder}/{keep}")
    fs.remove_directory(folder)
