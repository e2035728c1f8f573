"""Files of sorted fixed-width rows in checked pages, with a search tree above them.

    at   type  field
    0    u32   CRC32C over bytes 4 .. 4096
    4    u16   rows
    6    u16   width of a row
    8          rows, in the order of their bytes, then zeros

The pages of one level are contiguous, and full but for the last; the leaves come first.
The n-th row of a level above the leaves is the first row of the n-th page of the level
below, so the file stores no page numbers. The last level is one page. Finding a row
among millions reads one page per level.
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

    from txmq.store.filesystem import File

PAGE = 4096
WRITTEN_AT_ONCE = 64  # pages
_HEAD = Struct("<IHH")
_COVERED = 4


class DamagedPage(StoreError):
    """A damaged page of the file `path`, which holds derived data and is rebuilt."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}", hint="nothing to do: the broker rebuilds the file")
        self.path = path


class Tree(NamedTuple):
    """Place of rows in a file: first page, number of rows, width of a row."""

    start: int
    rows: int
    width: int


class PageWriter:
    """Writer of pages to a new file; `page` is the number of the next one."""

    def __init__(self, file: File, page: int) -> None:
        self._file, self.page = file, page
        self._pages: list[bytes] = []

    def write(self, rows: Iterable[bytes], width: int) -> Tree:
        """Write rows, sorted and distinct, and the tree above them."""
        start, count = self.page, 0
        firsts: list[bytes] = []
        for leaf in _cut(rows, _rows_per_page(width)):
            count += len(leaf)
            firsts.append(leaf[0])
            self._put(leaf, width)
        while len(firsts) > 1:
            level, firsts = firsts, []
            for page in _cut(level, _rows_per_page(width)):
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
    """Reader of the rows of a tree, page by page.

    Raises DamagedPage, and StoreError where the disk fails.
    """

    def __init__(self, file: File, tree: Tree) -> None:
        self._file, self._width = file, tree.width
        self._rows_per_page = _rows_per_page(tree.width)
        # of each level, leaves first: its first page, its number of pages
        self._levels: list[tuple[int, int]] = []
        start, count = tree.start, tree.rows
        while count:
            pages = -(-count // self._rows_per_page)
            self._levels.append((start, pages))
            start, count = start + pages, pages if pages > 1 else 0

    def scan(self, first: bytes) -> Iterator[bytes]:
        """Yield the rows from `first` on, which may be a prefix of a row."""
        if not self._levels:
            return
        start, pages = self._levels[0]
        leaf = self._leaf(first)
        skipped = self._bisect(self._page(start + leaf), first, bisect_left)
        for number in range(leaf, pages):
            page = self._page(start + number)
            for at in range(_HEAD.size + skipped * self._width, self._end(page), self._width):
                yield page[at : at + self._width]
            skipped = 0

    def _leaf(self, first: bytes) -> int:
        """Return the number of the first leaf that may have such rows."""
        number = 0
        for start, _pages in reversed(self._levels[1:]):
            page = self._page(start + number)
            number = number * self._rows_per_page + max(
                0, self._bisect(page, first, bisect_right) - 1
            )
        return number

    def _bisect(self, page: bytes, first: bytes, bisect: Callable[..., int]) -> int:
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
        intact = (
            len(page) == PAGE
            and crc32c(page[_COVERED:]).to_bytes(_COVERED, "little") == page[:_COVERED]
        )
        if not intact or _HEAD.unpack_from(page)[2] != self._width:
            raise DamagedPage(self._file.path, f"page {number} is damaged")
        return page


def _rows_per_page(width: int) -> int:
    return (PAGE - _HEAD.size) // width


def _cut(rows: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    iterator = iter(rows)
    while page := list(islice(iterator, size)):
        yield page
