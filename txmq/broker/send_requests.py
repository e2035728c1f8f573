"""Sends, one in a frame or many: batches turned into commands, and receipts into bytes.

Many in one frame are one command as far as they go together (see `sends`), decided in
one turn and written as one record, and are answered in one reply: once the last of them
may be, so that no receipt promises what its topic's flush policy does not. Whatever is
wrong with one of them is told in its place, and of it alone.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from txmq.batch import verify
from txmq.broker.bundle_requests import NOT_YET, answer_to, fence
from txmq.config.storage import FlushEvery
from txmq.core.state.state import Rejected
from txmq.core.topics import admission, sends
from txmq.core.topics.sends import Send, SendTogether
from txmq.errors import TxmqError
from txmq.wire.headers import pack_send_receipt, unpack_send
from txmq.wire.status import reply_for
from txmq.wire.together import Answer, pack_answers, unpack_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.engine import Engine
    from txmq.broker.protocol import Session
    from txmq.core.state.state import Topic
    from txmq.wire.frames import Frame

RECORD_BYTES = (
    256 << 10
)  # of batches, are enough for one record: more would only make a turn of the reactor longer


class Sending:
    """Answers SEND and SENDS. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, message_bytes: int) -> None:
        self._engine, self._message_bytes = engine, message_bytes

    def send(self, session: Session, frame: Frame) -> None:
        command = _command(frame.payload)
        no = self._refusal(session, command)
        if no is not None:
            self._engine.tell(lambda no: session.reject(frame, no), no)
            return

        def deliver(reply: Any) -> None:  # a Rejected, or a receipt
            if isinstance(reply, Rejected):
                session.reject(frame, reply)
            else:
                session.reply(frame, pack_send_receipt(reply))

        self._engine.submit(
            command, deliver, early=self._flush_of(self._engine.state.topics.get(command.topic))
        )

    def sends(self, session: Session, frame: Frame) -> None:
        state, together = self._engine.state, _Together(self._engine, partial(session.reply, frame))
        for payload in unpack_requests(frame.payload):
            try:
                command = _command(payload)
            except TxmqError as error:
                together.refuse(error)
                continue
            no = self._refusal(session, command)
            if no is not None:
                together.reject(no)
                continue
            topic = state.topics.get(command.topic)
            together.add(command, self._flush_of(topic), shares=sends.shares(state, topic, command))
        together.end()

    def _refusal(self, session: Session, command: Send) -> Rejected | None:
        """The no to a message that is too large, or to what a fenced client sends
        anew.
        """
        no = admission.too_large(command.header, command.batch, self._message_bytes, "the broker")
        if (
            no is None
            and session.instance is not None
            and not sends.is_known(self._engine.state, command.header)
        ):
            no = fence(self._engine, session)
        return no

    def _flush_of(self, topic: Topic | None) -> FlushEvery | None:
        """How messages of a topic come to disk; None = before they are acknowledged."""
        own = topic.settings.flush if topic is not None else ""
        if not own:
            return self._engine.flush
        return None if isinstance(own, str) else _flush_every(*own)


class _Together:
    """The sends of one frame, and their answers: `reply` gets the payload of the reply
    once all of them may go out.
    """

    def __init__(self, engine: Engine, reply: Callable[[Sequence[bytes]], None]) -> None:
        self._engine, self._reply = engine, reply
        self._run: list[Send] = []
        self._places: list[int] = []  # of the run's answers
        self._flush: FlushEvery | None = None  # of the run: the strictest that there is
        self._bytes = 0
        self._answers: list[Answer] = []
        self._due = 1  # times that answers are to come, and the frame's end

    def refuse(self, error: TxmqError) -> None:
        """The next one gets this no."""
        self._answers.append(Answer(*reply_for(error)))

    def reject(self, no: Rejected) -> None:
        """The next one gets this no, which may rest on what is not on disk yet."""
        self._due += 1
        self._answers.append(NOT_YET)
        self._engine.tell(partial(self._answer, len(self._answers) - 1), no)

    def add(self, command: Send, flush: FlushEvery | None, *, shares: bool) -> None:
        """The next one, of a topic whose messages come to disk by `flush`."""
        if not shares or self._bytes >= RECORD_BYTES:
            self._submit()
        self._flush = _stricter(self._flush, flush) if self._run else flush
        self._run.append(command)
        self._places.append(len(self._answers))
        self._answers.append(NOT_YET)
        self._bytes += len(command.batch)
        if not shares:
            self._submit()

    def end(self) -> None:
        """That was the last one."""
        self._submit()
        self._done()

    def _submit(self) -> None:
        run, places, flush = self._run, self._places, self._flush
        self._run, self._places, self._bytes = [], [], 0
        if len(run) == 1:
            self._submit_one(run[0], places[0], flush)
        elif run:
            self._due += 1
            deliver = partial(self._deliver, run, places, flush)
            self._engine.submit(SendTogether(tuple(run)), deliver, early=flush, messages=len(run))

    def _submit_one(self, command: Send, place: int, flush: FlushEvery | None) -> None:
        self._due += 1
        self._engine.submit(command, partial(self._answer, place), early=flush)

    def _deliver(
        self, run: list[Send], places: list[int], flush: FlushEvery | None, replies: object
    ) -> None:
        if isinstance(
            replies, Rejected
        ):  # the disk is full: but what was stored before has its receipt
            for place, command in zip(places, run, strict=True):
                self._submit_one(command, place, flush)
        else:
            assert isinstance(replies, list), "to several sends"
            for place, reply in zip(places, replies, strict=True):
                if flush is not None and isinstance(
                    reply, Rejected
                ):  # receipts do not wait for the disk, this does
                    self._due += 1
                    self._engine.tell(partial(self._answer, place), reply)
                else:
                    self._answers[place] = answer_to(reply, pack_send_receipt)
        self._done()

    def _answer(self, place: int, reply: object) -> None:
        self._answers[place] = answer_to(reply, pack_send_receipt)
        self._done()

    def _done(self) -> None:
        self._due -= 1
        if not self._due:
            self._reply(pack_answers(self._answers))


def _command(payload: bytes) -> Send:
    """The command in the payload of a SEND. Raises TxmqError where there is none."""
    topic, partition, epoch, batch = unpack_send(payload)
    return Send(topic, epoch, partition, batch, verify(batch))


def _stricter(one: FlushEvery | None, other: FlushEvery | None) -> FlushEvery | None:
    """What keeps both promises."""
    if one is None or other is None or one is other:
        return one and other
    return _flush_every(min(one.every_ms, other.every_ms), min(one.messages, other.messages))


@lru_cache(maxsize=256)  # a model is checked as it is made, which each send would pay for
def _flush_every(every_ms: int, messages: int) -> FlushEvery:
    return FlushEvery(every_ms=every_ms, messages=messages)
