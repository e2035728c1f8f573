"""Golden files of the formats.

These files never change; a new version of a format gets new files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from txmq.batch import BatchView, encode, verify
from txmq.errors import UnknownTopic
from txmq.model import limits
from txmq.model.bundle import BundleReceipt, BundleState, DecideReceipt
from txmq.model.decider import (
    BrokerBranch,
    ByForeign,
    ByHome,
    ByPostgres,
    PostgresBranch,
)
from txmq.model.message import COMMIT, Message
from txmq.wire import data_requests as h
from txmq.wire.bundle import (
    BundleDescription,
    BundlePart,
    PartBatch,
    bundle_digest,
    pack_bundle_receipt,
    pack_part,
    unpack_bundle_receipt,
    unpack_part,
)
from txmq.wire.chunks import ACCEPTED, REDELIVERY, Chunk, Chunks, pack_chunks, unpack_chunks
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame, FrameDecoder, encode_frame
from txmq.wire.hello import Hello
from txmq.wire.status import error_reply, to_error

GOLDEN = Path(__file__).parents[1] / "golden"
TOKEN = bytes.fromhex("01890a5dac96774bbcceb302099a8057")
BORN = 1_795_255_200_000_000

MESSAGES = [
    Message(
        b"first", "order-1", "created", {"trace": "a-1", "tenant": "Zürich"}, BORN + 5, BORN + 10
    ),
    Message(b""),
    Message(b"third, same key", "order-1", "paid", None, None, BORN + 20),
]
REPEATING = [Message(b"the same again and again " * 20, f"order-{n}") for n in range(3)]


def batch_of(messages: list[Message]) -> bytes:
    return encode(
        messages,
        producer_id=TOKEN,
        epoch=7,
        sequence=40,
        born_at=[BORN + n for n in range(len(messages))],
    )


PLAIN = batch_of([Message(b"one"), Message(b"two")])
SEND = h.Send("orders", 3, 2, PLAIN)
DECIDER = ByPostgres(7_000_000_000_000_000_001, 2, 16_384, 742, 0x1_0152_2150)
PART = BundlePart(
    *(TOKEN, 0, 7, False, False, bytes(32)),
    BundleDescription(DECIDER, "orders", (("ack", "billing", "orders", 3, 0, 5),), 6_000_000),
    (PartBatch("orders", 3, 2, PLAIN), PartBatch("audit", 0, 1, PLAIN)),
)
BRANCHES = (
    PostgresBranch(
        *(7_000_000_000_000_000_001, 16_384, "shop", "orders", "1954049393_b25l_MQ==", None),
        *(2, 0x1_0152_2150),
    ),
    PostgresBranch(
        *(7_000_000_000_000_000_002, 5, "stock", "stock", "1954049393_b25l_Mg==", 742),
        *(1, 1),
    ),
    BrokerBranch(bytes(range(16))),
)
HOME = BundlePart(
    TOKEN,
    0,
    7,
    True,
    False,
    b"h" * 32,
    BundleDescription(ByHome(b"l" * 16, TOKEN), "orders", (), 0, BRANCHES),
    (),
)
ONE_PHASE = HOME._replace(
    commit=True, description=BundleDescription(ByForeign(4_660, b"gtrid", b"bqual"), "orders")
)
INSTANCE = Hello(
    versions=(1, 1),
    client="txmq-python/0.1.0",
    service="orders",
    instance="orders-1",
    incarnation=3,
)
LAST = BundlePart(
    TOKEN, 1, 7, True, False, bundle_digest([PART]), None, (PartBatch("audit", 1, 1, PLAIN),)
)
CHUNK = Chunk("orders", 3, 100, BORN, 4_096, 2, REDELIVERY | ACCEPTED, 9, 1, 1, PLAIN)
REFUSED = error_reply(UnknownTopic("there is no topic x", hint="create it", detail={"topic": "x"}))

CHOOSY = h.Fetch(
    5, 20_000, 1 << 20, 500, "billing@b-1", "b-1", 1 << 17, 1_000, ("orders", "refunds")
)

CONVERSATION = [
    (
        Opcode.HELLO,
        0,
        Hello(versions=(1, 1), client="txmq-python/0.1.0", service="orders").encode(),
    ),
    (Opcode.PING, 0, b""),
    (Opcode.SEND, 0, h.send_header("orders", 3, 2) + PLAIN),
    (Opcode.SEND, 0, h.pack_send_receipt(h.SendReceipt(-1, BORN, duplicate=True))),
    (Opcode.SEND, *REFUSED),
    (Opcode.GROUP, 0, b"".join(pack_part(PART))),
    (Opcode.GROUP, 0, b"".join(pack_part(LAST))),
    (Opcode.GROUP, 0, pack_bundle_receipt(BundleReceipt(BundleState.UNDECIDED, 4_096))),
    (Opcode.DECIDE, 0, h.pack_decide(h.Decide(COMMIT, TOKEN, 7, "orders"))),
    (Opcode.DECIDE, 0, h.pack_decide_receipt(DecideReceipt(BundleState.PUBLISHED, repeated=True))),
    (Opcode.FETCH, 0, h.pack_fetch(CHOOSY)),
    (Opcode.FETCH, 0, b"".join(pack_chunks([CHUNK, CHUNK], generation=5))),
    (
        Opcode.ACK,
        0,
        h.pack_ack(
            h.Ack(
                5,
                "billing",
                "b-1",
                (h.AckedRange("orders", 3, 100, 102), h.AckedRange("audit", 0, 7, 8)),
                (h.AckedRange("orders", 3, 102, 103),),
            )
        ),
    ),
    (Opcode.READ, 0, h.pack_read(h.Read(3, 100, 1_000, 1 << 20, "orders", 7))),
    (Opcode.HELLO, 0, INSTANCE.encode()),
    (Opcode.GROUP, 0, b"".join(pack_part(HOME))),
    (Opcode.GROUP, 0, b"".join(pack_part(ONE_PHASE))),
]


def written(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "messages"),
    [("batch-v1.bin", MESSAGES), ("batch-v1-plain.bin", [Message(b"one"), Message(b"two")])],
)
def test_batches_are_written_as_ever(name: str, messages: list[Message]) -> None:
    assert batch_of(messages) == written(name)


def test_a_batch_of_version_1_is_read() -> None:
    view = BatchView(written("batch-v1.bin"), verify(written("batch-v1.bin")))
    assert view.bodies == [m.body for m in MESSAGES]
    assert view.keys == ["order-1", None, "order-1"]
    assert view.tags == ["created", None, "paid"]
    assert view.headers == [{"trace": "a-1", "tenant": "Zürich"}, {}, {}]
    assert view.born_at == [BORN, BORN + 1, BORN + 2]
    assert view.deliver_at == [BORN + 5, 0, 0]
    assert view.expire_at == [BORN + 10, 0, BORN + 20]
    assert view.message_ids[2] == "01890a5dac96774bbcceb302099a8057-42"


@pytest.mark.parametrize("name", ["batch-v1-zstd.bin", "batch-v1-lz4.bin"])
def test_compressed_batches_of_version_1_are_read(name: str) -> None:
    batch = written(name)
    view = BatchView(batch, verify(batch))
    assert len(batch) < 1_000
    assert view.bodies == [m.body for m in REPEATING]
    assert view.keys == ["order-0", "order-1", "order-2"]


def test_frames_are_written_as_ever() -> None:
    stream = [
        encode_frame(opcode, number, payload, status=status)
        for number, (opcode, status, payload) in enumerate(CONVERSATION)
    ]
    assert b"".join(stream) == written("frame-v1.bin")


def test_frames_of_version_1_are_read() -> None:
    frames = FrameDecoder(limits.FRAME).feed(written("frame-v1.bin"))
    expected = [
        Frame(opcode, status, n, payload)
        for n, (opcode, status, payload) in enumerate(CONVERSATION)
    ]
    assert frames == expected
    payloads = [frame.payload for frame in frames]
    assert Hello.parse(frames[0]).service == "orders"
    assert h.unpack_send(payloads[2]) == SEND
    assert h.unpack_send_receipt(payloads[3]) == h.SendReceipt(-1, BORN, duplicate=True)
    assert type(to_error(frames[4].status, payloads[4])) is UnknownTopic
    assert [unpack_part(payloads[5]), unpack_part(payloads[6])] == [PART, LAST]
    assert unpack_bundle_receipt(payloads[7]) == BundleReceipt(BundleState.UNDECIDED, 4_096)
    assert h.unpack_decide(payloads[8]) == h.Decide(COMMIT, TOKEN, 7, "orders")
    assert h.unpack_decide_receipt(payloads[9]) == DecideReceipt(
        BundleState.PUBLISHED, repeated=True
    )
    assert h.unpack_fetch(payloads[10]) == CHOOSY
    assert unpack_chunks(payloads[11]) == Chunks(5, -1, (CHUNK, CHUNK))
    assert h.unpack_ack(payloads[12])[3:] == (
        (h.AckedRange("orders", 3, 100, 102), h.AckedRange("audit", 0, 7, 8)),
        (h.AckedRange("orders", 3, 102, 103),),
    )
    assert Hello.parse(frames[14]) == INSTANCE
    assert [unpack_part(payloads[15]), unpack_part(payloads[16])] == [HOME, ONE_PHASE]
    assert h.unpack_read(payloads[13]) == h.Read(3, 100, 1_000, 1 << 20, "orders", 7)
