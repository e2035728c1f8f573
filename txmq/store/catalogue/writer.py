"""Writing of catalogues, and merging of small ones."""

from __future__ import annotations

from contextlib import closing, suppress
from heapq import merge
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from txmq.errors import StoreError
from txmq.store.catalogue.catalogue import (
    KEY_ROW,
    RANGE,
    SUFFIX,
    TEMPORARY,
    Catalogue,
    CatalogueHeader,
    Range,
    catalogue_directory,
    catalogue_numbers,
    catalogue_path,
    encode_header,
)
from txmq.store.catalogue.pages import PageWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from uuid import UUID

    from txmq.store.filesystem import FileSystem

MERGED = 16  # catalogues of a tier that are merged into one of the next
TIERS = (16 << 20, 256 << 20, 4 << 30)  # bytes of batches; larger ones are not merged


def write_catalogue(
    fs: FileSystem,
    directory: str,
    header: tuple[UUID, int, int, int],
    rows: Iterable[bytes],
    ranges: Iterable[Range],
) -> None:
    """Write a catalogue durably. `rows` are in order and may repeat."""
    folder = catalogue_directory(directory)
    for name in fs.listdir(folder):
        if name.endswith(TEMPORARY):
            fs.remove(f"{folder}/{name}")
    path = catalogue_path(directory, max(catalogue_numbers(fs, directory), default=0) + 1)
    temporary = path.removesuffix(SUFFIX) + TEMPORARY
    try:
        with closing(fs.create(temporary)) as file:
            pages = PageWriter(file, 1)
            keys = pages.write((row for row, _same in groupby(rows)), KEY_ROW)
            spans = pages.write((RANGE.pack(*row) for row in ranges), RANGE.size)
            file.pwrite([encode_header(CatalogueHeader(*header, keys, spans))], 0)
            file.fsync()
        fs.rename(temporary, path)
    except StoreError:
        with suppress(StoreError):  # the next write removes it
            fs.remove(temporary)
        raise
    fs.sync_directory(folder)
    fs.sync_directory(directory)


def merge_tier(fs: FileSystem, directory: str, catalogues: list[Catalogue]) -> bool:
    """Merge catalogues of the smallest full tier; return False if none is full."""
    for low, high in pairwise((-1, *TIERS)):
        tier = [catalogue for catalogue in catalogues if low < catalogue.header.size <= high][
            :MERGED
        ]
        if len(tier) == MERGED:
            _merge(fs, directory, tier)
            return True
    return False


def _merge(fs: FileSystem, directory: str, tier: list[Catalogue]) -> None:
    """Replace catalogues by one; the rows pass through memory one by one."""
    headers = [catalogue.header for catalogue in tier]
    levels = 0
    for header in headers:
        levels |= header.levels
    summed = (
        headers[0].log_id,
        max(a.position for a in headers),
        sum(a.size for a in headers),
        levels,
    )
    rows = merge(*(catalogue.key_rows() for catalogue in tier))
    write_catalogue(
        fs,
        directory,
        summed,
        rows,
        _join_ranges(merge(*(catalogue.ranges() for catalogue in tier))),
    )
    remove_files(fs, directory, tier)


def _join_ranges(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield ranges in order, with touching or overlapping ones joined."""
    last: Range | None = None
    for current in ranges:
        if last is not None and last[:2] == current[:2] and current.first <= last.end:
            last = last._replace(end=max(last.end, current.end))
            continue
        if last is not None:
            yield last
        last = current
    if last is not None:
        yield last


def remove_files(fs: FileSystem, directory: str, catalogues: list[Catalogue]) -> None:
    """Remove catalogues durably."""
    for catalogue in catalogues:
        fs.remove(catalogue.path)
    fs.sync_directory(catalogue_directory(directory))
