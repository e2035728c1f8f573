"""SEND and SENDS: batches turned into commands, and receipts into bytes.

Sends of one frame that can share a record become one command: decided in one turn,
written as one record. They are answered in one reply, when the strictest flush policy
among their topics allows it. An error in one send is answered in its place, and
concerns no other.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from txmq.batch import verify
from txmq.broker.access.guard import OWN_USER
from txmq.broker.requests.multi_request import PENDING, encode_answer
from txmq.config.broker import FlushEvery
from txmq.core.topics import sends, topics
from txmq.core.topics.sends import StoreBatch, StoreBatches
from txmq.core.transactions.instances import check_incarnation
from txmq.errors import RequestRejected, TxmqError
from txmq.wire.batched import BatchedReply, pack_replies, unpack_requests
from txmq.wire.data_requests import Opcode, pack_send_receipt, unpack_send
from txmq.wire.status import error_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.core.state.state import Topic
    from txmq.wire.frames import Frame

MAX_RECORD_BYTES = 256 << 10  # of batches: larger records only prolong the reactor's turn


class SendRequests:
    """Answers SEND and SENDS. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, message_bytes: int) -> None:
        self._engine, self._message_bytes = engine, message_bytes

    def send(self, session: ClientSession, frame: Frame) -> None:
        command = _command(frame.payload, _user_of(session))
        self._check(session, command)
        topic = self._engine.state.topics.get(command.topic)
        answer = partial(session.answer, frame, pack_send_receipt)
        self._engine.submit(command, answer, early=self._flush_policy_of(topic))

    def multi_send(self, session: ClientSession, frame: Frame) -> None:
        state = self._engine.state
        requests = _MultiSend(self._engine, partial(session.reply, frame))
        for payload in unpack_requests(frame.payload):
            try:
                if session.rights is not None:
                    session.rights.check(state, Opcode.SEND, payload)
                command = _command(payload, _user_of(session))
                self._check(session, command)
            except TxmqError as error:
                requests.refuse(error)
                continue
            topic = state.topics.get(command.topic)
            batchable = sends.can_share_record(state, topic, command)
            requests.add(command, self._flush_policy_of(topic), batchable=batchable)
        requests.end()

    def _check(self, session: ClientSession, command: StoreBatch) -> None:
        """Refuse a message that is too large, and new messages of a fenced producer."""
        limit, header, state = self._message_bytes, command.header, self._engine.state
        if header.size > limit:
            topics.check_message_size(header, command.batch, limit, "the broker")
        if session.instance is not None and not sends.is_repeated(state, header):
            check_incarnation(state, *session.instance, session.incarnation)

    def _flush_policy_of(self, topic: Topic | None) -> FlushEvery | None:
        """Return the policy of a topic's messages; None = durable before the
        receipt.
        """
        own = topic.settings.flush if topic is not None else ""
        if not own:
            return self._engine.flush_policy
        return None if isinstance(own, str) else _flush_every(*own)


class _MultiSend:
    """The sends of one frame. `reply` gets the payload once all answers may go out."""

    def __init__(self, engine: Engine, reply: Callable[[Sequence[bytes]], None]) -> None:
        self._engine, self._reply = engine, reply
        self._batch: list[StoreBatch] = []
        self._places: list[int] = []  # of the batch's answers
        self._flush: FlushEvery | None = None  # of the batch: the strictest
        self._bytes = 0
        self._answers: list[BatchedReply] = []
        self._outstanding = 1  # answers to come, and the end of the frame

    def refuse(self, error: TxmqError) -> None:
        """Answer the next send with an error, which may rest on unwritten records."""
        self._outstanding += 1
        self._answers.append(BatchedReply(*error_reply(error)))
        self._engine.answer_when_durable(lambda _none: self._done(), None)

    def add(self, command: StoreBatch, flush: FlushEvery | None, *, batchable: bool) -> None:
        """Submit the next send, in one record with its neighbours if that is possible;
        `flush` is its topic's policy.
        """
        if not batchable or self._bytes >= MAX_RECORD_BYTES:
            self._submit()
        self._flush = _stricter(self._flush, flush) if self._batch else flush
        self._batch.append(command)
        self._places.append(len(self._answers))
        self._answers.append(PENDING)
        self._bytes += len(command.batch)
        if not batchable:
            self._submit()

    def end(self) -> None:
        """Submit the rest of the frame's sends."""
        self._submit()
        self._done()

    def _submit(self) -> None:
        batch, places, flush = self._batch, self._places, self._flush
        self._batch, self._places, self._bytes = [], [], 0
        if len(batch) == 1:
            self._submit_one(batch[0], places[0], flush)
        elif batch:
            self._outstanding += 1
            deliver = partial(self._deliver, batch, places, flush)
            self._engine.submit(
                StoreBatches(tuple(batch)), deliver, early=flush, messages=len(batch)
            )

    def _submit_one(self, command: StoreBatch, place: int, flush: FlushEvery | None) -> None:
        self._outstanding += 1
        self._engine.submit(command, partial(self._answer, place), early=flush)

    def _deliver(
        self, batch: list[StoreBatch], places: list[int], flush: FlushEvery | None, replies: object
    ) -> None:
        if isinstance(replies, RequestRejected):
            # the disk is full, but a repeated send still has its receipt
            for place, command in zip(places, batch, strict=True):
                self._submit_one(command, place, flush)
        else:
            assert isinstance(replies, list), "to several sends"
            for place, reply in zip(places, replies, strict=True):
                # receipts do not wait for the disk, this does
                if flush is not None and isinstance(reply, RequestRejected):
                    self._outstanding += 1
                    self._engine.answer_when_durable(partial(self._answer, place), reply)
                else:
                    self._answers[place] = encode_answer(reply, pack_send_receipt)
        self._done()

    def _answer(self, place: int, reply: object) -> None:
        self._answers[place] = encode_answer(reply, pack_send_receipt)
        self._done()

    def _done(self) -> None:
        self._outstanding -= 1
        if not self._outstanding:
            self._reply(pack_replies(self._answers))


def _command(payload: bytes, user: str) -> StoreBatch:
    """Return the command in the payload of a SEND. Raises TxmqError."""
    topic, partition, epoch, batch = unpack_send(payload)
    return StoreBatch(topic, epoch, partition, batch, verify(batch), user)


def _user_of(session: ClientSession) -> str:
    """Return the user who sends; "" = the broker has no users, or it is a part of the
    broker.
    """
    rights = session.rights
    return "" if rights is None or rights.user == OWN_USER else rights.user


def _stricter(one: FlushEvery | None, other: FlushEvery | None) -> FlushEvery | None:
    """Return the policy that keeps the promises of both."""
    if one is None or other is None or one is other:
        return one and other
    return _flush_every(min(one.every_ms, other.every_ms), min(one.messages, other.messages))


@lru_cache(maxsize=256)  # each send would pay for the checks of a new model
def _flush_every(every_ms: int, messages: int) -> FlushEvery:
    return FlushEvery(every_ms=every_ms, messages=messages)
