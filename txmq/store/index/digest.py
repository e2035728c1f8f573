"""Digests of the tables in LMDB, which has no checksums of its own.

The digest of a table is the number of its rows and the sum of their hashes, so that a
commit can carry it on by its own rows. It is written in the transaction of the rows.
Bits that flip on the disk change a row, or the tree that leads to it: then a walk over
all rows finds others than the digest promises.

The walk runs in a process of its own: LMDB follows the pointers of a damaged page
wherever they lead.
"""

from __future__ import annotations

import gc
import os
import signal
import warnings
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import lmdb
import msgpack
from xxhash import xxh3_64_intdigest

from txmq.store.index.pages import require_sound
from txmq.store.tables import META, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from lmdb import Environment, Transaction, _Database

DATA = "data.mdb"
VERSION_KEY, LOG_ID_KEY, POSITION_KEY, DIGEST_KEY = b"version", b"log_id", b"position", b"digest"
# keys of table `meta` that belong to the environment, and to no table's digest
RESERVED = frozenset((VERSION_KEY, LOG_ID_KEY, POSITION_KEY, DIGEST_KEY))
_SUMS = (1 << 64) - 1
_AT_ONCE = 256  # rows
UNREADABLE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
    lmdb.PanicError,
    lmdb.BadValsizeError,
)


class TableDigest(NamedTuple):
    """The number of a table's rows, and the sum of their hashes."""

    rows: int = 0
    total: int = 0

    def plus(self, items: Iterable[tuple[bytes, bytes]], sign: int = 1) -> TableDigest:
        """Return the digest with these rows, or with `sign` -1 without them."""
        rows, total = self
        for key, value in items:
            rows += sign
            total += sign * xxh3_64_intdigest(key, xxh3_64_intdigest(value))
        return TableDigest(rows, total & _SUMS)


Digests = dict[str, TableDigest]
EMPTY: Digests = dict.fromkeys(NAMES, TableDigest())


def write_digests(
    txn: Transaction[bytes], meta: _Database, digests: Digests, position: int
) -> None:
    """Write the digests of all tables, and the position that they are of."""
    body = msgpack.packb([position, digests])
    txn.put(DIGEST_KEY, msgpack.packb([body, xxh3_64_intdigest(body)]), db=meta)


def read_digests(txn: Transaction[bytes], meta: _Database) -> tuple[int, Digests] | None:
    """Return the position and the digests; None = there are none, or damaged ones."""
    row = txn.get(DIGEST_KEY, None, meta)
    if row is None:
        return None
    try:
        body, hashed = msgpack.unpackb(row)
        if hashed != xxh3_64_intdigest(body):
            return None
    except (ValueError, TypeError):
        return None
    position, digests = msgpack.unpackb(body)
    return position, {name: TableDigest(*digest) for name, digest in digests.items()}


def find_damage(path: Path) -> str:
    """Return why the rows in the directory `path` cannot be trusted; "" = they are what
    was written, or nothing says what they should be.

    No other process may write them. Raises OSError where no process can be made.
    """
    theirs, ours = os.pipe()
    with warnings.catch_warnings():
        # The child uses no thread of the parent, nor any lock but its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _answer(path, ours)
    os.close(ours)
    with os.fdopen(theirs, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        return f"reading it ends a process with {signal.Signals(-status).name}"
    return answer.decode() if not status else "reading it fails"


def _answer(path: Path, pipe: int) -> None:
    """Write what `walk` finds, and end this process."""
    # Nothing of the parent ends here: a file of its garbage would close a descriptor
    # that is LMDB's by then, and the index would count as damaged.
    gc.freeze()
    status = 1
    with suppress(BaseException):
        # Among the files of the parent is the lock of its data directory, which this
        # process would hold beyond a kill of the parent.
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        os.write(pipe, walk(path).encode())
        status = 0
    os._exit(status)


def walk(path: Path) -> str:
    """Return what `find_damage` does, in this process."""
    size = (path / DATA).stat().st_size
    if not size:
        return ""  # it was never finished
    try:
        require_sound(path / DATA)
        env = lmdb.open(
            str(path), readonly=True, lock=False, create=False, max_dbs=len(NAMES), map_size=size
        )
    except (*UNREADABLE, ValueError) as error:
        return f"unreadable: {error}"
    except lmdb.Error:
        return ""  # no damage: whoever opens it to use it meets the same error
    try:
        with env, env.begin() as txn:
            return _damage(env, txn)
    except (lmdb.Error, ValueError, TypeError, LookupError) as error:
        return f"unreadable: {error}"


def _damage(env: Environment, txn: Transaction[bytes]) -> str:
    try:
        meta = env.open_db(META.encode(), txn, create=False)
    except lmdb.NotFoundError:
        return ""  # it was never finished
    found = read_digests(txn, meta)
    if found is None:
        if txn.get(DIGEST_KEY, None, meta) is not None:
            return "its digests are damaged"
        return "its digests are missing" if txn.get(VERSION_KEY, None, meta) else ""
    position, digests = found
    if txn.get(POSITION_KEY, None, meta) != msgpack.packb([position]):
        return "its position is damaged"
    new = next((name for name in NAMES if name not in digests), None)
    return (
        f"it was written without table {new}"
        if new is not None
        else _damaged_table(env, txn, digests)
    )


def _damaged_table(env: Environment, txn: Transaction[bytes], digests: Digests) -> str:
    for name in NAMES:
        digest = digests[name]
        if digest_of(env, txn, name, at_most=digest.rows + 1) != digest:
            return f"table {name} is damaged: it has other rows than were written"
    return ""


def digest_of(env: Environment, txn: Transaction[bytes], name: str, at_most: int) -> TableDigest:
    """Return the digest of a table, of not many more rows than `at_most`: a damaged
    tree may lead round in circles.
    """
    digest = TableDigest()
    for rows in table_rows(txn, env.open_db(name.encode(), txn, create=False), name):
        digest = digest.plus(rows)
        if digest.rows >= at_most:
            break
    return digest


def table_rows(
    txn: Transaction[bytes], database: _Database, name: str
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the rows of a table that its digest covers, some at a time."""
    cursor = iter(txn.cursor(database))
    while rows := list(islice(cursor, _AT_ONCE)):
        yield [row for row in rows if row[0] not in RESERVED] if name == META else rows
