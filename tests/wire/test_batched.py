"""Batched requests: a frame is unpacked to what was packed, or refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.test_golden import BORN, HOME, PART, PLAIN, SEND, TOKEN
from txmq.errors import RemoteProtocolError, UnknownTransaction
from txmq.model import limits
from txmq.model.bundle import BundleReceipt, BundleState, DecideReceipt
from txmq.model.message import COMMIT, ROLLBACK
from txmq.wire import data_requests as h
from txmq.wire.batched import (
    MAX_REQUESTS,
    BatchedReply,
    pack_replies,
    pack_requests,
    unpack_replies,
    unpack_requests,
)
from txmq.wire.bundle import pack_bundle_receipt, pack_part, unpack_part
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame, FrameDecoder, encode_frame
from txmq.wire.status import error_reply, to_error

GOLDEN = Path(__file__).parents[1] / "golden"
PAYLOADS = st.lists(st.binary(max_size=60), min_size=1, max_size=20)
GROUPS = [b"".join(pack_part(part)) for part in (HOME, PART)]
DECISIONS = [h.pack_decide(h.Decide(outcome, TOKEN, 7, "orders")) for outcome in (COMMIT, ROLLBACK)]
NO = BatchedReply(*error_reply(UnknownTransaction("transaction x was never stored at this broker")))
CONVERSATION = [
    (Opcode.GROUPS, pack_requests(GROUPS)),
    (
        Opcode.GROUPS,
        pack_replies(
            [BatchedReply(0, pack_bundle_receipt(BundleReceipt(BundleState.UNDECIDED, 4_096))), NO]
        ),
    ),
    (Opcode.DECISIONS, pack_requests(DECISIONS)),
    (
        Opcode.DECISIONS,
        pack_replies(
            [
                NO,
                BatchedReply(
                    0, h.pack_decide_receipt(DecideReceipt(BundleState.PUBLISHED, repeated=True))
                ),
            ]
        ),
    ),
]
OTHER = h.Send("audit", 0, 0, PLAIN)
SENDING = [
    (
        Opcode.SENDS,
        pack_requests([h.send_header(*send[:3]) + send.batch for send in (SEND, OTHER)]),
    ),
    (
        Opcode.SENDS,
        pack_replies([BatchedReply(0, h.pack_send_receipt(h.SendReceipt(7, BORN))), NO]),
    ),
]


@pytest.mark.parametrize(
    ("name", "frames"), [("together-v1.bin", CONVERSATION), ("sends-v1.bin", SENDING)]
)
def test_they_are_written_as_ever(name: str, frames: list[tuple[Opcode, list[bytes]]]) -> None:
    written = [
        encode_frame(opcode, number, payload) for number, (opcode, payload) in enumerate(frames)
    ]
    assert b"".join(written) == (GOLDEN / name).read_bytes()


def test_sends_of_version_1_are_read_wherever_they_are_cut() -> None:
    data = (GOLDEN / "sends-v1.bin").read_bytes()
    for cut in range(len(data)):
        decoder = FrameDecoder(limits.FRAME)
        request, reply = [*decoder.feed(data[:cut]), *decoder.feed(data[cut:])]
    assert [h.unpack_send(payload) for payload in unpack_requests(request.payload)] == [SEND, OTHER]
    yes, no = unpack_replies(reply.payload, 2)
    assert h.unpack_send_receipt(yes.payload) == h.SendReceipt(7, BORN)
    assert type(to_error(*no)) is UnknownTransaction


def test_a_flipped_bit_spoils_a_frame_of_sends() -> None:
    data = (GOLDEN / "sends-v1.bin").read_bytes()
    end = 4 + int.from_bytes(data[:4], "little")
    for at in range(4, end):
        spoiled = bytearray(data[:end])
        spoiled[at] ^= 1 << at % 8
        with pytest.raises(RemoteProtocolError):
            FrameDecoder(limits.FRAME).feed(bytes(spoiled))


def test_as_many_answers_are_read_as_there_were_requests() -> None:
    reply = b"".join(pack_replies([NO, NO]))
    assert unpack_replies(reply, 2) == unpack_replies(reply) == [NO, NO]
    with pytest.raises(RemoteProtocolError, match="2 replies to 3"):
        unpack_replies(reply, 3)


def test_those_of_version_1_are_read() -> None:
    frames = FrameDecoder(limits.FRAME).feed((GOLDEN / "together-v1.bin").read_bytes())
    assert frames == [
        Frame(op, 0, number, b"".join(pieces)) for number, (op, pieces) in enumerate(CONVERSATION)
    ]
    groups, receipts, decisions, answers = [frame.payload for frame in frames]
    assert [unpack_part(payload) for payload in unpack_requests(groups)] == [HOME, PART]
    assert unpack_replies(receipts)[0].payload == pack_bundle_receipt(
        BundleReceipt(BundleState.UNDECIDED, 4_096)
    )
    assert [h.unpack_decide(payload).outcome for payload in unpack_requests(decisions)] == [
        COMMIT,
        ROLLBACK,
    ]
    no, yes = unpack_replies(answers)
    assert type(to_error(*no)) is UnknownTransaction
    assert h.unpack_decide_receipt(yes.payload) == DecideReceipt(
        BundleState.PUBLISHED, repeated=True
    )


@given(PAYLOADS)
def test_requests_come_out_as_they_went_in(payloads: list[bytes]) -> None:
    assert unpack_requests(b"".join(pack_requests(payloads))) == payloads


@given(
    st.lists(
        st.builds(BatchedReply, st.integers(0, 65_535), st.binary(max_size=60)),
        min_size=1,
        max_size=20,
    )
)
def test_answers_come_out_as_they_went_in(answers: list[BatchedReply]) -> None:
    assert unpack_replies(b"".join(pack_replies(answers))) == answers


@given(PAYLOADS, st.data())
def test_what_is_cut_off_or_goes_on_is_refused(payloads: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pack_requests(payloads))
    cut = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:cut], whole + b"\0"):
        with pytest.raises(RemoteProtocolError):
            unpack_requests(broken)


@pytest.mark.parametrize("count", [0, MAX_REQUESTS + 1, 1 << 31])
def test_there_are_neither_none_nor_too_many(count: int) -> None:
    for unpack in (unpack_requests, unpack_replies):
        with pytest.raises(RemoteProtocolError, match="in one frame"):
            unpack(struct.pack("<I", count) + bytes(8))


@given(st.binary(max_size=80))
def test_any_bytes_are_refused_or_read(payload: bytes) -> None:
    for unpack in (unpack_requests, unpack_replies):
        try:
            assert unpack(payload)
        except RemoteProtocolError:
            continue
