"""Requests of the jobs to a broker: the offsets of topics, messages by offset, letters
by number or by a selection, and control calls.

All of these requests may be repeated. A lost connection is therefore opened again, and
the request is sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar

from txmq.client.blocking.connections.connection import Connection, open_connection
from txmq.client.protocol.address import parse_url, url_at
from txmq.client.protocol.conversation import Conversation, LogIdentity, MeetsLog
from txmq.client.protocol.reader import offset_at_time
from txmq.errors import (
    BadRequest,
    BrokerFailed,
    ConnectionLost,
    LogChanged,
    MessagesDamaged,
    OffsetOutOfRange,
    ProtocolError,
    RemoteProtocolError,
    RequestTimeout,
    UnknownTopic,
)
from txmq.faces import run
from txmq.wire.calls.encoding import encode_call
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.data_requests import Opcode, Read, ReadLetters, pack_read, pack_read_letters
from txmq.wire.json import parse_result
from txmq_spark.source.arrow_messages import OffsetRange
from txmq_spark.source.offset_ranges import (
    LogName,
    Survey,
    TaskRange,
    TopicBounds,
    report_losses,
    retention_loss,
)
from txmq_spark.source.options import ReadOptions

REQUEST_TIMEOUT_S: Final = 30.0  # for one reply, including a new connection
REQUEST_ATTEMPTS: Final = 3
# bytes of one reply; two replies are in memory at a time
READ_BYTES: Final = 4 << 20
PAGE_NAMES: Final = 1_000  # topics of one reply
PAGE_LETTERS: Final = 1_000  # letters of one reply
PAGE_LETTERS_WITH_BODIES: Final = 128  # with bodies; fewer where they do not fit in a frame
T = TypeVar("T")


class BrokerLink(AbstractContextManager["BrokerLink"], MeetsLog):
    """A connection of one task to a broker, opened at the first request."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._addresses = parse_url(url)
        self._log = LogIdentity()
        self.patient = True  # waits for a broker that does not answer
        self._connection: Connection | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()

    @property
    def url(self) -> str:
        """The URL for links of tasks, also to a log that has moved."""
        listed_at = self._log.listed_at
        if not listed_at:
            return self._url
        return url_at(self._url, dict.fromkeys((*listed_at, *self._addresses)))

    @property
    def log_id(self) -> str:
        """The id of the log that the broker writes.

        Offsets and tokens have a meaning in that log only.
        """
        return str(self._connected().welcome.log_id)

    @property
    def log_name(self) -> LogName:
        """The log that the broker writes, with its incarnation."""
        welcome = self._connected().welcome
        return LogName(str(welcome.log_id), str(welcome.incarnation or ""))

    def meet(self) -> str:
        """Return the id of the log; what the broker has told of others is known then.

        Raises BrokerUnavailable, LogChanged.
        """
        self._request(Opcode.PING, b"")
        return self.log_id

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        """Return the reply to a control call that changes nothing.

        Raises RequestRejected, BrokerUnavailable.
        """
        return self._with_retries(
            lambda connection: connection.call(name, args, timeout=REQUEST_TIMEOUT_S)
        )

    def survey(self, options: ReadOptions, *, missing: bool = False) -> Survey:
        """Return the topics that a read selects. `missing`: named ones may be absent.

        Raises UnknownTopic.
        """
        log_name = self.log_name
        topics: dict[str, TopicBounds] = {}
        by_pattern = options.pattern is not None
        for name in sorted(
            filter(options.selects, self.topics()) if by_pattern else options.topics
        ):
            try:
                shown = self.call("topic.show", name=name)
            except UnknownTopic:  # matched by the pattern and deleted since
                if not (missing or by_pattern):
                    raise
                continue
            topics[name] = TopicBounds(
                int(shown["topic_id"]),
                [int(first) for first in shown["firsts"]],
                [int(end) for end in shown["ends"]],
                int(shown["bytes"]),
            )
        if self.log_name != log_name:
            raise LogChanged("the broker's log was replaced meanwhile", hint="run the job again")
        return Survey(log_name, topics)

    def topics(self) -> Iterator[str]:
        """Yield the names of all topics."""
        after: str | None = ""
        while after is not None:
            reply = self.call("topic.list", after=after, limit=PAGE_NAMES)
            yield from (str(topic["name"]) for topic in reply["topics"])
            after = reply.get("next")

    def offset_at(self, topic: str, partition: int, first: int, end: int, at: int) -> int:
        """Return the first of these offsets that was stored at that time or later, in
        microseconds; `end` = none was.
        """

        async def read(opcode: int, payload: bytes) -> bytes:
            return self._request(opcode, payload)

        return run(offset_at_time(read, (topic, partition), first, end, at))

    def range_chunks(self, task: TaskRange, *, fail: bool) -> Iterator[Chunk]:
        """Yield the chunks that cover the range of a task.

        Raises DataLoss where retention has removed messages meanwhile; if not `fail`,
        these are left out. Raises LogChanged, TopicReplaced where the broker does not
        have what was planned.
        """
        if self.log_name != task.log:
            raise LogChanged(
                f"the broker has log {' '.join(self.log_name)}, and the read was planned in log"
                f" {' '.join(task.log)}",
                hint="run the job again",
            )
        offsets = task.offsets
        while offsets.start < offsets.end:
            try:
                for chunk in self.chunks(offsets, task.topic_id):
                    offsets = offsets._replace(
                        start=chunk.base_offset + chunk.first_row + chunk.rows
                    )
                    yield chunk
                return
            except OffsetOutOfRange as error:
                first = error.detail.get("first")
                if not isinstance(first, int) or first <= offsets.start:
                    raise
            first = min(first, offsets.end)
            loss = retention_loss((offsets.topic, offsets.partition), offsets.start, first)
            report_losses([loss], fail=fail)
            offsets = offsets._replace(start=first)

    def chunks(self, offsets: OffsetRange, topic_id: int = 0) -> Iterator[Chunk]:
        """Yield the chunks that cover the range, in order. `topic_id` 0 = any.

        The first and the last may hold more. The next reply is on its way while the
        caller works on a chunk. Raises OffsetOutOfRange, TopicReplaced.
        """
        nothing = f"{offsets.topic}/{offsets.partition} has no messages"
        return self._chunks(Opcode.READ, partial(_read_payload, topic_id), offsets, nothing)

    def letters(
        self, group: str, *, bodies: bool, after: int = 0, last: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the open letters of a consumer group, in the order of their numbers.

        The numbers are greater than `after`, and at most `last`. A letter whose message
        is damaged has no body.
        """
        if last is not None and last <= after:
            return
        pages = self._pages_with_bodies if bodies else self._pages
        for page in pages(group, after, last):
            for letter in page:
                if last is not None and letter["number"] > last:
                    return
                if letter["state"] == "dead":
                    yield letter

    def _pages(self, group: str, after: int, last: int | None) -> Iterator[list[dict[str, Any]]]:
        """Yield pages of letters without bodies. The next page is on its way while the
        caller works on one.
        """
        payload = _page_payload(group, after, last)
        pending = self._write(Opcode.CALL, payload)
        while True:
            reply = parse_result(self._reply_of(Opcode.CALL, payload, pending))
            following = reply["next"]
            if following is None or (last is not None and following >= last):
                yield reply["letters"]
                return
            payload = _page_payload(group, following, last)
            pending = self._write(Opcode.CALL, payload)
            yield reply["letters"]

    def _pages_with_bodies(
        self, group: str, after: int, last: int | None
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield pages of letters with bodies, as many in one as fit in a frame."""
        limit = PAGE_LETTERS_WITH_BODIES
        following: int | None = after
        while following is not None and (last is None or following < last):
            limit = limit if last is None else min(limit, last - following)
            args = {"group": group, "after": following}
            try:
                reply = self.call("dlq.list", **args, limit=limit, bodies=True)
            except (BadRequest, BrokerFailed, ProtocolError, ConnectionLost):
                # A page of large bodies may not fit in a frame, and the sizes are
                # unknown before.
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
                continue
            except MessagesDamaged:  # that of the next letter, which has to be a body's
                reply = self.call("dlq.list", **args, limit=1, bodies=False)
                if not any("damaged" in letter for letter in reply["letters"]):
                    raise
            yield reply["letters"]
            following = reply["next"]

    def selected_letters(
        self, group: str, select: Mapping[str, Any], *, bodies: bool, cursor: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the letters of a selection, in the order of their deaths, from a cursor
        on. Letters that died after the cursor was made are left out.
        """
        page = PAGE_LETTERS_WITH_BODIES if bodies else PAGE_LETTERS
        while True:
            reply = self.call(
                "dlq.list",
                group=group,
                select=dict(select),
                cursor=cursor,
                limit=page,
                bodies=bodies,
            )
            yield from reply["letters"]
            cursor = reply["next"]
            if cursor is None:
                return

    def held_letters(self, plan: str, offsets: OffsetRange) -> Iterator[Chunk]:
        """Yield the messages of the letters in the range that a plan of the broker
        holds, in order, but for damaged ones.

        The next reply is on its way while the caller works on a chunk.
        """
        nothing = f"{plan}: no letters"
        return self._chunks(Opcode.LETTERS, partial(_letters_payload, plan), offsets, nothing)

    def _chunks(
        self,
        opcode: int,
        payload_of: Callable[[OffsetRange], bytes],
        offsets: OffsetRange,
        nothing: str,
    ) -> Iterator[Chunk]:
        """Yield the chunks that cover a range; `nothing` is the text for none."""
        payload = payload_of(offsets)
        pending = self._write(opcode, payload)
        while True:
            reply = unpack_chunks(self._reply_of(opcode, payload, pending))
            if reply.next_offset <= offsets.start:
                raise RemoteProtocolError(f"{nothing} from offset {offsets.start} on")
            offsets = offsets._replace(start=reply.next_offset)
            if offsets.start >= offsets.end:
                yield from reply.chunks
                return
            payload = payload_of(offsets)
            pending = self._write(opcode, payload)
            yield from reply.chunks

    def _write(self, opcode: int, payload: bytes) -> tuple[Connection, int]:
        """Send a request; return what its reply is read by."""

        def write(connection: Connection) -> tuple[Connection, int]:
            deadline = time.monotonic() + REQUEST_TIMEOUT_S
            return connection, connection.write(opcode, payload, deadline)

        return self._with_retries(write)

    def _reply_of(self, opcode: int, payload: bytes, pending: tuple[Connection, int]) -> bytes:
        """Return the reply to a request; after a loss it is sent again."""
        connection, correlation = pending
        try:
            return connection.read(correlation, time.monotonic() + REQUEST_TIMEOUT_S)
        except (ConnectionLost, RequestTimeout):
            connection.close()
        return self._request(opcode, payload)

    def _request(self, opcode: int, payload: bytes) -> bytes:
        return self._with_retries(
            lambda connection: connection.request(opcode, payload, timeout=REQUEST_TIMEOUT_S)
        )

    def _with_retries(self, step: Callable[[Connection], T]) -> T:
        for _ in range(REQUEST_ATTEMPTS - 1):
            try:
                return step(self._connected())
            except (ConnectionLost, RequestTimeout):
                self.close()
        return step(self._connected())

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            deadline = time.monotonic() + REQUEST_TIMEOUT_S
            self._connection = open_connection(
                self._addresses,
                self._log,
                partial(Conversation, None, self._log),
                deadline,
                retry=self.patient,
            )
        return self._connection


def _page_payload(group: str, after: int, last: int | None) -> bytes:
    limit = PAGE_LETTERS if last is None else min(PAGE_LETTERS, last - after)
    args = {"group": group, "after": after, "limit": limit, "bodies": False}
    return encode_call("dlq.list", args)


def _read_payload(topic_id: int, offsets: OffsetRange) -> bytes:
    topic, partition, start, _end = offsets
    return pack_read(Read(partition, start, 0, READ_BYTES, topic, topic_id))


def _letters_payload(plan: str, offsets: OffsetRange) -> bytes:
    topic, partition, start, end = offsets
    return pack_read_letters(ReadLetters(partition, start, end, READ_BYTES, plan, topic))
