"""Payload of a logical message: a message that travels in PostgreSQL's log.

docs/FORMATS.md 7:

    u8 version = 1 | u8 0 | u16 key length | i32 partition, -1 = none given
    i64 born_at | u32 headers length | str topic | str tag | key | headers | body

Any database user can write such payloads. Unpacking therefore checks everything, and
raises RemoteProtocolError.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from txmq.batch.cells import body_cell, header_cell, headers_of, text_cell
from txmq.errors import LocalProtocolError, MessageTooLarge, RemoteProtocolError
from txmq.model import limits
from txmq.model.message import Message, check_name
from txmq.wire.payload_reader import PayloadReader

PREFIX = "txmq"  # of txmq's logical messages
VERSION = 1
HEADER = struct.Struct("<BBHiqI")
NOT_ASKED, PARTITIONS = -1, 1 << 31


class EmittedMessage(NamedTuple):
    """A message of a database transaction; `born_at` is by the emitter's clock."""

    topic: str
    message: Message
    partition: int | None
    born_at: int


def pack_emitted(emitted: EmittedMessage) -> bytes:
    """Return the payload.

    Raises LocalProtocolError or MessageTooLarge for a message that no broker accepts.
    """
    topic, (body, key, tag, headers, *times), partition, born_at = emitted
    if any(time is not None for time in times):
        raise LocalProtocolError(
            "an emitted message cannot have times of delivery or expiry",
            hint="leave out deliver_at, delay, expire_at and ttl",
        )
    name = check_name(topic, "topic").encode()
    key_cell = text_cell(key or "", "key", limits.KEY)
    tag_cell = text_cell(tag or "", "tag", limits.TAG)
    map_cell = header_cell(headers)
    if partition is not None and (type(partition) is not int or not 0 <= partition < PARTITIONS):
        raise LocalProtocolError(
            f"invalid partition {partition!r}", hint="use an int from 0, or None"
        )
    partition_field = NOT_ASKED if partition is None else partition
    fixed = HEADER.pack(VERSION, 0, len(key_cell), partition_field, born_at, len(map_cell))
    strings = bytes([len(name)]) + name + bytes([len(tag_cell)]) + tag_cell
    return b"".join((fixed, strings, key_cell, map_cell, body_cell(body)))


def unpack_emitted(payload: bytes) -> EmittedMessage:
    """Return the message in a payload. Raises RemoteProtocolError."""
    reader = PayloadReader(payload)
    version, reserved, key_size, partition_field, born_at, headers_size = reader.fields(HEADER)
    if version != VERSION or reserved:
        raise RemoteProtocolError(
            f"a logical message has version {version}; this txmq supports {VERSION}"
        )
    topic = reader.name()
    tag = _text(reader.read(reader.read(1)[0]))
    key = _text(reader.read(key_size))
    message = Message(b"", key or None, tag or None, headers_of(reader.read(headers_size)) or None)
    message = message._replace(body=reader.rest())
    if partition_field < NOT_ASKED or not 0 <= born_at <= limits.TIME:
        raise RemoteProtocolError(
            f"a logical message has an invalid partition {partition_field} or time {born_at}"
        )
    _check_sizes(message)
    return EmittedMessage(
        topic, message, None if partition_field == NOT_ASKED else partition_field, born_at
    )


def _check_sizes(message: Message) -> None:
    try:
        body_cell(message.body)
        text_cell(message.key or "", "key", limits.KEY)
        text_cell(message.tag or "", "tag", limits.TAG)
        header_cell(message.headers)
    except (LocalProtocolError, MessageTooLarge) as error:
        raise RemoteProtocolError(
            f"a logical message that no broker accepts: {error.message}"
        ) from error


def _text(cell: bytes) -> str:
    try:
        return cell.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("the key or tag of a logical message is not UTF-8") from error
