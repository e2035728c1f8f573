"""What the jobs ask of a broker: published ends, messages by offset, letters by number;
and to keep a group.

All of it may be asked twice, so that a lost connection is simply made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from txmq.client.blocking.connections.connection import Connection, dial
from txmq.client.protocol.address import parse_url
from txmq.client.protocol.conversation import Conversation, LogPin
from txmq.errors import (
    BadRequest,
    BrokerFailed,
    ConnectionLost,
    ProtocolError,
    RemoteProtocolError,
    RequestTimeout,
)
from txmq.wire.chunks import Chunk, Chunks, unpack_chunks
from txmq.wire.group import Part, pack_part
from txmq.wire.headers import Opcode, Read, pack_read
from txmq_spark.columns import Span

PATIENCE_S: Final = 30.0  # for one reply, reconnecting included
ATTEMPTS: Final = 3
READ_BYTES: Final = (
    4 << 20
)  # of one reply: large enough to be worth a round trip, two are in memory at once
PAGE: Final = 1_000  # letters asked for at once
PAGE_OF_BODIES: Final = 128  # likewise with their bodies; less where they do not fit in a frame
T = TypeVar("T")


class Link:
    """A connection to a broker for one task; made at first use, and again where it was
    lost.
    """

    def __init__(self, url: str) -> None:
        self._addresses = parse_url(url)
        self._pin = LogPin()
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._connection.close()

    @property
    def log_id(self) -> str:
        """Which log the broker writes: offsets and tokens mean something in that one
        alone.
        """
        return str(self._connected().welcome.log_id)

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        """The reply to a control call that changes nothing. Raises RequestRejected,
        BrokerUnavailable.
        """
        return self._again(lambda connection: connection.call(name, args, timeout=PATIENCE_S))

    def store(self, part: Part) -> None:
        """Stores a group of one part. To store it again is harmless: the broker knows
        it by its token.
        """
        payload = pack_part(part)
        self._again(
            lambda connection: connection.request(Opcode.GROUP, payload, timeout=PATIENCE_S)
        )

    def published_ends(self, topic: str) -> list[int]:
        """By partition, the offset after the last message that anybody can see. Raises
        UnknownTopic.
        """
        return self.bounds(topic)[1]

    def bounds(self, topic: str) -> tuple[list[int], list[int]]:
        """By partition, the offset of the first message that is kept, and what
        `published_ends` gives.
        """
        shown = self.call("topic.show", name=topic)
        return [int(first) for first in shown["firsts"]], [int(end) for end in shown["ends"]]

    def chunks(self, span: Span) -> Iterator[Chunk]:
        """The batches that hold the span, in order; the first and the last may hold
        more.

        The next reply is on its way while a caller works on this one. Raises
        OffsetOutOfRange.
        """
        offset = span.start
        asked = self._ask(span, offset)
        while True:
            found = self._answer(span, offset, asked)
            if found.next_offset <= offset:
                raise RemoteProtocolError(
                    f"{span.topic}/{span.partition} gives nothing from {offset} on"
                )
            offset = found.next_offset
            if offset >= span.end:
                yield from found.chunks
                return
            asked = self._ask(span, offset)
            yield from found.chunks

    def letters(
        self, group: str, *, bodies: bool, after: int = 0, last: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """The open letters of a consumer group with numbers over `after` and up to
        `last`, in order.
        """
        page = PAGE_OF_BODIES if bodies else PAGE
        following: int | None = after
        while following is not None:
            try:
                found = self.call(
                    "dlq.list", group=group, after=following, limit=page, bodies=bodies
                )
            except (BadRequest, BrokerFailed, ProtocolError, ConnectionLost):
                # A page of large bodies does not fit in a frame, and how large they are
                # is not known before.
                if page == 1 or not bodies:
                    raise
                page = max(1, page // 8)
                continue
            for letter in found["letters"]:
                if last is not None and letter["number"] > last:
                    return
                if letter["state"] == "dead":
                    yield letter
            following = found["next"]

    def _ask(self, span: Span, offset: int) -> tuple[Connection, int]:
        payload = pack_read(Read(span.partition, offset, 0, READ_BYTES, span.topic))

        def write(connection: Connection) -> tuple[Connection, int]:
            return connection, connection.write(Opcode.READ, payload, time.monotonic() + PATIENCE_S)

        return self._again(write)

    def _answer(self, span: Span, offset: int, asked: tuple[Connection, int]) -> Chunks:
        connection, correlation = asked
        try:
            return unpack_chunks(connection.read(correlation, time.monotonic() + PATIENCE_S))
        except (ConnectionLost, RequestTimeout):
            connection.close()
        payload = pack_read(Read(span.partition, offset, 0, READ_BYTES, span.topic))
        return self._again(
            lambda fresh: unpack_chunks(fresh.request(Opcode.READ, payload, timeout=PATIENCE_S))
        )

    def _again(self, step: Callable[[Connection], T]) -> T:
        for _ in range(ATTEMPTS - 1):
            try:
                return step(self._connected())
            except (ConnectionLost, RequestTimeout):
                self._drop()
        return step(self._connected())

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            deadline = time.monotonic() + PATIENCE_S
            self._connection = dial(
                self._addresses, lambda: Conversation(None, self._pin), deadline
            )
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
