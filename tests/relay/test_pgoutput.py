"""Decoding of the plugin's messages; malformed ones are refused."""

from __future__ import annotations

import struct

import pytest

from txmq.errors import RemoteProtocolError
from txmq.relay.pgoutput import CommittedTransaction, TransactionAssembler

# As PostgreSQL 15 sent them.
BEGIN = b"B\x00\x00\x00\x00\x01\x92 @\x00\x03\x03\xc7\x16\xf0\x86y\x00\x00\x02\xd7"
MESSAGE = b"M\x01\x00\x00\x00\x00\x01\x92 @txmq\x00\x00\x00\x00\x04hi\x00x"
COMMIT = b"C\x00\x00\x00\x00\x00\x01\x92 @\x00\x00\x00\x00\x01\x92 x\x00\x03\x03\xc7\x16\xf0\x86y"
WHOLE = (BEGIN, MESSAGE, COMMIT)
AT = 1_795_263_348_369_017  # when it was committed by the clock on the wall


def message(content: bytes, *, prefix: bytes = b"txmq", flags: int = 1) -> bytes:
    return (
        b"M"
        + struct.pack(">Bq", flags, 7)
        + prefix
        + b"\0"
        + struct.pack(">I", len(content))
        + content
    )


def taken(*pieces: bytes) -> list[CommittedTransaction]:
    transactions = TransactionAssembler("txmq")
    return [found for piece in pieces if (found := transactions.feed(piece)) is not None]


def test_a_transaction_is_put_together() -> None:
    [found] = taken(*WHOLE)
    assert found == CommittedTransaction(0x1922040, 0x1922078, AT, 727, (b"hi\0x",))


def test_messages_keep_their_order_and_do_not_stay_for_the_next_transaction() -> None:
    found = taken(BEGIN, message(b"1"), message(b""), message(b"3"), COMMIT, BEGIN, COMMIT)
    assert [transaction.contents for transaction in found] == [(b"1", b"", b"3"), ()]


def test_messages_of_other_prefixes_are_ignored() -> None:
    strange = (message(b"x", prefix=b"txmq2"), message(b"x", prefix=b""), message(b"x", flags=0))
    rows = tuple(kind + b"whatever" for kind in (b"R", b"Y", b"O", b"I", b"U", b"D", b"T"))
    [found] = taken(BEGIN, *strange, *rows, message(b"mine"), COMMIT)
    assert found.contents == (b"mine",)


def test_a_message_outside_a_transaction_is_ignored() -> None:
    assert taken(message(b"x", flags=0), BEGIN, COMMIT)[0].contents == ()


def test_an_incomplete_transaction_is_known_as_such() -> None:
    transactions, known = TransactionAssembler("txmq"), []
    for piece in WHOLE:
        known.append(transactions.incomplete)
        transactions.feed(piece)
    assert [*known, transactions.incomplete] == [False, True, True, False]


@pytest.mark.parametrize(
    ("before", "piece", "size"),
    [(before, piece, size) for before, piece in enumerate(WHOLE) for size in range(len(piece))],
)
def test_a_piece_cut_anywhere_is_refused(before: int, piece: bytes, size: int) -> None:
    transactions = TransactionAssembler("txmq")
    for whole in WHOLE[:before]:
        transactions.feed(whole)
    with pytest.raises(RemoteProtocolError):
        transactions.feed(piece[:size])


@pytest.mark.parametrize("piece", [*(whole + b"\0" for whole in WHOLE), b"S\0\0\0\1\1", b"\xff"])
def test_a_piece_that_is_too_long_or_unknown_is_refused(piece: bytes) -> None:
    transactions = TransactionAssembler("txmq")
    if piece[:1] != b"B":
        transactions.feed(BEGIN)
    with pytest.raises(RemoteProtocolError):
        transactions.feed(piece)


@pytest.mark.parametrize(
    "pieces",
    [(BEGIN, BEGIN), (COMMIT,), (MESSAGE,), (BEGIN, b"C\0" + b"\0" * 24)],
    ids=["two begins", "a commit alone", "a message alone", "another's commit"],
)
def test_pieces_out_of_turn_are_refused(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        taken(*pieces)
