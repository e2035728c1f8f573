"""What a power cut leaves of files and names: the disk below `txmq.testing.simfs`.

A file keeps, with equal chance, nothing of what was not synced, all of it, or each
sector of 512 bytes as one of the changes left it, and one of the lengths that the file
had. New, changed and removed names are kept likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

SECTOR = 512


class Change(NamedTuple):
    """Bytes that were replaced, and the length of the file afterwards."""

    offset: int
    data: bytes
    size: int


@dataclass(slots=True)
class Inode:
    """A file: its contents, what is surely on disk, and the changes in between.

    `adrift` are changes that an fsync failed to write: no later one will, but they may
    have reached the disk.
    """

    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    changes: list[Change] = field(default_factory=list)
    adrift: list[Change] = field(default_factory=list)

    def change(self, offset: int, data: bytes, size: int) -> None:
        change = Change(offset, data, size)
        apply(self.content, change)
        self.changes.append(change)

    def sync(self) -> None:
        for change in self.changes:
            apply(self.durable, change)
        self.changes.clear()

    def fail_sync(self) -> None:
        self.adrift += self.changes
        self.changes.clear()

    def left(self, rng: Random) -> Inode:
        content = torn(self.durable, self.adrift + self.changes, rng)
        return Inode(content, bytearray(content))

    def copy(self) -> Inode:
        return Inode(bytearray(self.content), bytearray(self.content))


@dataclass(slots=True)
class Directory:
    """Names, those that are surely on disk, and the changes in between: each the names
    that it gave and took away.
    """

    names: dict[str, Inode | Directory] = field(default_factory=dict)
    durable: dict[str, Inode | Directory] = field(default_factory=dict)
    changes: list[dict[str, Inode | Directory | None]] = field(default_factory=list)

    def change(self, change: dict[str, Inode | Directory | None]) -> None:
        rename(self.names, change)
        self.changes.append(change)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.changes.clear()

    def left(self, rng: Random) -> Directory:
        names = dict(self.durable)
        share = rng.choice((0, 0.5, 1))
        for change in self.changes:
            if rng.random() < share:
                rename(names, change)
        left = {name: node.left(rng) for name, node in names.items()}
        return Directory(left, dict(left))

    def copy(self) -> Directory:
        names = {name: node.copy() for name, node in self.names.items()}
        return Directory(names, dict(names))


def apply(content: bytearray, change: Change) -> None:
    end = change.offset + len(change.data)
    if len(content) < end:
        _resize(content, end)
    content[change.offset : end] = change.data
    if len(content) != change.size:
        _resize(content, change.size)


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def rename(
    names: dict[str, Inode | Directory], change: dict[str, Inode | Directory | None]
) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def used(directory: Directory) -> int:
    return sum(
        len(n.content) if isinstance(n, Inode) else used(n) for n in directory.names.values()
    )


def torn(durable: bytearray, changes: list[Change], rng: Random) -> bytearray:
    """What may be on disk of `changes` on top of `durable`: each sector as one of the
    changes left it, or untouched.
    """
    share = rng.choice((0, 0.5, 1))
    content = bytearray(durable)
    if share == 0:
        return content
    if share == 1:
        for change in changes:
            apply(content, change)
        return content
    pieces: dict[int, list[tuple[int, bytes]]] = {}
    for change in changes:
        for offset, data in _sectors(change):
            pieces.setdefault(offset // SECTOR, []).append((offset, data))
    for versions in pieces.values():
        for offset, data in versions[: rng.randint(0, len(versions))]:
            _resize(content, max(len(content), offset + len(data)))
            content[offset : offset + len(data)] = data
    _resize(content, rng.choice([len(durable), *(change.size for change in changes)]))
    return content


def _sectors(change: Change) -> Iterator[tuple[int, bytes]]:
    """A change in pieces that a disk writes in one."""
    start, stop = change.offset, change.offset + len(change.data)
    while start < stop:
        end = min(stop, (start // SECTOR + 1) * SECTOR)
        yield start, change.data[start - change.offset : end - change.offset]
        start = end
