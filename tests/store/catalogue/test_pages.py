"""Sorted rows in pages: found from anywhere, and every damaged page is noticed."""

from __future__ import annotations

from bisect import bisect_left
from random import Random

import pytest

from tests.store.simfs import SimFS
from txmq.store.catalogue.pages import PAGE, DamagedPage, PageWriter, SortedRows, Tree


def written(rows: list[bytes], width: int) -> tuple[SimFS, Tree]:
    fs = SimFS()
    file = fs.create("/rows")
    file.pwrite([bytes(PAGE)], 0)
    writer = PageWriter(file, 1)
    tree = writer.write(rows, width)
    assert file.size() == writer.page * PAGE
    return fs, tree


@pytest.mark.parametrize("count", [0, 1, 254, 255, 256, 511, 70_000])
def test_rows_are_found_from_any_place_on(count: int) -> None:
    rng = Random(count)
    rows = sorted(
        {rng.randbytes(2) + rng.randrange(1 << 40).to_bytes(14, "big") for _ in range(count)}
    )
    fs, tree = written(rows, 16)
    assert tree.rows == len(rows)
    found = SortedRows(fs.open("/rows"), tree)
    starts = [
        b"",
        b"\xff" * 16,
        *rng.sample(rows, min(40, len(rows))),
        *(rng.randbytes(9) for _ in range(40)),
    ]
    for start in starts:
        at = bisect_left(rows, start)
        assert [row for row, _ in zip(found.scan(start), range(600), strict=False)] == rows[
            at : at + 600
        ]
    assert list(found.scan(b"")) == rows


def test_a_flipped_bit_is_noticed_by_a_read_of_its_page() -> None:
    rows = [number.to_bytes(24, "big") for number in range(1_000)]
    fs, tree = written(rows, 24)
    for page in range(tree.start, fs.open("/rows").size() // PAGE):
        for at in (0, 4, 6, 8, PAGE - 1):
            copy = fs.copy()
            file = copy.open("/rows", write=True)
            [byte] = file.pread(1, page * PAGE + at)
            file.pwrite([bytes([byte ^ 4])], page * PAGE + at)
            found: list[bytes] = []
            with pytest.raises(DamagedPage):
                found += SortedRows(copy.open("/rows"), tree).scan(b"")
            assert found == rows[: len(found)]


def test_a_file_that_was_cut_is_noticed() -> None:
    fs, tree = written([number.to_bytes(16, "big") for number in range(600)], 16)
    fs.open("/rows", write=True).truncate(2 * PAGE)
    with pytest.raises(DamagedPage):
        list(SortedRows(fs.open("/rows"), tree).scan(b""))
