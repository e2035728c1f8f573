"""The state of files and names after a power cut: the disk below `tests.store.simfs`.

With equal probability a file keeps none of its unsynced changes, all of them, or a
random mixture. In a mixture each sector of 512 bytes is as one of the changes left it,
and the file has one of its former lengths. New, changed and removed names follow the
same rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

SECTOR = 512


class DiskChange(NamedTuple):
    """Bytes that were written, and the length of the file afterwards."""

    offset: int
    data: bytes
    size: int


@dataclass(slots=True)
class SimInode:
    """A file: its content, its durable content, and the changes since the last fsync.

    `unwritten` are changes that a failed fsync has dropped. No later fsync writes them,
    but they may have reached the disk.
    """

    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    changes: list[DiskChange] = field(default_factory=list)
    unwritten: list[DiskChange] = field(default_factory=list)

    def change(self, offset: int, data: bytes, size: int) -> None:
        change = DiskChange(offset, data, size)
        apply(self.content, change)
        self.changes.append(change)

    def sync(self) -> None:
        for change in self.changes:
            apply(self.durable, change)
        self.changes.clear()

    def fail_sync(self) -> None:
        self.unwritten += self.changes
        self.changes.clear()

    def after_power_cut(self, rng: Random) -> SimInode:
        content = torn(self.durable, self.unwritten + self.changes, rng)
        return SimInode(content, bytearray(content))

    def copy(self) -> SimInode:
        return SimInode(bytearray(self.content), bytearray(self.content))


@dataclass(slots=True)
class SimDirectory:
    """Names, durable names, and the changes since the last fsync.

    Each change maps the names that it sets, and removes those that it maps to None.
    """

    names: dict[str, SimInode | SimDirectory] = field(default_factory=dict)
    durable: dict[str, SimInode | SimDirectory] = field(default_factory=dict)
    changes: list[dict[str, SimInode | SimDirectory | None]] = field(default_factory=list)

    def change(self, change: dict[str, SimInode | SimDirectory | None]) -> None:
        rename(self.names, change)
        self.changes.append(change)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.changes.clear()

    def after_power_cut(self, rng: Random) -> SimDirectory:
        names = dict(self.durable)
        share = rng.choice((0, 0.5, 1))
        for change in self.changes:
            if rng.random() < share:
                rename(names, change)
        left = {name: node.after_power_cut(rng) for name, node in names.items()}
        return SimDirectory(left, dict(left))

    def copy(self) -> SimDirectory:
        names = {name: node.copy() for name, node in self.names.items()}
        return SimDirectory(names, dict(names))


def apply(content: bytearray, change: DiskChange) -> None:
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
    names: dict[str, SimInode | SimDirectory], change: dict[str, SimInode | SimDirectory | None]
) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def used_bytes(directory: SimDirectory) -> int:
    return sum(
        len(n.content) if isinstance(n, SimInode) else used_bytes(n)
        for n in directory.names.values()
    )


def torn(durable: bytearray, changes: list[DiskChange], rng: Random) -> bytearray:
    """Return possible content of the disk after some of the changes.

    Each sector is as one of the changes left it, or unchanged.
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


def _sectors(change: DiskChange) -> Iterator[tuple[int, bytes]]:
    """Yield a change in pieces that a disk writes atomically."""
    start, stop = change.offset, change.offset + len(change.data)
    while start < stop:
        end = min(stop, (start // SECTOR + 1) * SECTOR)
        yield start, change.data[start - change.offset : end - change.offset]
        start = end
