"""Requests of the jobs to a broker: published ends, messages by offset, letters by
number, and storing a bundle.

All of these requests may be repeated. A lost connection is therefore opened again, and
the request is sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar

from txmq.client.blocking.connections.connection import Connection, open_connection
from txmq.client.protocol.address import parse_url
from txmq.client.protocol.conversation import Conversation, LogIdentity
from txmq.errors import (
    BadRequest,
    BrokerFailed,
    ConnectionLost,
    ProtocolError,
    RemoteProtocolError,
    RequestTimeout,
)
from txmq.wire.bundle import BundlePart, pack_part
from txmq.wire.chunks import Chunk, Chunks, unpack_chunks
from txmq.wire.data_requests import Opcode, Read, pack_read
from txmq_spark.arrow_messages import OffsetRange

REQUEST_TIMEOUT_S: Final = 30.0  # for one reply, including a new connection
REQUEST_ATTEMPTS: Final = 3
# bytes of one reply; two replies are in memory at a time
READ_BYTES: Final = 4 << 20
PAGE_LETTERS: Final = 1_000  # letters of one reply
PAGE_LETTERS_WITH_BODIES: Final = 128  # with bodies; fewer where they do not fit in a frame
T = TypeVar("T")


class BrokerLink(AbstractContextManager["BrokerLink"]):
    """A connection of one task to a broker, opened at the first request."""

    def __init__(self, url: str) -> None:
        self._addresses = parse_url(url)
        self._log_identity = LogIdentity()
        self._connection: Connection | None = None

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
        """The id of the log that the broker writes.

        Offsets and tokens have a meaning in that log only.
        """
        return str(self._connected().welcome.log_id)

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        """Return the reply to a control call that changes nothing.

        Raises RequestRejected, BrokerUnavailable.
        """
        return self._with_retries(
            lambda connection: connection.call(name, args, timeout=REQUEST_TIMEOUT_S)
        )

    def store(self, part: BundlePart) -> None:
        """Store a bundle of one part.

        The broker recognises a repeated part by its token.
        """
        payload = pack_part(part)
        self._with_retries(
            lambda connection: connection.request(Opcode.GROUP, payload, timeout=REQUEST_TIMEOUT_S)
        )

    def published_ends(self, topic: str) -> list[int]:
        """Return, by partition, the offset after the last visible message.

        Raises UnknownTopic.
        """
        return self.offset_bounds(topic)[1]

    def offset_bounds(self, topic: str) -> tuple[list[int], list[int]]:
        """Return the first offsets that retention has left, and the published ends.

        Both are lists by partition. Raises UnknownTopic.
        """
        reply = self.call("topic.show", name=topic)
        return [int(first) for first in reply["firsts"]], [int(end) for end in reply["ends"]]

    def chunks(self, offsets: OffsetRange) -> Iterator[Chunk]:
        """Yield the chunks that cover the range, in order.

        The first and the last may hold more. The next reply is on its way while the
        caller works on a chunk. Raises OffsetOutOfRange.
        """
        offset = offsets.start
        pending = self._request_chunks(offsets, offset)
        while True:
            reply = self._receive_chunks(offsets, offset, pending)
            if reply.next_offset <= offset:
                raise RemoteProtocolError(
                    f"{offsets.topic}/{offsets.partition} has no messages from offset {offset} on"
                )
            offset = reply.next_offset
            if offset >= offsets.end:
                yield from reply.chunks
                return
            pending = self._request_chunks(offsets, offset)
            yield from reply.chunks

    def letters(
        self, group: str, *, bodies: bool, after: int = 0, last: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the open letters of a consumer group, in the order of their numbers.

        The numbers are greater than `after`, and at most `last`.
        """
        page = PAGE_LETTERS_WITH_BODIES if bodies else PAGE_LETTERS
        following: int | None = after
        while following is not None:
            try:
                reply = self.call(
                    "dlq.list", group=group, after=following, limit=page, bodies=bodies
                )
            except (BadRequest, BrokerFailed, ProtocolError, ConnectionLost):
                # A page of large bodies may not fit in a frame, and the sizes are
                # unknown before.
                if page == 1 or not bodies:
                    raise
                page = max(1, page // 8)
                continue
            for letter in reply["letters"]:
                if last is not None and letter["number"] > last:
                    return
                if letter["state"] == "dead":
                    yield letter
            following = reply["next"]

    def _request_chunks(self, offsets: OffsetRange, offset: int) -> tuple[Connection, int]:
        payload = pack_read(Read(offsets.partition, offset, 0, READ_BYTES, offsets.topic))

        def write(connection: Connection) -> tuple[Connection, int]:
            return connection, connection.write(
                Opcode.READ, payload, time.monotonic() + REQUEST_TIMEOUT_S
            )

        return self._with_retries(write)

    def _receive_chunks(
        self, offsets: OffsetRange, offset: int, pending: tuple[Connection, int]
    ) -> Chunks:
        connection, correlation = pending
        try:
            return unpack_chunks(connection.read(correlation, time.monotonic() + REQUEST_TIMEOUT_S))
        except (ConnectionLost, RequestTimeout):
            connection.close()
        payload = pack_read(Read(offsets.partition, offset, 0, READ_BYTES, offsets.topic))
        return self._with_retries(
            lambda fresh: unpack_chunks(
                fresh.request(Opcode.READ, payload, timeout=REQUEST_TIMEOUT_S)
            )
        )

    def _with_retries(self, step: Callable[[Connection], T]) -> T:
        for _ in range(REQUEST_ATTEMPTS - 1):
            try:
                return step(self._connected())
            except (ConnectionLost, RequestTimeout):
                self._disconnect()
        return step(self._connected())

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            deadline = time.monotonic() + REQUEST_TIMEOUT_S
            self._connection = open_connection(
                self._addresses, partial(Conversation, None, self._log_identity), deadline
            )
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
