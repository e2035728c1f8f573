"""Decoder of PostgreSQL's plugin `pgoutput`, protocol version 1.

    B: i64 commit LSN | i64 committed at | u32 xid
    C: u8 0 | i64 commit LSN | i64 end LSN | i64 committed at
    M: u8 flags (1 = transactional) | i64 LSN | prefix, 0 | u32 length | content

Big-endian; times are microseconds since the year 2000. A transaction is what comes
between B and C, with each message of txmq as an M. Other contents of a publication
(rows, relations, types, origins, truncations) are ignored, and so are messages of other
prefixes. Messages outside transactions are ignored too, because nothing may have
committed them.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from txmq.errors import RemoteProtocolError

BEGIN: Final = struct.Struct(">qqI")
COMMIT: Final = struct.Struct(">Bqqq")
MESSAGE: Final = struct.Struct(">Bq")
LENGTH: Final = struct.Struct(">I")
TRANSACTIONAL: Final = 1
YEAR_2000: Final = 946_684_800_000_000  # microseconds from 1970
IGNORED: Final = frozenset(b"ORYIUDT")


class CommittedTransaction(NamedTuple):
    """A committed transaction, with the contents of its messages in their order.

    `lsn` is the position of its COMMIT in the log, and grows with each transaction.
    `end_lsn` is the position behind it, from which a reader goes on.
    """

    lsn: int
    end_lsn: int
    committed_at: int  # microseconds since the epoch, by the database's clock
    xid: int
    contents: tuple[bytes, ...]


class TransactionAssembler:
    """Assembles transactions from the plugin's messages. Raises RemoteProtocolError."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._begun: tuple[int, int, int] | None = None
        self._contents: list[bytes] = []

    @property
    def incomplete(self) -> bool:
        """Return whether a transaction has begun and not ended."""
        return self._begun is not None

    def feed(self, piece: bytes) -> CommittedTransaction | None:
        """Return the transaction that this piece completes, if any."""
        kind = piece[:1]
        try:
            if kind == b"C":
                return self._commit(piece)
            if kind == b"B":
                self._begin(piece)
            elif kind == b"M":
                self._message(piece)
            elif not kind or piece[0] not in IGNORED:
                raise _unreadable(
                    f"pgoutput sent a piece of kind {kind!r}, which version 1 does not have"
                )
        except struct.error as error:
            raise _unreadable(
                f"pgoutput sent a piece of {len(piece)} bytes that ends too early"
            ) from error
        return None

    def _begin(self, piece: bytes) -> None:
        if self._begun is not None:
            raise _unreadable("pgoutput began a transaction within another")
        _require(piece, 1 + BEGIN.size)
        self._begun = BEGIN.unpack_from(piece, 1)

    def _commit(self, piece: bytes) -> CommittedTransaction:
        _require(piece, 1 + COMMIT.size)
        _flags, lsn, end, _at = COMMIT.unpack_from(piece, 1)
        if self._begun is None or self._begun[0] != lsn:
            raise _unreadable("pgoutput committed a transaction that it had not begun")
        (_lsn, at, xid), contents = self._begun, tuple(self._contents)
        self._begun, self._contents = None, []
        return CommittedTransaction(lsn, end, at + YEAR_2000, xid, contents)

    def _message(self, piece: bytes) -> None:
        flags, _lsn = MESSAGE.unpack_from(piece, 1)
        start = 1 + MESSAGE.size
        zero = piece.find(b"\0", start)
        if zero < 0:
            raise _unreadable("pgoutput sent a message whose prefix has no end")
        (length,) = LENGTH.unpack_from(piece, zero + 1)
        content = zero + 1 + LENGTH.size
        _require(piece, content + length)
        if flags & TRANSACTIONAL and piece[start:zero] == self._prefix:
            if self._begun is None:
                raise _unreadable("pgoutput sent a message of a transaction that it had not begun")
            self._contents.append(piece[content:])


def _require(piece: bytes, size: int) -> None:
    if len(piece) != size:
        raise _unreadable(
            f"pgoutput sent a piece of {len(piece)} bytes, of {size} by its own account"
        )


def _unreadable(text: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        text, hint="PostgreSQL may be newer than this txmq: update it; the slot keeps its place"
    )
