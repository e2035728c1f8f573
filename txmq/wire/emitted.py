"""The payload of a logical message, by which a message travels through PostgreSQL's log
(docs/FORMATS.md 7).

    u8 version = 1 | u8 0 | u16 key length | i32 partition, -1 = not asked for | i64 born_at | u32 headers length
    | str topic | str tag | key | headers | body

Whoever may run a statement can write such payloads: unpacking believes nothing and
raises RemoteProtocolError.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from txmq.batch.cells import body_cell, header_cell, headers_of, text_cell
from txmq.errors import LocalProtocolError, MessageTooLarge, RemoteProtocolError
from txmq.model import limits
from txmq.model.message import Message, check_name
from txmq.wire.reader import Reader

PREFIX = "txmq"  # of the logical messages that are meant
VERSION = 1
HEADER = struct.Struct("<BBHiqI")
NOT_ASKED, PARTITIONS = -1, 1 << 31


class Emitted(NamedTuple):
    """A message as it was put into a database's transaction; `born_at` is by the clock
    of whoever did.
    """

    topic: str
    message: Message
    partition: int | None
    born_at: int


def pack_emitted(emitted: Emitted) -> bytes:
    """The payload. Raises LocalProtocolError or MessageTooLarge for what no broker
    would take.
    """
    topic, (body, key, tag, headers, *times), partition, born_at = emitted
    if any(time is not None for time in times):
        raise LocalProtocolError("an emitted message has no times of delivery and expiry")
    name = check_name(topic, "topic").encode()
    key_cell = text_cell(key or "", "key", limits.KEY)
    tag_cell = text_cell(tag or "", "tag", limits.TAG)
    map_cell = header_cell(headers)
    if partition is not None and (type(partition) is not int or not 0 <= partition < PARTITIONS):
        raise LocalProtocolError(f"{partition!r} is no partition", hint="a number from 0 is needed")
    asked = NOT_ASKED if partition is None else partition
    fixed = HEADER.pack(VERSION, 0, len(key_cell), asked, born_at, len(map_cell))
    strings = bytes([len(name)]) + name + bytes([len(tag_cell)]) + tag_cell
    return b"".join((fixed, strings, key_cell, map_cell, body_cell(body)))


def unpack_emitted(payload: bytes) -> Emitted:
    """What is in a payload. Raises RemoteProtocolError."""
    reader = Reader(payload)
    version, reserved, key_size, asked, born_at, headers_size = reader.fields(HEADER)
    if version != VERSION or reserved:
        raise RemoteProtocolError(
            f"a logical message of version {version}, this txmq knows {VERSION}"
        )
    topic = reader.name()
    tag = _text(reader.take(reader.take(1)[0]))
    key = _text(reader.take(key_size))
    message = Message(b"", key or None, tag or None, headers_of(reader.take(headers_size)) or None)
    message = message._replace(body=reader.rest())
    if asked < NOT_ASKED or not 0 <= born_at <= limits.TIME:
        raise RemoteProtocolError("a logical message with an impossible partition or time")
    _check_sizes(message)
    return Emitted(topic, message, None if asked == NOT_ASKED else asked, born_at)


def _check_sizes(message: Message) -> None:
    try:
        body_cell(message.body)
        text_cell(message.key or "", "key", limits.KEY)
        text_cell(message.tag or "", "tag", limits.TAG)
        header_cell(message.headers)
    except (LocalProtocolError, MessageTooLarge) as error:
        raise RemoteProtocolError(
            f"a logical message that no broker takes: {error.message}"
        ) from error


def _text(cell: bytes) -> str:
    try:
        return cell.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("a logical message whose key or tag is not UTF-8") from error
