"""The format of a catalogue."""

from __future__ import annotations

from pathlib import Path

from tests.store.log.harness import DIRECTORY, LOG_ID
from tests.store.simfs import SimFS
from txmq.store.catalogue.catalogue import (
    HASH,
    Range,
    catalogue_directory,
    encode_place,
    hash_of_id,
    hash_of_key,
    hashes_of_id,
    open_catalogues,
)
from txmq.store.catalogue.writer import write_catalogue

GOLDEN = Path(__file__).parents[2] / "golden" / "catalogue-v1.cat"
PRODUCER = bytes(range(16))
KEY, BLOCK = hash_of_key(7, b"order-1"), hash_of_id(7, PRODUCER, 3, 5)
RANGES = [Range(7, 2, 100, 108), Range(7, 3, 0, 9)]


def test_the_format_is_the_one_in_the_golden_file() -> None:
    fs = SimFS()
    fs.makedirs(catalogue_directory(DIRECTORY))
    rows = sorted(hashed + encode_place(2, 100).to_bytes(8, "big") for hashed in (KEY, KEY, BLOCK))
    write_catalogue(fs, DIRECTORY, (LOG_ID, 4_160, 800, 8), rows, RANGES)
    [catalogue] = open_catalogues(fs, DIRECTORY, LOG_ID)
    assert fs.open(catalogue.path).pread(1 << 20, 0) == GOLDEN.read_bytes()


def test_the_golden_file_is_understood() -> None:
    fs = SimFS()
    fs.makedirs(catalogue_directory(DIRECTORY))
    fs.create(f"{catalogue_directory(DIRECTORY)}/00000000000000000009.cat").pwrite(
        [GOLDEN.read_bytes()], 0
    )
    [catalogue] = open_catalogues(fs, DIRECTORY, LOG_ID)
    assert (catalogue.number, catalogue.header.position, catalogue.header.size) == (9, 4_160, 800)
    assert list(catalogue.ranges()) == list(catalogue.ranges(7)) == RANGES
    assert list(catalogue.ranges(6)) == []
    assert list(catalogue.places(KEY, 0)) == [encode_place(2, 100)]
    assert (
        list(catalogue.places(KEY, encode_place(2, 101)))
        == list(catalogue.places(bytes(HASH), 0))
        == []
    )
    [hashed] = hashes_of_id(7, PRODUCER, 43, catalogue.header.levels)
    assert list(catalogue.places(hashed, 0)) == [encode_place(2, 100)]
    [other] = hashes_of_id(7, PRODUCER, 48, catalogue.header.levels)
    assert list(catalogue.places(other, 0)) == []
