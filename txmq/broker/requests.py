"""Data requests: what arrives in binary headers, turned into commands, and what the core replies, turned back into
bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from txmq import limits
from txmq.batch import verify
from txmq.broker.core import admission, consumer_commands, sends, topics
from txmq.broker.core.state import Rejected
from txmq.broker.core.topics import find
from txmq.broker.grouping import Grouping, fence, too_large
from txmq.broker.reading import Found, before_damage, end_of, published
from txmq.config_storage import FlushEvery
from txmq.errors import BadRequest, MessagesDamaged, OffsetOutOfRange, TxmqError
from txmq.wire import headers
from txmq.wire.chunks import Chunk, chunk_size, pack_chunks
from txmq.wire.headers import Opcode

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.calls import Calls
    from txmq.broker.core.acks import AckReply
    from txmq.broker.engine import Engine
    from txmq.broker.fetching import Fetching
    from txmq.broker.protocol import Session
    from txmq.broker.resolving import Resolves
    from txmq.broker.watching import Watching
    from txmq.wire.frames import Frame


class Requests:
    """Answers the frames of all sessions. All methods belong to the reactor's thread."""

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
        self._message_bytes = message_bytes
        grouping = Grouping(engine, resolving, watching, message_bytes)
        self._handlers: dict[int, Callable[[Session, Frame], None]] = {
            Opcode.SEND: self._send,
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
            session.refuse(frame, BadRequest(f"unknown request {frame.opcode}, flags {frame.status}"))
            return
        try:
            handler(session, frame)
        except TxmqError as error:
            # What is wrong inside a frame whose checksum is right is the request's fault alone: the next one may be
            # fine.
            session.refuse(frame, error)

    def _submit(
        self,
        session: Session,
        frame: Frame,
        command: object,
        encode: Callable[[Any], bytes],
        *,
        early: FlushEvery | None = None,
    ) -> None:
        def deliver(reply: object) -> None:
            if isinstance(reply, Rejected):
                session.reject(frame, reply)
            else:
                session.reply(frame, encode(reply))

        self._engine.submit(command, deliver, early=early)

    def _send(self, session: Session, frame: Frame) -> None:
        request = headers.unpack_send(frame.payload)
        command = sends.Send(
            request.topic, request.topic_epoch, request.partition, request.batch, verify(request.batch)
        )
        no = too_large([(command.header, command.batch)], self._message_bytes)
        if no is None and session.instance is not None and not sends.is_known(self._engine.state, command.header):
            no = fence(self._engine, session)
        if no is not None:
            self._engine.tell(lambda no: session.reject(frame, no), no)
            return
        self._submit(session, frame, command, headers.pack_send_receipt, early=self._flush_of(request.topic))

    def _flush_of(self, name: str) -> FlushEvery | None:
        """How messages of a topic come to disk; None = before they are acknowledged."""
        topic = self._engine.state.topics.get(name)
        own = topic.settings.flush if topic is not None else ""
        if not own:
            return self._engine.flush
        return None if isinstance(own, str) else _flush_every(*own)

    def _ack(self, session: Session, frame: Frame) -> None:
        request = headers.unpack_ack(frame.payload)
        command = consumer_commands.Ack(request.group, request.member, request.generation, request.ranges)
        self._submit(session, frame, command, _refused_acks, early=self._engine.flush)

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
        wanted = [((topic.topic_id, request.partition), (p.entry.position, p.entry.length)) for p in places]
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


@lru_cache(maxsize=256)  # a model is checked as it is made, which each send would pay for
def _flush_every(every_ms: int, messages: int) -> FlushEvery:
    return FlushEvery(every_ms=every_ms, messages=messages)


def _damaged(topic: str, partition: int, place: Found) -> MessagesDamaged:
    first, end = place.base, place.base + place.entry.count
    message = f"messages {first} to {end - 1} of {topic}/{partition} are damaged on the broker's disk"
    hint = "the broker's alarms name the file: restore it from a backup, or go on behind them"
    return MessagesDamaged(message, hint=hint, detail={"first": first, "next": end})


def _refused_acks(reply: AckReply) -> bytes:
    return headers.pack_refused([headers.Acked(*place) for place in reply.refused]) if reply.refused else b""
