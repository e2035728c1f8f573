"""Taking binary payloads apart, front to back; whatever does not fit is the peer's
fault.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

from txmq.errors import RemoteProtocolError
from txmq.model.message import is_name


@lru_cache(maxsize=4096)
def name_of(raw: bytes) -> str:
    """The name that these bytes are. Remembered: the same few topics come again and
    again.
    """
    text = raw.decode("latin-1")
    if not is_name(text):
        raise RemoteProtocolError(f"{text!r} is no name")
    return text


@lru_cache(maxsize=1024)
def text_of(raw: bytes) -> str:
    """The words that these bytes are, fit for a line of a log. Remembered: most are of
    the same few producers.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("a text that is not UTF-8") from error
    if not text.isprintable():
        raise RemoteProtocolError(f"a text with characters that do not print: {text!r}")
    return text


@lru_cache(maxsize=4096)
def group_of(raw: bytes) -> str:
    """The name of a consumer group, or of a member's own one: `group@member`."""
    group, at, member = raw.decode("latin-1").partition("@")
    if not is_name(group) or (at and not is_name(member)):
        raise RemoteProtocolError(f"{raw!r} names no consumer group")
    return f"{group}{at}{member}"


class Reader:
    """A place in a payload that moves on with everything taken. All methods raise
    RemoteProtocolError.
    """

    __slots__ = ("at", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.at = 0

    @property
    def left(self) -> int:
        """How many bytes are still there."""
        return len(self.payload) - self.at

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The fields of a struct."""
        try:
            fields = layout.unpack_from(self.payload, self.at)
        except struct.error as error:
            raise RemoteProtocolError(
                f"a payload of {len(self.payload)} bytes ends too early"
            ) from error
        self.at += layout.size
        return fields

    def take(self, size: int) -> bytes:
        """That many bytes."""
        end = self.at + size
        if end > len(self.payload):
            raise RemoteProtocolError(f"a payload of {len(self.payload)} bytes ends too early")
        taken = self.payload[self.at : end]
        self.at = end
        return taken

    def name(self) -> str:
        """The name of a topic, a service or a member."""
        return name_of(self._string())

    def group(self) -> str:
        """The name of a consumer group, in broadcast mode with that of its member."""
        return group_of(self._string())

    def text(self) -> str:
        """Some words, fit for a line of a log."""
        return text_of(self._string())

    def rest(self) -> bytes:
        """Everything that is left."""
        return self.take(len(self.payload) - self.at)

    def end(self) -> None:
        """Nothing may be left."""
        if self.at != len(self.payload):
            raise RemoteProtocolError(f"{len(self.payload) - self.at} bytes too many in a payload")

    def _string(self) -> bytes:
        return self.take(self.take(1)[0])
