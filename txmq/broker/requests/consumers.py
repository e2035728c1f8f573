"""ACK, FETCH and READ: messages delivered to members, acknowledged, and read freely."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from txmq.broker.engine.log_reader import (
    PublishedBatch,
    published_batches,
    read_before_damage,
    visible_end,
)
from txmq.core.consumers.commands import AckMessages
from txmq.core.topics import topics
from txmq.errors import MessagesDamaged, OffsetOutOfRange, TopicReplaced
from txmq.model.topic_partition import TopicPartition
from txmq.wire import data_requests
from txmq.wire.chunks import Chunk, chunk_size, pack_chunks

if TYPE_CHECKING:
    from txmq.broker.delivery.fetch_service import FetchService
    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.core.consumers.acks import AckReply
    from txmq.core.state.state import Topic
    from txmq.wire.frames import Frame

MAX_BYTES = 4 << 20  # of the batches in one reply to a READ, unless the first is larger


class ConsumerRequests:
    """Answers ACK, FETCH and READ. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, fetches: FetchService) -> None:
        self._engine, self._fetches = engine, fetches

    def ack(self, session: ClientSession, frame: Frame) -> None:
        request = data_requests.unpack_ack(frame.payload)
        command = AckMessages(
            *(request.group, request.member, request.generation), request.ranges, request.filtered
        )
        answer = partial(session.answer, frame, _refused_acks)
        self._engine.submit(command, answer, early=self._engine.flush_policy)

    def fetch(self, session: ClientSession, frame: Frame) -> None:
        self._fetches.fetch(session, frame, data_requests.unpack_fetch(frame.payload))

    def read(self, session: ClientSession, frame: Frame) -> None:
        request = data_requests.unpack_read(frame.payload)

        def attempt(*, last: bool) -> bool:
            chunks, following = self._chunks(request)
            if following > request.offset or last:
                session.reply(frame, pack_chunks(chunks, next_offset=following))
                return True
            return False

        if not attempt(last=request.max_wait_ms == 0):
            nothing = pack_chunks([], next_offset=request.offset)
            self._fetches.polls.wait(
                session,
                request.max_wait_ms,
                attempt,
                partial(session.reply, frame, nothing),
                topics=(request.topic,),
            )

    def _chunks(self, request: data_requests.Read) -> tuple[list[Chunk], int]:
        """Return the visible batches from the offset on, and the offset behind them."""
        topic = self._topic_to_read(request)
        batches = self._visible_batches(topic, request)
        if not batches:
            store = self._engine.store
            end = visible_end(self._engine.state, topic.topic_id, request.partition, store.durable)
            if request.offset > end:
                raise _behind_the_end(topic, request, end)
            return [], end  # what lies between was lost to a repair of the log
        chunks = self._read(topic, request.partition, batches)
        if not chunks:
            raise _damage_error(topic.name, request.partition, batches[0])
        return chunks, chunks[-1].base_offset + chunks[-1].rows

    def _topic_to_read(self, request: data_requests.Read) -> Topic:
        state = self._engine.state
        topic = topics.find_topic(state, request.topic, request.partition)
        topics.check_readable(topic)
        if request.topic_id not in (0, topic.topic_id):
            raise _replaced(topic)
        if request.offset < topic.start_offsets[request.partition]:
            topics.check_offset(state, topic, request.partition, request.offset)
        return topic

    def _read(self, topic: Topic, partition: int, batches: list[PublishedBatch]) -> list[Chunk]:
        """Return the batches before the first damaged one."""
        place = TopicPartition(topic.topic_id, partition)
        spans = [(place, (found.entry.position, found.entry.length)) for found in batches]
        datas, _damaged = read_before_damage(self._engine.store, spans)
        return [
            Chunk(
                topic.name,
                partition,
                found.base,
                found.entry.stored_at,
                found.entry.position,
                1,
                0,
                -1,
                0,
                found.entry.count,
                data,
            )
            for found, data in zip(batches, datas, strict=True)
            if data is not None
        ]

    def _visible_batches(self, topic: Topic, request: data_requests.Read) -> list[PublishedBatch]:
        """Return as many batches as fit in the reply, one at least."""
        found: list[PublishedBatch] = []
        size, limit = 0, min(request.max_bytes, MAX_BYTES)
        for batch in published_batches(
            self._engine.state,
            topic.topic_id,
            request.partition,
            request.offset,
            self._engine.store.durable,
        ):
            size += chunk_size(topic.name, batch.entry.length)
            if found and size > limit:
                break
            found.append(batch)
        return found


def _replaced(topic: Topic) -> TopicReplaced:
    return TopicReplaced(
        f"topic {topic.name!r} was deleted and made again",
        hint="begin anew with the new topic: positions in the old one do not hold",
        detail={"topic": topic.name, "topic_id": topic.topic_id},
    )


def _behind_the_end(topic: Topic, request: data_requests.Read, end: int) -> OffsetOutOfRange:
    place = f"{topic.name}/{request.partition}"
    message = f"offset {request.offset} of {place}: its messages end at {end}"
    first = topic.start_offsets[request.partition]
    return OffsetOutOfRange(message, detail={"first": first, "end": end})


def _damage_error(topic: str, partition: int, batch: PublishedBatch) -> MessagesDamaged:
    first, end = batch.base, batch.base + batch.entry.count
    message = (
        f"messages {first} to {end - 1} of {topic}/{partition} are damaged on the broker's disk"
    )
    hint = "the broker's alarms name the file: restore it from a backup, or read on behind them"
    return MessagesDamaged(message, hint=hint, detail={"first": first, "next": end})


def _refused_acks(reply: AckReply) -> bytes:
    if not reply.refused:
        return b""
    return data_requests.pack_refused([data_requests.AckedRange(*place) for place in reply.refused])
