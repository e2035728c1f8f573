"""Data requests: what arrives in binary headers, turned into commands, and what the
core replies, turned back into bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.broker.bundle_requests import Grouping
from txmq.broker.log_reader import Found, before_damage, end_of, published
from txmq.broker.send_requests import Sending
from txmq.core.consumers import commands as consumer_commands
from txmq.core.state.state import Rejected
from txmq.core.topics import admission, topics
from txmq.core.topics.topics import find
from txmq.errors import BadRequest, MessagesDamaged, OffsetOutOfRange, TxmqError
from txmq.model import limits
from txmq.wire import headers
from txmq.wire.chunks import Chunk, chunk_size, pack_chunks
from txmq.wire.headers import Opcode

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.calls.control import Calls
    from txmq.broker.checkback.listeners import Watching
    from txmq.broker.checkback.resolver_service import Resolves
    from txmq.broker.engine import Engine
    from txmq.broker.fetch_service import Fetching
    from txmq.broker.protocol import Session
    from txmq.core.consumers.acks import AckReply
    from txmq.wire.frames import Frame


class Requests:
    """Answers the frames of all sessions. All methods belong to the reactor's
    thread.
    """

    def __init__(
        self,
        engine: Engine,
        fetching: Fetching,
        calls: Calls,
        resolving: Resolves,
        watching: Watching,
        *,
        message_bytes: int = limits.MESSAGE,
    ) -> None:
        self._engine, self._fetching, self._calls = engine, fetching, calls
        sending, grouping = (
            Sending(engine, message_bytes),
            Grouping(engine, resolving, watching, message_bytes),
        )
        self._handlers: dict[int, Callable[[Session, Frame], None]] = {
            Opcode.SEND: sending.send,
            Opcode.SENDS: sending.sends,
            Opcode.ACK: self._ack,
            Opcode.FETCH: self._fetch,
            Opcode.GROUP: grouping.group,
            Opcode.DECIDE: grouping.decide,
            Opcode.GROUPS: grouping.groups,
            Opcode.DECISIONS: grouping.decisions,
            Opcode.READ: self._read,
            Opcode.CALL: self._calls.handle,
            Opcode.PING: lambda session, frame: session.reply(frame),
        }

    def handle(self, session: Session, frame: Frame) -> None:
        """Answer one request; ProtocolErrors are the session's to handle."""
        handler = self._handlers.get(frame.opcode)
        if handler is None or frame.status:
            session.refuse(
                frame, BadRequest(f"unknown request {frame.opcode}, flags {frame.status}")
            )
            return
        try:
            handler(session, frame)
        except TxmqError as error:
            # What is wrong inside a frame whose checksum is right is the request's
            # fault alone: the next one may be fine.
            session.refuse(frame, error)

    def _ack(self, session: Session, frame: Frame) -> None:
        request = headers.unpack_ack(frame.payload)
        command = consumer_commands.Ack(
            request.group, request.member, request.generation, request.ranges
        )

        def deliver(reply: Any) -> None:  # a Rejected, or an AckReply
            if isinstance(reply, Rejected):
                session.reject(frame, reply)
            else:
                session.reply(frame, _refused_acks(reply))

        self._engine.submit(command, deliver, early=self._engine.flush)

    def _fetch(self, session: Session, frame: Frame) -> None:
        self._fetching.fetch(session, frame, headers.unpack_fetch(frame.payload))

    def _read(self, session: Session, frame: Frame) -> None:
        request = headers.unpack_read(frame.payload)

        def attempt(*, last: bool) -> bool:
            found = self._found(session, frame, request)
            if found is None:
                return True
            if found or last:
                next_offset = found[-1].base_offset + found[-1].rows if found else request.offset
                session.reply(frame, pack_chunks(found, next_offset=next_offset))
                return True
            return False

        if not attempt(last=request.max_wait_ms == 0):
            self._fetching.wait(session, {request.topic}, request.max_wait_ms, attempt)

    def _found(self, session: Session, frame: Frame, request: headers.Read) -> list[Chunk] | None:
        """What is there from the offset on; None = refused."""
        state, durable = self._engine.state, self._engine.store.durable
        topic = find(state, request.topic, request.partition)
        if isinstance(topic, Rejected):
            session.reject(frame, topic)
            return None
        if closed := admission.unreadable(topic):
            session.reject(frame, closed)
            return None
        if request.offset < topic.firsts[request.partition]:
            outside = topics.outside(state, topic, request.partition, request.offset)
            assert outside is not None, "it is before the first"
            session.reject(frame, outside)
            return None
        places: list[Found] = []
        size = 0
        for place in published(state, topic.topic_id, request.partition, request.offset, durable):
            size += chunk_size(topic.name, place.entry.length)
            if places and size > request.max_bytes:
                break
            places.append(place)
        end = end_of(state, topic.topic_id, request.partition, durable) if not places else 0
        if not places and request.offset > end:
            message = f"offset {request.offset} of {topic.name}/{request.partition}: its messages end at {end}"
            detail: dict[str, object] = {"first": topic.firsts[request.partition], "end": end}
            session.refuse(frame, OffsetOutOfRange(message, detail=detail))
            return None
        wanted = [
            ((topic.topic_id, request.partition), (p.entry.position, p.entry.length))
            for p in places
        ]
        batches, _damage = before_damage(self._engine.store, wanted)
        if places and batches[0] is None:
            session.refuse(frame, _damaged(topic.name, request.partition, places[0]))
            return None
        return [
            Chunk(
                topic.name,
                request.partition,
                p.base,
                p.entry.stored_at,
                p.entry.position,
                1,
                0,
                -1,
                0,
                p.entry.count,
                data,
            )
            for p, data in zip(places, batches, strict=True)
            if data is not None
        ]


def _damaged(topic: str, partition: int, place: Found) -> MessagesDamaged:
    first, end = place.base, place.base + place.entry.count
    message = (
        f"messages {first} to {end - 1} of {topic}/{partition} are damaged on the broker's disk"
    )
    hint = "the broker's alarms name the file: restore it from a backup, or go on behind them"
    return MessagesDamaged(message, hint=hint, detail={"first": first, "next": end})


def _refused_acks(reply: AckReply) -> bytes:
    return (
        headers.pack_refused([headers.Acked(*place) for place in reply.refused])
        if reply.refused
        else b""
    )
