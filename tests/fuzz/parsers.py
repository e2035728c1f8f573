"""Readers of bytes that strangers send, each with what has to hold for any bytes.

A reader refuses by a TxmqError. What it accepts comes back when it is written and read
again. Checksums are made right first: else a fuzzer would not get past them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import google_crc32c
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from tests.broker.requests.frame_fuzzer import corpus
from txmq.admin.http import AdminFactory
from txmq.admin.http_values import HttpReply, Query, Respond
from txmq.batch import BatchView, Codec, encode, single_row, verify
from txmq.batch.cut import cut_rows
from txmq.batch.split import delivery_times, split
from txmq.client.protocol.address import parse_url
from txmq.errors import RemoteProtocolError, TxmqError
from txmq.model.letter_filter import format_filter, parse_filter
from txmq.model.message import Message
from txmq.model.units import SECOND
from txmq.selector import parse as parse_selector
from txmq.store.log.record import HEADER_SIZE, RecordFault, decode, encode_start, needed_size
from txmq.tx.xid import Xid
from txmq.wire import bundle, data_requests, scram
from txmq.wire.batched import pack_requests, unpack_requests
from txmq.wire.calls.registry import decode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import FrameDecoder, encode_frame
from txmq.wire.hello import Hello, LoginStep
from txmq.wire.json import parse_as
from txmq.wire.logical_message import EmittedMessage, pack_emitted, unpack_emitted

REQUEST_S = 20.0
NOW = 1_800_000_000 * SECOND
AT = 4_160  # position of a record
HEADERS = {"region": "eu", "price": "12.5", "x-vip": ""}
RICH = Message(b"x" * 40, "key", "tag", {"h": "v"}, deliver_at=NOW, expire_at=NOW)


class Parser(NamedTuple):
    """A reader, and bytes that it accepts.

    `read` raises TxmqError for bytes that it refuses; any other exception is a bug.
    """

    read: Callable[[bytes], object]
    accepted: Callable[[], Sequence[bytes]]


def read_frames(data: bytes) -> None:
    """Decode a stream in one piece and in two: the same frames, or refusals."""
    cut = data[0] % len(data) if data else 0
    assert _frames([data]) == _frames([data[:cut], data[cut:]])


def _frames(pieces: Sequence[bytes]) -> tuple[list[object], bool]:
    decoder, found = FrameDecoder(1 << 16), list[object]()
    try:
        for piece in pieces:
            found += decoder.feed(piece)
    except RemoteProtocolError:
        return [], True
    return found, False


def read_request(data: bytes) -> None:
    """Read the payload of a data request; its opcode is the first byte."""
    opcode, payload = data[:1], data[1:]
    pack, unpack = REQUESTS[list(REQUESTS)[opcode[0] % len(REQUESTS)] if opcode else Opcode.READ]
    request = unpack(payload)
    if pack is not None:
        assert unpack(_joined(pack(request))) == request


def _joined(packed: bytes | list[bytes]) -> bytes:
    return packed if isinstance(packed, bytes) else b"".join(packed)


# A send is the header of its batch, and the batch, which has a parser of its own.
REQUESTS: dict[Opcode, tuple[Callable[[Any], Any] | None, Callable[[bytes], Any]]] = {
    Opcode.SEND: (None, data_requests.unpack_send),
    Opcode.SENDS: (pack_requests, unpack_requests),
    Opcode.GROUP: (bundle.pack_part, bundle.unpack_part),
    Opcode.GROUPS: (pack_requests, unpack_requests),
    Opcode.DECIDE: (data_requests.pack_decide, data_requests.unpack_decide),
    Opcode.FETCH: (data_requests.pack_fetch, data_requests.unpack_fetch),
    Opcode.ACK: (data_requests.pack_ack, data_requests.unpack_ack),
    Opcode.READ: (data_requests.pack_read, data_requests.unpack_read),
    Opcode.LETTERS: (data_requests.pack_read_letters, data_requests.unpack_read_letters),
    Opcode.CALL: (None, decode_call),
    Opcode.HELLO: (None, lambda payload: parse_as(Hello, payload)),
    Opcode.LOGIN: (None, lambda payload: parse_as(LoginStep, payload)),
}


def _requests() -> list[bytes]:
    order = list(REQUESTS)
    return [
        bytes([order.index(Opcode(opcode))]) + payload
        for opcode, payload in corpus(NOW // 1_000)
        if opcode in REQUESTS
    ]


def read_batch(data: bytes) -> None:
    """Verify a batch, decode all of it, and take it apart."""
    sealed = data[:4] + struct.pack("<I", google_crc32c.value(data[8:])) + data[8:]
    header = verify(sealed)
    view = BatchView(sealed, header)
    rows = list(zip(view.bodies, view.keys, view.tags, view.headers, strict=True))
    delivery_times(sealed, header)
    split(sealed, header)
    last = BatchView(single_row(sealed, header.count - 1, view))
    assert [(last.bodies[0], last.keys[0], last.tags[0], last.headers[0])] == rows[-1:]
    half = BatchView(cut_rows(sealed, 0, (header.count + 1) // 2, view))
    assert half.bodies == view.bodies[: len(half)]


def _batches() -> list[bytes]:
    origin: dict[str, Any] = {"producer_id": bytes(16), "epoch": 0, "sequence": 7, "born_at": 1}
    some = [[RICH], [Message(b"")], [RICH, Message(b"", "k2"), Message(b"y" * 300)]]
    return [encode(rows, codec=codec, **origin) for rows in some for codec in Codec]


def read_record(data: bytes) -> None:
    """Decode a record of the log whose checksum fits."""
    if len(data) < HEADER_SIZE:
        assert isinstance(decode(data, 0, AT), RecordFault)
        return
    length = int.from_bytes(data[12:16], "little")
    checksum = google_crc32c.value(data[8 : HEADER_SIZE + length])
    sealed = data[:4] + struct.pack("<I", checksum) + data[8:]
    record = decode(sealed, 0, AT)
    assert isinstance(record, RecordFault) or needed_size(sealed, 0) <= len(sealed)


def _records() -> list[bytes]:
    start = encode_start(7, AT, 3, AT - 96, NOW, b"head", b"attachment")
    return [start + b"attachment" + bytes(6), encode_start(0, AT, 0, 0, 0, b"", b"")]


def read_selector(data: bytes) -> None:
    """Compile a selector, and ask it."""
    selector = parse_selector(_text(data))
    for headers in (HEADERS, {}):
        assert isinstance(selector.matches(headers, key="k", tag=None, topic="t"), bool)


def read_filter(data: bytes) -> None:
    """Read a filter of dead letters, and the text that the console makes of it."""
    group, select = parse_filter(_text(data), NOW)
    written = format_filter(select, group)
    again = parse_filter(written, NOW)
    assert again.group == group
    assert format_filter(again.select, group) == written


def read_xid(data: bytes) -> None:
    """Read a gid of PostgreSQL."""
    if (xid := Xid.parse(_text(data))) is not None:
        assert Xid.parse(xid.gid) == xid


def read_url(data: bytes) -> None:
    """Read the URL of a broker."""
    parse_url(_text(data))


def read_login(data: bytes) -> None:
    """Read the first message of SCRAM."""
    scram.parse_client_first(_text(data))


def read_emitted(data: bytes) -> None:
    """Read a message that a database user has written into PostgreSQL's log."""
    emitted = unpack_emitted(data)
    assert unpack_emitted(pack_emitted(emitted)) == emitted


def read_http(data: bytes) -> None:
    """Serve what may be a request of HTTP, in two pieces."""
    clock, transport = Clock(), StringTransport()
    factory: Any = AdminFactory(_echo, clock, request_s=REQUEST_S)
    channel = factory.buildProtocol(None)
    channel.makeConnection(transport)
    for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
        if not transport.disconnecting:
            channel.dataReceived(piece)
    for _ in range(3):  # a timer may begin another
        clock.advance(REQUEST_S)
    assert transport.disconnecting or transport.disconnected, "it holds its place for ever"
    assert transport.value()[:9] in (b"", b"HTTP/1.1 ", b"HTTP/1.0 ")


def _echo(path: str, _query: Query, respond: Respond, _rights: object) -> None:
    respond(HttpReply(200, path.encode(errors="replace")))


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def texts(*some: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in some]


PARSERS = {
    "frames": Parser(
        read_frames, lambda: [encode_frame(3, 1, b"payload") + encode_frame(4, 2, b"")]
    ),
    "requests": Parser(read_request, _requests),
    "batch": Parser(read_batch, _batches),
    "record": Parser(read_record, _records),
    "selector": Parser(
        read_selector,
        texts("region IN ('eu', 'us') AND (price BETWEEN 10 AND 20 OR \"x-vip\" IS NOT NULL)",
              "NOT region LIKE 'e\\_%' ESCAPE '\\' OR price <> -1.5"),
    ),
    "filter": Parser(
        read_filter,
        texts('group:billing error:ValueError age>1h key:"a b" state:open attempts>3 text:"x"',
              "attempts:2.. header:a=b=c replays<2 deadlock"),
    ),
    "xid": Parser(read_xid, texts("42_dHhtcTpnLTE=_YnIvMQ==", "0__")),
    "url": Parser(read_url, texts("txmqs://u:p%40@h1:7650,h2:7650", "txmq://[::1]:7650")),
    "login": Parser(read_login, texts("n,,n=us=2Cer,r=fyko+d2lbbFgONRv9qkxdawL")),
    "emitted": Parser(
        read_emitted,
        lambda: [pack_emitted(EmittedMessage("t", Message(b"b", "k", "g", {"h": "v"}), 3, 1))],
    ),
    "http": Parser(
        read_http,
        texts("GET /here?a=1 HTTP/1.1\r\nHost: localhost:7651\r\n\r\n",
              "POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
              "3\r\nabc\r\n0\r\n\r\n"),
    ),
}  # fmt: skip


def tried(parser: Parser, data: bytes) -> bool:
    """Return whether a reader accepts these bytes. Any exception from here is a bug."""
    try:
        parser.read(data)
    except TxmqError:
        return False
    return True
