"""Damage of pages that no row shows: the free list, branches, headers (fault 140)."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.index.tables import EMPTY, LOG, contents, path, reopened, settle
from txmq.store.index import digest, pages
from txmq.store.index.digest import DATA
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.index.pages import PageDamage, require_sound
from txmq.store.tables import DUE, ENTRIES

__all__ = ["path"]
COMMITS = 40
BRANCH, LEAF = 1, 2


def worked(path: Path) -> None:
    """Make tables of several levels by commits that put, change and delete rows."""
    rng = random.Random(1)
    tables = LmdbTables.open(path, log_id=LOG)
    for number in range(1, COMMITS + 1):
        for _ in range(150):
            key = b"%08d" % rng.randrange(3_000)
            table = tables[rng.choice((DUE, ENTRIES))]
            if rng.random() < 0.4:
                table.delete(key)
            else:
                table.put(key, (number, b"x" * rng.choice((5, 60, 300, 5_000))))
        settle(tables, number)
        require_sound(path / DATA)
    tables.close()


class Trees(pages._Pages):
    """The pages of a file, by their kind."""

    def free_lists(self) -> list[tuple[int, ...]]:
        """Return the lists of free pages, each with its length in front."""
        rows = list(self._rows(self._free, pages._BY_NUMBER))
        return [tuple(value.cast("Q").tolist()) for _flags, _key, value in rows]

    def root_of_free_pages(self) -> int:
        return self._free.root

    def of_kind(self, flags: int) -> list[int]:
        """Return pages of trees that have these flags."""
        self.require_sound()
        return [
            number
            for number in range(2, self._last + 1)
            if pages._PAGE.unpack_from(self._page(number))[::2][:2] == (number, flags)
            and number not in {page for one in self._lists for page in one[1:]}
        ]

    def _page(self, number: int) -> memoryview:
        return self._data[number * self._size :]

    def require_sound(self) -> None:
        self._lists = type(self)(self._data).free_lists()
        super().require_sound()


def trees(data: bytes | bytearray) -> Trees:
    return Trees(memoryview(data))


def free_page_flips(data: bytearray) -> Iterator[int]:
    """Yield the place of each byte of a listed free page that is not zero."""
    known = trees(data)
    for leaf in known._leaves(known._free.root, bytes, depth=known._free.depth):
        for node in leaf.nodes:
            start = leaf.number * mmap.PAGESIZE + node + 16  # behind the node and its key
            count = int.from_bytes(data[start : start + 8], "little")
            yield from (start + 8 * n + byte for n in range(1, 1 + count) for byte in range(2))


def key_flips(data: bytearray) -> Iterator[int]:
    """Yield places in keys of branches, the first digits of the key."""
    for number in trees(data).of_kind(BRANCH):
        page = trees(data)._read(number)
        for node in page.nodes[1:]:
            yield from (number * mmap.PAGESIZE + node + 8 + n for n in range(len(page.key(node))))


def header_flips(data: bytearray) -> Iterator[int]:
    """Yield places of the numbers, flags and bounds of pages."""
    for number in trees(data).of_kind(LEAF)[::5] + trees(data).of_kind(BRANCH):
        yield from (number * mmap.PAGESIZE + n for n in (0, 7, 10, 11, 12, 13, 14, 15))


FLIPS: dict[str, Callable[[bytearray], Iterator[int]]] = {
    "free pages": free_page_flips,
    "keys of branches": key_flips,
    "headers": header_flips,
}


def test_no_commit_leaves_what_is_taken_for_damage(path: Path) -> None:
    worked(path)
    assert reopened(path)[:2] == (COMMITS, "")
    data = bytearray((path / DATA).read_bytes())
    assert len(trees(data).free_lists()) > 1
    assert trees(data).of_kind(BRANCH)


@pytest.mark.parametrize("kind", FLIPS)
def test_a_flipped_bit_that_no_row_shows_is_found(path: Path, kind: str) -> None:
    worked(path)
    data, rng = bytearray((path / DATA).read_bytes()), random.Random(2)
    places = list(FLIPS[kind](data))
    for place in rng.sample(places, min(20, len(places))):
        bit = 1 << rng.randrange(8)
        if kind == "keys of branches":
            bit = 0x80  # beyond the digits: no row is between the two keys by chance
        data[place] ^= bit
        (path / DATA).write_bytes(data)
        with pytest.raises(PageDamage):
            require_sound(path / DATA)
        assert digest.find_damage(path).startswith("unreadable: "), place
        data[place] ^= bit


def test_a_zeroed_root_of_the_free_list_makes_the_index_anew(path: Path) -> None:
    worked(path)
    data = bytearray((path / DATA).read_bytes())
    start = trees(data).root_of_free_pages() * mmap.PAGESIZE
    data[start : start + mmap.PAGESIZE] = bytes(mmap.PAGESIZE)
    (path / DATA).write_bytes(data)
    position, reason, rest = reopened(path)
    assert (position, rest) == (0, EMPTY)
    assert reason.startswith("unreadable: page ")
    assert reopened(path) == (0, "", EMPTY)


def free_a_used_page(path: Path) -> None:
    """Have the list of free pages name a page with rows, as a flipped bit may do."""
    data = bytearray((path / DATA).read_bytes())
    leaves = trees(data).of_kind(LEAF)
    for place in free_page_flips(data):
        for bit in range(8):
            data[place] ^= 1 << bit
            if any(page in one[1:] for one in trees(data).free_lists() for page in leaves):
                (path / DATA).write_bytes(data)
                return
            data[place] ^= 1 << bit
    pytest.fail("no flip of one bit leads to a page with rows")


def write_on(path: Path) -> None:
    """Write into an index that is believed to be whole, and read all of it again."""
    tables = LmdbTables.open(path, log_id=LOG)
    expected = contents(tables)
    for number in range(COMMITS + 1, COMMITS + 10):
        tables[DUE].put(b"new", (number,))
        settle(tables, number)
    assert {key: row for key, row in contents(tables)[DUE] if key != b"new"} == dict(expected[DUE])
    assert contents(tables)[ENTRIES] == expected[ENTRIES]
    tables.close()


def test_the_digests_alone_do_not_find_a_page_that_is_used_and_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked(path)
    free_a_used_page(path)
    monkeypatch.setattr(digest, "require_sound", lambda _file: None)
    assert digest.find_damage(path) == ""


def test_a_page_that_is_used_and_free_is_not_written_over(path: Path) -> None:
    worked(path)
    free_a_used_page(path)
    assert "used" in digest.find_damage(path)
    write_on(path)
    assert reopened(path)[1] == ""
