"""Catalogues: indexes from keys, ids and correlations of messages to the batches that
hold them.

    <data>/catalogue/<number, 20 digits>.cat

    page 0: header, then key rows and their tree, then range rows and their tree

A key row is a hash of 8 bytes and a place of 8: the batch at that place may hold a
message with that hash. Hashes are XXH64, seeded with the topic's id, of a key's bytes;
of a correlation; or of an id: producer id, level, sequence shifted right by the level.
Whole powers of two cover the sequences of a batch, so a batch of n messages has few id
hashes.

A range row names offsets of a partition whose batches are all in the catalogue. A
search scans the log for offsets that no catalogue covers. A catalogue only names
candidates; the batches decide. docs/FORMATS.md 5.1 defines the bytes,
`broker/search/catalogue_build.py` makes catalogues.
"""

from __future__ import annotations

from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from google_crc32c import value as crc32c
from xxhash import xxh64_digest

from txmq.errors import StoreError, UnsupportedFormat
from txmq.store.catalogue.pages import PAGE, DamagedPage, SortedRows, Tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from txmq.store.filesystem import File, FileSystem

MAGIC = b"TXCAT\0\0\1"
VERSION = 1
HASH, KEY_ROW = 8, 16
RANGE = Struct(">IIQQ")  # topic id, partition, first offset, end
PLACE = Struct(">Q")  # partition, then the base offset of the batch
TOPIC = Struct(">I")
OFFSET_BITS = 52
LEVELS = 20  # a batch has fewer than 2**20 messages
LAST = 1 << 64
SUFFIX, TEMPORARY = ".cat", ".tmp"
_HEADER = Struct("<8sII16sqqIIqqII")
_COVERED = 12
_DIGITS = 20


class Range(NamedTuple):
    """Offsets `first` to `end` of a partition."""

    topic_id: int
    partition: int
    first: int
    end: int


class CatalogueHeader(NamedTuple):
    """The header of a catalogue.

    `position` is the log position it was made at, `size` the bytes of its batches,
    `levels` a mask of the levels of its ids.
    """

    log_id: UUID
    position: int
    size: int
    levels: int
    keys: Tree
    ranges: Tree


class Catalogue:
    """An open catalogue. All reads raise DamagedPage where the file is damaged."""

    def __init__(self, file: File, number: int, header: CatalogueHeader) -> None:
        self.path, self.number, self.header = file.path, number, header
        self._keys, self._ranges = SortedRows(file, header.keys), SortedRows(file, header.ranges)

    def places(self, hashed: bytes, start: int) -> Iterator[int]:
        """Yield in order the places, from `start`, of batches that may hold
        this hash.
        """
        for row in self._keys.scan(hashed + PLACE.pack(start)):
            if not row.startswith(hashed):
                return
            yield int.from_bytes(row[HASH:], "big")

    def ranges(self, topic_id: int | None = None) -> Iterator[Range]:
        """Yield in order the ranges of one topic or of all."""
        begin = b"" if topic_id is None else TOPIC.pack(topic_id)
        for row in self._ranges.scan(begin):
            if not row.startswith(begin):
                return
            yield Range(*RANGE.unpack(row))

    def key_rows(self) -> Iterator[bytes]:
        """Return all key rows, for a merge."""
        return self._keys.scan(b"")


def encode_place(partition: int, base: int) -> int:
    """Return a batch's place as one number, ordered by partition, then by offset."""
    return partition << OFFSET_BITS | base


def place_offset(place: int) -> int:
    """Return the base offset in a place."""
    return place & (1 << OFFSET_BITS) - 1


def hash_of_key(topic_id: int, cell: bytes) -> bytes:
    """Return the hash of a key in a topic."""
    digest: bytes = xxh64_digest(cell, topic_id)
    return digest


def hash_of_correlation(topic_id: int, text: str) -> bytes:
    """Return the hash of what messages of a topic have in common."""
    return hash_of_key(topic_id, b"\0correlation\0" + text.encode())


def hash_of_id(topic_id: int, producer_id: bytes, level: int, block: int) -> bytes:
    """Return the hash of one block of sequences: block * 2**level up to the next."""
    return hash_of_key(topic_id, producer_id + bytes((level,)) + block.to_bytes(8, "big"))


def covering_blocks(sequence: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (level, block) of blocks that exactly cover a batch's sequences."""
    end = sequence + count
    while sequence < end:
        level = (end - sequence).bit_length() - 1
        if sequence:
            level = min(level, (sequence & -sequence).bit_length() - 1)
        yield level, sequence >> level
        sequence += 1 << level


def hashes_of_id(topic_id: int, producer_id: bytes, sequence: int, levels: int) -> Iterator[bytes]:
    """Yield all hashes that the message of that id may have.

    `levels` is as in `CatalogueHeader`.
    """
    for level in range(LEVELS):
        if levels >> level & 1:
            yield hash_of_id(topic_id, producer_id, level, sequence >> level)


def catalogue_directory(directory: str) -> str:
    """Return the directory of the catalogues of a data directory."""
    return f"{directory}/catalogue"


def catalogue_path(directory: str, number: int) -> str:
    return f"{catalogue_directory(directory)}/{number:0{_DIGITS}}{SUFFIX}"


def encode_header(header: CatalogueHeader) -> bytes:
    """Return page 0."""
    keys, ranges = header.keys, header.ranges
    fields = (
        header.log_id.bytes,
        header.position,
        header.size,
        header.levels,
        keys.start,
        keys.rows,
        ranges.rows,
    )
    covered = _HEADER.pack(MAGIC, 0, VERSION, *fields, ranges.start, 0)[_COVERED:].ljust(
        PAGE - _COVERED, b"\0"
    )
    checksum: bytes = crc32c(covered).to_bytes(4, "little")
    return MAGIC + checksum + covered


def open_catalogue(fs: FileSystem, directory: str, number: int, log_id: UUID) -> Catalogue:
    """Open a catalogue.

    Raises DamagedPage where it is damaged or of another log, UnsupportedFormat for
    another version.
    """
    path = catalogue_path(directory, number)
    file = fs.open(path)
    page = file.pread(PAGE, 0)
    if len(page) < PAGE or not page.startswith(MAGIC):
        raise DamagedPage(path, "not a catalogue")
    _, checksum, version, file_log_id, position, size, levels, start, rows, ranges, at, _ = (
        _HEADER.unpack_from(page)
    )
    if version > VERSION:
        raise UnsupportedFormat(path, version, VERSION)
    if crc32c(page[_COVERED:]) != checksum or file_log_id != log_id.bytes:
        raise DamagedPage(path, "a damaged header, or the catalogue of another log")
    trees = Tree(start, rows, KEY_ROW), Tree(at, ranges, RANGE.size)
    return Catalogue(file, number, CatalogueHeader(log_id, position, size, levels, *trees))


def open_catalogues(
    fs: FileSystem, directory: str, log_id: UUID, end: int = LAST
) -> list[Catalogue]:
    """Open all good catalogues; remove those that are damaged or of no use.

    Of no use are those of another log, or of a log that reached beyond `end`. Raises
    UnsupportedFormat for another version. A catalogue that cannot be read is skipped: a
    search then scans the log instead.
    """
    catalogues = []
    for number in catalogue_numbers(fs, directory):
        try:
            catalogue = open_catalogue(fs, directory, number, log_id)
            if catalogue.header.position > end:
                raise DamagedPage(
                    catalogue.path,
                    f"it was made at {catalogue.header.position}, but the log ends at {end}",
                )
            catalogues.append(catalogue)
        except UnsupportedFormat:
            raise
        except StoreError as error:
            if isinstance(error, DamagedPage):
                discard(fs, catalogue_path(directory, number))
    return catalogues


def discard(fs: FileSystem, path: str) -> None:
    """Remove a catalogue; if that fails, the next opening tries again."""
    with suppress(StoreError):
        fs.remove(path)


def catalogue_numbers(fs: FileSystem, directory: str) -> list[int]:
    """Return the numbers of the existing catalogues."""
    stems = (
        name.removesuffix(SUFFIX)
        for name in fs.listdir(catalogue_directory(directory))
        if name.endswith(SUFFIX)
    )
    return [
        int(stem) for stem in stems if len(stem) == _DIGITS and stem.isascii() and stem.isdigit()
    ]


def remove_catalogues(fs: FileSystem, directory: str) -> None:
    """Remove all catalogues, because their log has changed."""
    folder = catalogue_directory(directory)
    names = [name for name in fs.listdir(folder) if name.endswith((SUFFIX, TEMPORARY))]
    for name in names:
        fs.remove(f"{folder}/{name}")
    if names:
        fs.sync_directory(folder)
