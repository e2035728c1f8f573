"""Sequential reading of binary payloads. A misfit is an error of the peer."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

from txmq.errors import RemoteProtocolError
from txmq.model.message import is_name


@lru_cache(maxsize=4096)
def name_of(raw: bytes) -> str:
    """Return the name in these bytes. Cached, because few names recur often."""
    text = raw.decode("latin-1")
    if not is_name(text):
        raise RemoteProtocolError(f"invalid name {text!r}")
    return text


@lru_cache(maxsize=1024)
def text_of(raw: bytes) -> str:
    """Return the printable text in these bytes. Cached, because texts recur."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("a text is not UTF-8") from error
    if not text.isprintable():
        raise RemoteProtocolError(f"a text has unprintable characters: {text!r}")
    return text


@lru_cache(maxsize=4096)
def group_of(raw: bytes) -> str:
    """Return the name of a consumer group, or in broadcast mode `group@member`."""
    group, at, member = raw.decode("latin-1").partition("@")
    if not is_name(group) or (at and not is_name(member)):
        raise RemoteProtocolError(f"invalid name {raw!r} of a consumer group")
    return f"{group}{at}{member}"


def unfit(payload: bytes, size: int) -> RemoteProtocolError:
    """Return the error of a payload that does not have `size` bytes."""
    if len(payload) < size:
        return RemoteProtocolError(f"a payload of {len(payload)} bytes ends too early")
    return RemoteProtocolError(f"a payload has {len(payload) - size} bytes too many")


class PayloadReader:
    """A payload and a position in it. All methods raise RemoteProtocolError."""

    __slots__ = ("at", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.at = 0

    @property
    def remaining(self) -> int:
        """Number of bytes not read yet."""
        return len(self.payload) - self.at

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Read the fields of a struct."""
        try:
            fields = layout.unpack_from(self.payload, self.at)
        except struct.error as error:
            raise RemoteProtocolError(
                f"a payload of {len(self.payload)} bytes ends too early"
            ) from error
        self.at += layout.size
        return fields

    def read(self, size: int) -> bytes:
        """Read `size` bytes."""
        end = self.at + size
        if end > len(self.payload):
            raise RemoteProtocolError(f"a payload of {len(self.payload)} bytes ends too early")
        data = self.payload[self.at : end]
        self.at = end
        return data

    def name(self) -> str:
        """Read the name of a topic, a service or a member."""
        return name_of(self._string())

    def group(self) -> str:
        """Read the name of a consumer group, or in broadcast mode `group@member`."""
        return group_of(self._string())

    def text(self) -> str:
        """Read a printable text."""
        return text_of(self._string())

    def rest(self) -> bytes:
        """Read everything that is left."""
        return self.read(len(self.payload) - self.at)

    def end(self) -> None:
        """Check that nothing is left."""
        if self.at != len(self.payload):
            raise unfit(self.payload, self.at)

    def _string(self) -> bytes:
        return self.read(self.read(1)[0])
