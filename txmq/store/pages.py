"""Sorted rows of one width in pages that are checked as they are read, with a tree
above them.

    at   type  field
    0    u32   CRC32C over bytes 4 .. 4096
    4    u16   rows
    6    u16   width of a row
    8          rows, in the order of their bytes, then zeros

All pages of a level stand one behind the other and are full but for the last, the
leaves first. A row of a page above the leaves is the first row of the page below that
its place stands for, so no page number is written anywhere; the last level is one page.
A row among millions is found by reading one page a level.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from google_crc32c import value as crc32c

from txmq.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from txmq.store.fs import File

PAGE = 4096
WRITTEN_AT_ONCE = 64  # pages
_HEAD = Struct("<IHH")
_COVERED = 4


class DamagedPage(StoreError):
    """A page of the file `path` is not what was written. The file is derived data, and
    is made anew.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}", hint="it is made anew by itself")
        self.path = path


class Tree(NamedTuple):
    """Where rows stand in a file: from the page `start` on, their number, the width of
    one.
    """

    start: int
    rows: int
    width: int


class PageWriter:
    """Writes pages to a file that is being made; `page` is the number of the next
    one.
    """

    def __init__(self, file: File, page: int) -> None:
        self._file, self.page = file, page
        self._pages: list[bytes] = []

    def write(self, rows: Iterable[bytes], width: int) -> Tree:
        """Rows, in order and each once, and the tree above them."""
        start, count = self.page, 0
        firsts: list[bytes] = []
        for leaf in _cut(rows, _fan(width)):
            count += len(leaf)
            firsts.append(leaf[0])
            self._put(leaf, width)
        while len(firsts) > 1:
            level, firsts = firsts, []
            for page in _cut(level, _fan(width)):
                firsts.append(page[0])
                self._put(page, width)
        self._flush()
        return Tree(start, count, width)

    def _put(self, rows: list[bytes], width: int) -> None:
        covered = (_HEAD.pack(0, len(rows), width)[_COVERED:] + b"".join(rows)).ljust(
            PAGE - _COVERED, b"\0"
        )
        self._pages.append(crc32c(covered).to_bytes(_COVERED, "little") + covered)
        self.page += 1
        if len(self._pages) == WRITTEN_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self._pages:
            self._file.pwrite(self._pages, (self.page - len(self._pages)) * PAGE)
            self._pages = []


class SortedRows:
    """The rows of a tree, read page by page. Raises DamagedPage, and StoreError where
    the disk does.
    """

    def __init__(self, file: File, tree: Tree) -> None:
        self._file, self._width = file, tree.width
        self._fan = _fan(tree.width)
        self._levels: list[
            tuple[int, int]
        ] = []  # of each, from the leaves up: its first page, and how many
        start, count = tree.start, tree.rows
        while count:
            pages = -(-count // self._fan)
            self._levels.append((start, pages))
            start, count = start + pages, pages if pages > 1 else 0

    def walk(self, first: bytes) -> Iterator[bytes]:
        """The rows from `first` on, which may be the beginning of one."""
        if not self._levels:
            return
        start, pages = self._levels[0]
        leaf = self._leaf(first)
        skipped = self._place(self._page(start + leaf), first, bisect_left)
        for number in range(leaf, pages):
            page = self._page(start + number)
            for at in range(_HEAD.size + skipped * self._width, self._end(page), self._width):
                yield page[at : at + self._width]
            skipped = 0

    def _leaf(self, first: bytes) -> int:
        """The number of the first leaf that may have such rows."""
        found = 0
        for start, _pages in reversed(self._levels[1:]):
            page = self._page(start + found)
            found = found * self._fan + max(0, self._place(page, first, bisect_right) - 1)
        return found

    def _place(self, page: bytes, first: bytes, bisect: Callable[..., int]) -> int:
        return bisect(range(self._count(page)), first, key=lambda row: self._row(page, row))

    def _row(self, page: bytes, row: int) -> bytes:
        at = _HEAD.size + row * self._width
        return page[at : at + self._width]

    def _count(self, page: bytes) -> int:
        return (self._end(page) - _HEAD.size) // self._width

    def _end(self, page: bytes) -> int:
        return _HEAD.size + int(_HEAD.unpack_from(page)[1]) * self._width

    def _page(self, number: int) -> bytes:
        page = self._file.pread(PAGE, number * PAGE)
        good = (
            len(page) == PAGE
            and crc32c(page[_COVERED:]).to_bytes(_COVERED, "little") == page[:_COVERED]
        )
        if not good or _HEAD.unpack_from(page)[2] != self._width:
            raise DamagedPage(self._file.path, f"page {number} is damaged")
        return page


def _fan(width: int) -> int:
    return (PAGE - _HEAD.size) // width


def _cut(rows: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    iterator = iter(rows)
    while part := list(islice(iterator, size)):
        yield part
