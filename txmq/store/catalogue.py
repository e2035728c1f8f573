"""Catalogues: in which batches the messages with a key, or of an id, stand.
`broker/catalogues/catalogue_build.py` makes them.

    <data>/catalogue/<number, 20 digits>.cat

    page 0: header          key rows, and their tree          range rows, and their tree

A key row is a hash of 8 bytes and a place of 8; it says that a message with that hash
may be in the batch that begins there. Hashes are XXH64, seeded with the topic's id, of
a key's bytes; or of an id: producer id, level, sequence shifted right by the level. A
batch of n messages has few of the latter, since its sequences are covered by whole
powers of two. A range row names offsets of a partition of which all batches are in the
catalogue: what no range of a good catalogue has, is looked through. A catalogue only
names candidates: the batches decide. docs/FORMATS.md 9 has the bytes.
"""

from __future__ import annotations

from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from google_crc32c import value as crc32c
from xxhash import xxh64_digest

from txmq.errors import StoreError, UnsupportedFormat
from txmq.store.pages import PAGE, DamagedPage, SortedRows, Tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from txmq.store.fs import File, FileSystem

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


class About(NamedTuple):
    """What the header says: made at a position of the log, of batches of so many bytes;
    which levels of ids occur.
    """

    log_id: UUID
    position: int
    size: int
    levels: int
    keys: Tree
    ranges: Tree


class Catalogue:
    """One that is open. Raises DamagedPage wherever it turns out not to be what was
    written.
    """

    def __init__(self, file: File, number: int, about: About) -> None:
        self.path, self.number, self.about = file.path, number, about
        self._keys, self._ranges = SortedRows(file, about.keys), SortedRows(file, about.ranges)

    def places(self, hashed: bytes, start: int) -> Iterator[int]:
        """Places from `start` on of batches that may have what has this hash, in
        order.
        """
        for row in self._keys.walk(hashed + PLACE.pack(start)):
            if not row.startswith(hashed):
                return
            yield int.from_bytes(row[HASH:], "big")

    def ranges(self, topic_id: int | None = None) -> Iterator[Range]:
        """What is in it, of one topic or of all, in order."""
        begin = b"" if topic_id is None else TOPIC.pack(topic_id)
        for row in self._ranges.walk(begin):
            if not row.startswith(begin):
                return
            yield Range(*RANGE.unpack(row))

    def key_rows(self) -> Iterator[bytes]:
        """All of them, to be merged."""
        return self._keys.walk(b"")


def place_of(partition: int, base: int) -> int:
    """A batch's place as one number, in the order of partitions, then of offsets."""
    return partition << OFFSET_BITS | base


def base_of(place: int) -> int:
    """The base offset in a place."""
    return place & (1 << OFFSET_BITS) - 1


def hash_of_key(topic_id: int, cell: bytes) -> bytes:
    """The hash under which a key's batches are found in a topic."""
    digest: bytes = xxh64_digest(cell, topic_id)
    return digest


def hash_of_id(topic_id: int, producer_id: bytes, level: int, block: int) -> bytes:
    """The hash under which batches with the sequences block * 2**level, and on up to
    the next block, are found.
    """
    return hash_of_key(topic_id, producer_id + bytes((level,)) + block.to_bytes(8, "big"))


def blocks(sequence: int, count: int) -> Iterator[tuple[int, int]]:
    """(level, block) of blocks that cover the sequences of a batch exactly."""
    end = sequence + count
    while sequence < end:
        level = (end - sequence).bit_length() - 1
        if sequence:
            level = min(level, (sequence & -sequence).bit_length() - 1)
        yield level, sequence >> level
        sequence += 1 << level


def hashes_of_id(topic_id: int, producer_id: bytes, sequence: int, levels: int) -> Iterator[bytes]:
    """All hashes under which the message of that id may be found; `levels` as in
    `About`.
    """
    for level in range(LEVELS):
        if levels >> level & 1:
            yield hash_of_id(topic_id, producer_id, level, sequence >> level)


def folder_of(directory: str) -> str:
    """Where the catalogues of a data directory are."""
    return f"{directory}/catalogue"


def path_of(directory: str, number: int) -> str:
    return f"{folder_of(directory)}/{number:0{_DIGITS}}{SUFFIX}"


def encode_header(about: About) -> bytes:
    """Page 0."""
    keys, ranges = about.keys, about.ranges
    fields = (
        about.log_id.bytes,
        about.position,
        about.size,
        about.levels,
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
    """Raises DamagedPage where it is damaged or another log's, UnsupportedFormat for
    another version's.
    """
    path = path_of(directory, number)
    file = fs.open(path)
    page = file.pread(PAGE, 0)
    if len(page) < PAGE or not page.startswith(MAGIC):
        raise DamagedPage(path, "no catalogue begins here")
    _, checksum, version, found_id, position, size, levels, start, rows, ranges, at, _ = (
        _HEADER.unpack_from(page)
    )
    if version > VERSION:
        raise UnsupportedFormat(path, version, VERSION)
    if crc32c(page[_COVERED:]) != checksum or found_id != log_id.bytes:
        raise DamagedPage(path, "a damaged header, or the catalogue of another log")
    trees = Tree(start, rows, KEY_ROW), Tree(at, ranges, RANGE.size)
    return Catalogue(file, number, About(log_id, position, size, levels, *trees))


def open_catalogues(
    fs: FileSystem, directory: str, log_id: UUID, end: int = LAST
) -> list[Catalogue]:
    """All that are good. What is damaged, another log's, or made of a log that went
    beyond `end`, is removed.

    Raises UnsupportedFormat for another version's. One that cannot be read, or is gone
    meanwhile, is passed over: what no catalogue has is looked through.
    """
    found = []
    for number in numbers(fs, directory):
        try:
            catalogue = open_catalogue(fs, directory, number, log_id)
            if catalogue.about.position > end:
                raise DamagedPage(
                    catalogue.path,
                    f"it was made at {catalogue.about.position}, the log ends at {end}",
                )
            found.append(catalogue)
        except UnsupportedFormat:
            raise
        except StoreError as error:
            if isinstance(error, DamagedPage):
                discard(fs, path_of(directory, number))
    return found


def discard(fs: FileSystem, path: str) -> None:
    """Remove a catalogue; if that fails, the next look meets it again."""
    with suppress(StoreError):
        fs.remove(path)


def numbers(fs: FileSystem, directory: str) -> list[int]:
    """The numbers of the catalogues that are there."""
    stems = (
        name.removesuffix(SUFFIX)
        for name in fs.listdir(folder_of(directory))
        if name.endswith(SUFFIX)
    )
    return [
        int(stem) for stem in stems if len(stem) == _DIGITS and stem.isascii() and stem.isdigit()
    ]


def remove_catalogues(fs: FileSystem, directory: str) -> None:
    """Throw all away: the log is no longer what they were made of."""
    folder = folder_of(directory)
    there = [name for name in fs.listdir(folder) if name.endswith((SUFFIX, TEMPORARY))]
    for name in there:
        fs.remove(f"{folder}/{name}")
    if there:
        fs.sync_directory(folder)
