"""Writes catalogues (`store/catalogue.py`), and one in the place of many small ones."""

from __future__ import annotations

from contextlib import closing, suppress
from heapq import merge
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from txmq.errors import StoreError
from txmq.store.catalogue import (
    KEY_ROW,
    RANGE,
    SUFFIX,
    TEMPORARY,
    About,
    Catalogue,
    Range,
    encode_header,
    folder_of,
    numbers,
    path_of,
)
from txmq.store.pages import PageWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from uuid import UUID

    from txmq.store.fs import FileSystem

MERGED = 16  # catalogues of a tier that become one of the next
TIERS = (16 << 20, 256 << 20, 4 << 30)  # bytes of batches; what is larger stays as it is


def write(
    fs: FileSystem,
    directory: str,
    about: tuple[UUID, int, int, int],
    rows: Iterable[bytes],
    ranges: Iterable[Range],
) -> None:
    """Write one, durably under its name. `rows` are in order, and may come more than
    once.
    """
    folder = folder_of(directory)
    for name in fs.listdir(folder):
        if name.endswith(TEMPORARY):
            fs.remove(f"{folder}/{name}")
    path = path_of(directory, max(numbers(fs, directory), default=0) + 1)
    temporary = path.removesuffix(SUFFIX) + TEMPORARY
    try:
        with closing(fs.create(temporary)) as file:
            pages = PageWriter(file, 1)
            keys = pages.write((row for row, _same in groupby(rows)), KEY_ROW)
            spans = pages.write((RANGE.pack(*found) for found in ranges), RANGE.size)
            file.pwrite([encode_header(About(*about, keys, spans))], 0)
            file.fsync()
        fs.rename(temporary, path)
    except StoreError:
        with suppress(StoreError):  # the next one removes it
            fs.remove(temporary)
        raise
    fs.sync_directory(folder)
    fs.sync_directory(directory)


def merge_some(fs: FileSystem, directory: str, known: list[Catalogue]) -> bool:
    """One in the place of several, of the smallest tier that has enough of them; False
    where none has.
    """
    for low, high in pairwise((-1, *TIERS)):
        tier = [catalogue for catalogue in known if low < catalogue.about.size <= high][:MERGED]
        if len(tier) == MERGED:
            _merge(fs, directory, tier)
            return True
    return False


def _merge(fs: FileSystem, directory: str, tier: list[Catalogue]) -> None:
    """One in the place of several; all rows pass through memory one by one."""
    found = [catalogue.about for catalogue in tier]
    levels = 0
    for about in found:
        levels |= about.levels
    summed = (found[0].log_id, max(a.position for a in found), sum(a.size for a in found), levels)
    rows = merge(*(catalogue.key_rows() for catalogue in tier))
    write(fs, directory, summed, rows, _joined(merge(*(catalogue.ranges() for catalogue in tier))))
    remove(fs, directory, tier)


def _joined(ranges: Iterable[Range]) -> Iterator[Range]:
    """Ranges in order, those that touch or overlap as one."""
    last: Range | None = None
    for found in ranges:
        if last is not None and last[:2] == found[:2] and found.first <= last.end:
            last = last._replace(end=max(last.end, found.end))
            continue
        if last is not None:
            yield last
        last = found
    if last is not None:
        yield last


def remove(fs: FileSystem, directory: str, gone: list[Catalogue]) -> None:
    """Remove them, durably."""
    for catalogue in gone:
        fs.remove(catalogue.path)
    fs.sync_directory(folder_of(directory))
