"""Payloads of data requests and receipts: round trips, and every kind of damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies as our
from txmq.errors import RemoteProtocolError
from txmq.model.bundle import BundleReceipt, BundleState, DecideReceipt
from txmq.model.message import COMMIT, ROLLBACK
from txmq.wire import data_requests as h
from txmq.wire.bundle import pack_bundle_receipt, unpack_bundle_receipt

TOKEN = bytes(range(16))


def pack_send(send: h.Send) -> bytes:
    return h.send_header(send.topic, send.partition, send.topic_epoch) + send.batch


FORMATS: dict[
    str, tuple[Callable[[Any], bytes], Callable[[bytes], object], st.SearchStrategy[Any], object]
] = {
    "send": (pack_send, h.unpack_send, our.sends, h.Send("orders", 3, 1, b"")),
    "send receipt": (
        h.pack_send_receipt,
        h.unpack_send_receipt,
        our.send_receipts,
        h.SendReceipt(5, 7, duplicate=True),
    ),
    "group receipt": (
        pack_bundle_receipt,
        unpack_bundle_receipt,
        st.builds(BundleReceipt, st.sampled_from(BundleState), our.offsets, offsets=st.just(())),
        BundleReceipt(BundleState.UNDECIDED, 4_096),
    ),
    "decide": (h.pack_decide, h.unpack_decide, our.decides, h.Decide(COMMIT, TOKEN, 1, "orders")),
    "decide receipt": (
        h.pack_decide_receipt,
        h.unpack_decide_receipt,
        our.decide_receipts,
        DecideReceipt(BundleState.PUBLISHED, False),
    ),
    "fetch": (
        h.pack_fetch,
        h.unpack_fetch,
        our.fetches,
        h.Fetch(1, 20_000, 1 << 20, 500, "billing", "billing-1"),
    ),
    "ack": (
        h.pack_ack,
        h.unpack_ack,
        our.acks,
        h.Ack(
            1,
            "g",
            "m",
            (h.AckedRange("a", 0, 0, 5), h.AckedRange("b", 1, 7, 8), h.AckedRange("a", 2, 3, 4)),
            (h.AckedRange("b", 1, 8, 9), h.AckedRange("c", 1, 7, 8)),
        ),
    ),
    "read": (h.pack_read, h.unpack_read, our.reads, h.Read(3, 17, 1_000, 1 << 20, "orders")),
    "read letters": (
        h.pack_read_letters,
        h.unpack_read_letters,
        our.letter_reads,
        h.ReadLetters(3, 17, 99, 1 << 20, "plan", "orders"),
    ),
}
each = pytest.mark.parametrize("name", FORMATS)
BATCHLESS = [name for name in FORMATS if name != "send"]


@each
@given(data=st.data())
def test_values_are_read_back(name: str, data: st.DataObject) -> None:
    pack, unpack, values, _ = FORMATS[name]
    value = data.draw(values)
    assert unpack(pack(value)) == value


@each
def test_every_truncation_is_refused(name: str) -> None:
    pack, unpack, _, value = FORMATS[name]
    payload = pack(value)
    for end in range(len(payload)):
        with pytest.raises(RemoteProtocolError):
            unpack(payload[:end])


@pytest.mark.parametrize("name", BATCHLESS)
def test_every_addition_is_refused(name: str) -> None:
    pack, unpack, _, value = FORMATS[name]
    for more in (b"\0", b"\xff", bytes(64)):
        with pytest.raises(RemoteProtocolError):
            unpack(pack(value) + more)


@each
def test_every_flipped_bit_is_refused_or_another_value(name: str) -> None:
    pack, unpack, _, value = FORMATS[name]
    payload = pack(value)
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert unpack(bytes(damaged)) != value
        except RemoteProtocolError:
            continue


@each
@given(noise=st.binary(max_size=100))
def test_noise_is_a_value_or_refused(name: str, noise: bytes) -> None:
    unpack = FORMATS[name][1]
    try:
        unpack(noise)
    except RemoteProtocolError:
        return


def test_requests_have_the_bytes_of_the_format() -> None:
    send = struct.pack("<HHI", 0, 2, 3) + b"\x06ordersBATCH"
    assert pack_send(h.Send("orders", 3, 2, b"BATCH")) == send
    fetch = struct.pack("<IIII", 1, 2, 3, 4) + b"\x01g\x01m"
    assert h.pack_fetch(h.Fetch(1, 2, 3, 4, "g", "m")) == fetch + bytes(14)
    chosen = fetch + struct.pack("<QIH", 5, 6, 2) + b"\x01a\x01b"
    assert h.pack_fetch(h.Fetch(1, 2, 3, 4, "g", "m", 5, 6, ("a", "b"))) == chosen
    ack = struct.pack("<I", 9) + b"\x01g\x01m" + struct.pack("<I", 2)
    ack += (
        struct.pack("<HHIqq", 0, 0, 4, 5, 6)
        + struct.pack("<HHIqq", 1, 0, 7, 8, 9)
        + b"\x02\x00\x01a\x01b"
    )
    assert (
        h.pack_ack(h.Ack(9, "g", "m", (h.AckedRange("a", 4, 5, 6), h.AckedRange("b", 7, 8, 9))))
        == ack
    )
    decide = b"\x02" + TOKEN + struct.pack("<I", 5) + b"\x03ops"
    assert h.pack_decide(h.Decide(ROLLBACK, TOKEN, 5, "ops")) == decide


def test_the_reply_lists_refused_acks() -> None:
    refused = (h.AckedRange("a", 4, 5, 6), h.AckedRange("b", 7, 8, 9), h.AckedRange("a", 4, 9, 10))
    assert h.unpack_refused(h.pack_refused(refused)) == refused
    assert h.unpack_refused(b"") == ()
    with pytest.raises(RemoteProtocolError):
        h.unpack_refused(h.pack_refused(refused) + b"x")


def test_acks_of_one_topic_name_it_once() -> None:
    ranges = tuple(h.AckedRange("orders", partition, 0, 1) for partition in range(100))
    payload = h.pack_ack(h.Ack(1, "g", "m", ranges))
    assert payload.count(b"orders") == 1
    assert h.unpack_ack(payload).ranges == ranges


@pytest.mark.parametrize(
    "topic",
    [
        b"",
        b".",
        b"..",
        b"../x",
        b"/etc",
        b"a b",
        b"a\n",
        b"a\0",
        b"\xff",
        b"a" * 128,
        b"g@m",
        "ü".encode(),
    ],
)
def test_a_topic_must_be_a_name(topic: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="name"):
        h.unpack_send(struct.pack("<HHIB", 0, 0, 0, len(topic)) + topic + b"batch")
    with pytest.raises(RemoteProtocolError, match="name"):
        h.unpack_read(struct.pack("<IqII", 0, 0, 0, 0) + bytes([len(topic)]) + topic)


@pytest.mark.parametrize(
    "group", [b"", b"@", b"g@", b"@m", b"g@m@n", b"g@.m", b".g@m", b"a/b", b"g@\n"]
)
def test_a_group_must_be_a_name_or_that_of_a_member(group: bytes) -> None:
    payload = struct.pack("<IIII", 0, 0, 0, 0) + bytes([len(group)]) + group + b"\x01m"
    with pytest.raises(RemoteProtocolError, match="group"):
        h.unpack_fetch(payload)


def acked(*, index: int = 0, flags: int = 0, start: int = 0, end: int = 1) -> bytes:
    head = struct.pack("<I", 1) + b"\x01g\x01m" + struct.pack("<I", 1)
    return head + struct.pack("<HHIqq", index, flags, 0, start, end) + b"\x01\x00\x01t"


def test_the_acks_of_these_tests_are_otherwise_valid() -> None:
    assert h.unpack_ack(acked())[3:] == ((h.AckedRange("t", 0, 0, 1),), ())
    assert h.unpack_ack(acked(flags=h.FILTERED))[3:] == ((), (h.AckedRange("t", 0, 0, 1),))


def test_no_ack_is_refused_as_filtered() -> None:
    with pytest.raises(RemoteProtocolError):
        h.unpack_refused(acked(flags=h.FILTERED)[8:])


@pytest.mark.parametrize(
    "payload",
    [
        acked(index=1),
        acked(index=0xFFFF),
        acked(flags=2),
        acked(start=5, end=5),
        acked(start=5, end=4),
        acked(start=-1, end=4),
        acked(start=-(1 << 63), end=(1 << 63) - 1),
        acked(end=-1),
        struct.pack("<I", 1) + b"\x01g\x01m" + struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 1) + b"\x01g\x01m" + struct.pack("<IH", 0, 0xFFFF),
    ],
)
def test_impossible_acks_are_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        h.unpack_ack(payload)


@pytest.mark.parametrize("flags", [1, 2, 0x8000])
def test_unknown_flags_of_a_send_are_refused(flags: int) -> None:
    with pytest.raises(RemoteProtocolError, match="flags"):
        h.unpack_send(struct.pack("<HHIB", flags, 0, 0, 1) + b"tbatch")


@pytest.mark.parametrize("outcome", [0, 3, 255])
def test_a_decision_is_commit_or_rollback(outcome: int) -> None:
    with pytest.raises(RemoteProtocolError, match="invalid decision"):
        h.unpack_decide(bytes([outcome]) + TOKEN + bytes(4) + b"\x02me")


@pytest.mark.parametrize(
    "by", [b"a\nfake log line", b"\x1b[31m", b"\xff", "a\u202eb".encode(), b"a\0"]
)
def test_the_name_of_a_decider_must_be_printable(by: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="text"):
        h.unpack_decide(b"\x01" + TOKEN + bytes(4) + bytes([len(by)]) + by)


@pytest.mark.parametrize("offset", [-1, -(1 << 63)])
def test_offsets_to_read_from_are_not_negative(offset: int) -> None:
    with pytest.raises(RemoteProtocolError, match="offset"):
        h.unpack_read(struct.pack("<IqII", 0, offset, 0, 0) + b"\x01t" + bytes(8))


@pytest.mark.parametrize(("offset", "stored_at", "duplicate"), [(-2, 0, 0), (0, -1, 0), (0, 0, 2)])
def test_impossible_receipts_are_refused(offset: int, stored_at: int, duplicate: int) -> None:
    with pytest.raises(RemoteProtocolError, match="receipt"):
        h.unpack_send_receipt(struct.pack("<qqB", offset, stored_at, duplicate))
    with pytest.raises(RemoteProtocolError, match="invalid flag"):
        h.unpack_decide_receipt(b"\x01\x02")


def test_opcodes_have_the_numbers_of_the_format() -> None:
    assert {code.name: code.value for code in h.Opcode} == {
        "HELLO": 1, "PING": 2, "CALL": 3, "LOGIN": 4,
        "SEND": 16, "GROUP": 17, "DECIDE": 18, "FETCH": 19, "ACK": 20, "READ": 21,
        "GROUPS": 22, "DECISIONS": 23, "SENDS": 24, "LETTERS": 25,
    }  # fmt: skip
