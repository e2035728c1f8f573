"""The bytes of a catalogue."""

from __future__ import annotations

from pathlib import Path

from tests.store.harness import DIRECTORY, LOG_ID
from txmq.store.catalogue import (
    HASH,
    Range,
    folder_of,
    hash_of_id,
    hash_of_key,
    hashes_of_id,
    open_catalogues,
    place_of,
)
from txmq.store.catalogue_writing import write
from txmq.testing.simfs import SimFS

GOLDEN = Path(__file__).parents[1] / "golden" / "catalogue-v1.cat"
PRODUCER = bytes(range(16))
KEY, BLOCK = hash_of_key(7, b"order-1"), hash_of_id(7, PRODUCER, 3, 5)
RANGES = [Range(7, 2, 100, 108), Range(7, 3, 0, 9)]


def test_the_format_is_the_one_in_the_golden_file() -> None:
    fs = SimFS()
    fs.makedirs(folder_of(DIRECTORY))
    rows = sorted(hashed + place_of(2, 100).to_bytes(8, "big") for hashed in (KEY, KEY, BLOCK))
    write(fs, DIRECTORY, (LOG_ID, 4_160, 800, 8), rows, RANGES)
    [catalogue] = open_catalogues(fs, DIRECTORY, LOG_ID)
    assert fs.open(catalogue.path).pread(1 << 20, 0) == GOLDEN.read_bytes()


def test_the_golden_file_is_understood() -> None:
    fs = SimFS()
    fs.makedirs(folder_of(DIRECTORY))
    fs.create(f"{folder_of(DIRECTORY)}/00000000000000000009.cat").pwrite([GOLDEN.read_bytes()], 0)
    [catalogue] = open_catalogues(fs, DIRECTORY, LOG_ID)
    assert (catalogue.number, catalogue.about.position, catalogue.about.size) == (9, 4_160, 800)
    assert list(catalogue.ranges()) == list(catalogue.ranges(7)) == RANGES
    assert list(catalogue.ranges(6)) == []
    assert list(catalogue.places(KEY, 0)) == [place_of(2, 100)]
    assert (
        list(catalogue.places(KEY, place_of(2, 101)))
        == list(catalogue.places(bytes(HASH), 0))
        == []
    )
    [hashed] = hashes_of_id(7, PRODUCER, 43, catalogue.about.levels)
    assert list(catalogue.places(hashed, 0)) == [place_of(2, 100)]
    [other] = hashes_of_id(7, PRODUCER, 48, catalogue.about.levels)
    assert list(catalogue.places(other, 0)) == []
