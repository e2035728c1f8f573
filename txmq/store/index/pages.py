"""Pages of LMDB's file: each is in one tree at one place, or in the list of free pages,
or in neither.

LMDB writes over the pages of that list, and finds rows by the keys in branch pages. A
flipped bit in these changes no row that a walk over all rows meets. What such a walk
covers is not checked here.

    page      u64 number | u16 | u16 flags | u16 lower | u16 upper | offsets of nodes
    node      u16 low | u16 high | u16 flags | u16 length of key | key | data
    overflow  u64 number | u16 | u16 flags | u32 pages | data
    tree      u32 page size | u16 flags | u16 depth |
              u64 branches, leaves, overflows, rows, root
    meta      u64 number | u16 | u16 flags | u32 | u32 magic | u32 version | u64, u64 |
              tree of free pages | tree of tables | u64 last page | u64 commit

In a branch, low, high and flags of a node are the number of a child. In a leaf, low and
high are the size of the data, which is the number of an overflow page where it is big.
The tree of free pages has those that a commit has freed: from u64 commit to u64 count
and u64 numbers, falling.
"""

from __future__ import annotations

import mmap
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Order = Callable[[bytes], bytes]  # what keys are compared by
    _Row = tuple[int, bytes, memoryview]  # flags, key and value

_PAGE = struct.Struct("=QHHHH")
_NODE = struct.Struct("=HHHH")
_OVERFLOW = struct.Struct("=QHHI")
_TREE = struct.Struct("=IHHQQQQQ")
_ENDS = struct.Struct("=QQ")
_NUMBER = struct.Struct("=Q")
_META = struct.Struct("=QHHIIIQQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_METAS = 2  # the first pages; the one with the later commit counts
_BRANCH, _LEAF, _OF_OVERFLOW, _OF_META = 1, 2, 4, 8  # flags of pages
_BIG, _TABLE = 1, 2  # flags of nodes
_BY_NUMBER, _BY_BYTES = 8, 0  # flags of trees: how keys are compared
_NO_PAGE = (1 << 64) - 1  # the root of an empty tree


class PageDamage(ValueError):
    """A page is not what LMDB writes."""


class _Tree(NamedTuple):
    page_size: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    rows: int
    root: int


class _Page(NamedTuple):
    number: int
    is_leaf: bool
    data: memoryview
    nodes: Sequence[int]  # their offsets

    def key(self, node: int) -> bytes:
        *_, length = _NODE.unpack_from(self.data, node)
        start = node + _NODE.size
        return bytes(self.data[start : start + length])

    def child(self, node: int) -> int:
        low, high, flags, _length = _NODE.unpack_from(self.data, node)
        return int(low | high << 16 | flags << 32)


def require_sound(path: Path) -> None:
    """Raise a ValueError if pages of the file contradict one another."""
    with path.open("rb") as file:
        # Not closed here: a traceback still has slices of it.
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    try:
        _Pages(memoryview(mapped)).require_sound()
    except (struct.error, TypeError) as error:
        raise PageDamage(f"a page has another form than LMDB's: {error}") from None


class _Pages:
    """The pages of the last commit, taken one by one."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._size = data, _TREE.unpack_from(data, _META.size)[0]
        for number in range(_METAS):
            own, _, flags, _, *words = _META.unpack_from(data, number * self._size)
            if [own, flags, *words[:2]] != [number, _OF_META, _MAGIC, _VERSION]:
                raise PageDamage(f"page {number} does not begin a file of LMDB")
        metas = [self._data[n * self._size + _META.size :] for n in range(_METAS)]
        ends = [_ENDS.unpack_from(meta, 2 * _TREE.size) for meta in metas]
        newest = max(range(_METAS), key=lambda n: ends[n][1])
        self._free, self._tables = (
            _Tree(*_TREE.unpack_from(metas[newest], n * _TREE.size)) for n in range(2)
        )
        self._last, self._commit = ends[newest]
        if len(data) < (self._last + 1) * self._size:
            raise PageDamage("the file was cut short")
        self._taken = bytearray(self._last + 1)
        self._found = [0, 0, 0]  # branches, leaves and overflow pages of a tree

    def require_sound(self) -> None:
        for flags, _key, value in list(self._rows(self._tables, _BY_BYTES)):
            if flags & _TABLE:
                table = _Tree(*_TREE.unpack(value))
                for _ in self._rows(table, _BY_BYTES, values=bool(table.overflows)):
                    pass
        for _flags, key, value in list(self._rows(self._free, _BY_NUMBER)):
            [commit] = _NUMBER.unpack(key)
            self._take_free(commit, value)

    def _rows(self, tree: _Tree, flags: int, *, values: bool = True) -> Iterator[_Row]:
        """Yield the rows of a tree, if `values` are wanted; take its pages."""
        if tree.flags != flags:
            raise PageDamage(f"the tree at page {tree.root} has flags {tree.flags}, not {flags}")
        self._found = [0, 0, 0]
        order = _by_number if flags == _BY_NUMBER else bytes
        for leaf in self._leaves(tree.root, order, depth=tree.depth):
            if values:
                yield from self._nodes(leaf)
        if self._found != [tree.branches, tree.leaves, tree.overflows]:
            raise PageDamage(f"the tree at page {tree.root} has other pages than it counts")

    def _take_free(self, commit: int, value: memoryview) -> None:
        count, *numbers = value.cast("Q").tolist()
        del numbers[count:]
        if commit > self._commit or len(numbers) != count:
            raise PageDamage(f"the list of the pages that commit {commit} has freed is damaged")
        if any(one <= other for one, other in pairwise(numbers)):
            raise PageDamage(f"the pages that commit {commit} has freed are out of order")
        for number in numbers:
            self._take(number)

    def _take(self, number: int, count: int = 1) -> None:
        if number < _METAS or number + count - 1 > self._last:
            raise PageDamage(f"page {number} is outside of the file")
        if any(self._taken[number : number + count]):
            raise PageDamage(f"page {number} is used twice, or is used and free")
        self._taken[number : number + count] = bytes([1]) * count

    def _leaves(
        self,
        root: int,
        order: Order,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        depth: int,
    ) -> Iterator[_Page]:
        """Yield the leaves of a tree, whose keys are from `low` on and below `high`."""
        if root == _NO_PAGE and not depth:
            return
        page = self._read(root)
        self._found[page.is_leaf] += 1
        if page.is_leaf != (depth == 1):
            raise PageDamage(f"page {root} is at the wrong depth of its tree")
        if page.is_leaf:
            _require_order(page, page.nodes[:: max(1, len(page.nodes) - 1)], order, low, high)
            yield page
            return
        # The first key of a branch has no meaning.
        keys = _require_order(page, page.nodes[1:], order, low, high)
        children = [page.child(node) for node in page.nodes]
        for child, start, end in zip(children, (low, *keys), (*keys, high), strict=True):
            yield from self._leaves(child, order, start, end, depth=depth - 1)

    def _read(self, number: int) -> _Page:
        self._take(number)
        data = self._data[number * self._size : (number + 1) * self._size]
        own, _, flags, lower, upper = _PAGE.unpack_from(data)
        if own != number or flags not in (_BRANCH, _LEAF):
            raise PageDamage(f"page {number} is not one of a tree")
        nodes = data[_PAGE.size : lower].cast("H").tolist()
        if not nodes or lower > upper or min(nodes) != upper:
            raise PageDamage(f"the offsets of page {number} are damaged")
        return _Page(number, flags == _LEAF, data, nodes)

    def _nodes(self, leaf: _Page) -> Iterator[_Row]:
        """Yield flags, keys and values of a leaf's nodes; take their overflow pages."""
        for node in leaf.nodes:
            low, high, flags, length = _NODE.unpack_from(leaf.data, node)
            value, size = leaf.data[node + _NODE.size + length :], low | high << 16
            if flags & _BIG:
                value = self._overflow(*_NUMBER.unpack_from(value))
            yield flags, leaf.key(node), value[:size]

    def _overflow(self, number: int) -> memoryview:
        self._take(number)
        start = number * self._size
        own, _, flags, count = _OVERFLOW.unpack_from(self._data, start)
        if own != number or flags != _OF_OVERFLOW:
            raise PageDamage(f"page {number} is not one of a large value")
        self._take(number + 1, count - 1)
        self._found[2] += count
        return self._data[start + _OVERFLOW.size : start + count * self._size]


def _require_order(
    page: _Page, nodes: Sequence[int], order: Order, low: bytes | None, high: bytes | None
) -> list[bytes]:
    """Return the keys of these nodes, which rise, from `low` on and below `high`."""
    keys = [page.key(node) for node in nodes]
    places = [order(key) for key in keys]
    if (
        any(one >= other for one, other in pairwise(places))
        or (places and low is not None and places[0] < order(low))
        or (places and high is not None and places[-1] >= order(high))
    ):
        raise PageDamage(f"keys of page {page.number} are out of order")
    return keys


def _by_number(key: bytes) -> bytes:
    [number] = _NUMBER.unpack(key)
    return int(number).to_bytes(_NUMBER.size)
