"""Groups and decisions, one in a frame or many: requests turned into commands, and what
the core replies into bytes.

Many in one frame are one command as far as they go together (see `together`), decided
in one turn and written by one flush, and are answered in one reply. Whatever is wrong
with one of them is told in its place, and of it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.batch import read_header, split, verify
from txmq.batch.header import DELIVER_AT
from txmq.core.state.state import Rejected
from txmq.core.topics import admission
from txmq.core.transactions import decisions, half_storage
from txmq.core.transactions.batched import (
    DecideTogether,
    StoreTogether,
    shares_decision,
    shares_store,
)
from txmq.core.transactions.half_storage import GroupBatch, StorePart
from txmq.core.transactions.instances import fenced
from txmq.errors import NoResolver, TxmqError
from txmq.wire import headers
from txmq.wire.group import (
    Description,
    GroupReceipt,
    Part,
    PartBatch,
    pack_group_receipt,
    unpack_part,
)
from txmq.wire.headers import pack_decide_receipt, unpack_decide
from txmq.wire.status import OK, reply_for
from txmq.wire.together import Answer, pack_answers, unpack_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.checkback.listeners import Watching
    from txmq.broker.checkback.resolver_service import Resolves
    from txmq.broker.engine import Engine
    from txmq.broker.protocol import Session
    from txmq.wire.frames import Frame

    Encode = Callable[[Any], bytes]

NO_DESCRIPTION = Description(())  # of the parts after the first


class Grouping:
    """Answers GROUP, GROUPS, DECIDE and DECISIONS. All methods belong to the reactor's
    thread.
    """

    def __init__(
        self, engine: Engine, resolving: Resolves, watching: Watching, message_bytes: int
    ) -> None:
        self._engine, self._resolving, self._watching = engine, resolving, watching
        self._message_bytes = message_bytes

    def group(self, session: Session, frame: Frame) -> None:
        command = self._storing(session, frame.payload)
        if isinstance(command, Rejected):  # it may rest on what is not on disk yet
            self._engine.tell(lambda no: session.reject(frame, no), command)
        else:
            self._submit(session, frame, command, _group_receipt)

    def decide(self, session: Session, frame: Frame) -> None:
        self._submit(session, frame, _deciding(frame.payload), _decide_receipt)

    def groups(self, session: Session, frame: Frame) -> None:
        together = Together(self._engine, StoreTogether, _group_receipt)
        for payload in unpack_requests(frame.payload):
            try:
                command = self._storing(session, payload)
            except TxmqError as error:
                together.refuse(error)
                continue
            if isinstance(command, Rejected):
                together.answer(command)
            else:
                together.add(command.token, command, shares=shares_store(command))
        together.end(lambda payload: session.reply(frame, payload))

    def decisions(self, session: Session, frame: Frame) -> None:
        state, together = (
            self._engine.state,
            Together(self._engine, DecideTogether, _decide_receipt),
        )
        for payload in unpack_requests(frame.payload):
            try:
                command = _deciding(payload)
            except TxmqError as error:
                together.refuse(error)
            else:
                together.add(command.token, command, shares=shares_decision(state, command.token))
        together.end(lambda payload: session.reply(frame, payload))

    def _submit(self, session: Session, frame: Frame, command: object, encode: Encode) -> None:
        def deliver(reply: object) -> None:
            if isinstance(reply, Rejected):
                session.reject(frame, reply)
            else:
                session.reply(frame, encode(reply))

        self._engine.submit(command, deliver)

    def _storing(self, session: Session, payload: bytes) -> StorePart | Rejected:
        """The command in the payload of a GROUP. Raises TxmqError where there is none,
        or nobody could decide it.
        """
        part = unpack_part(payload)
        if session.instance is not None and self._engine.state.transactions.get(part.token) is None:
            no = fence(self._engine, session)
            if no is not None:
                return no
        described = part.description
        if (
            described is not None
            and described.decider[0] == "postgres"
            and not self._resolving.knows(described.decider)
        ):
            self._watching.unresolvable()
            hint = "name its database under [[resolver]] in the broker's settings"
            raise NoResolver(
                "no resolver of this broker leads to the database that decides", hint=hint
            )
        command = store_part(part, session.origin)
        return _too_large(command, self._message_bytes) or command


class Together:
    """The requests of one frame, and their answers: commands that go together are one,
    in `kind`.
    """

    def __init__(
        self, engine: Engine, kind: Callable[[tuple[Any, ...]], object], encode: Encode
    ) -> None:
        self._engine, self._kind, self._encode = engine, kind, encode
        self._run: list[Any] = []
        self._places: dict[bytes, int] = {}  # of the run's answers, by token
        self._answers: list[Answer] = []

    def refuse(self, error: TxmqError) -> None:
        """The next one gets this no."""
        self._answers.append(Answer(*reply_for(error)))

    def answer(self, reply: object) -> None:
        """The next one gets this reply."""
        self._answers.append(answer_to(reply, self._encode))

    def add(self, token: bytes, command: object, *, shares: bool) -> None:
        """The next one. A token that comes again is a request like any other, after the
        first one's.
        """
        if not shares or token in self._places:
            self._flush()
        self._places[token] = len(self._answers)
        self._run.append(command)
        self._answers.append(NOT_YET)
        if not shares:
            self._flush()

    def end(self, reply: Callable[[Sequence[bytes]], None]) -> None:
        """That was the last one; `reply` gets the payload of the reply once all that it
        rests on is durable.
        """
        self._flush()
        self._engine.tell(lambda _none: reply(pack_answers(self._answers)), None)

    def _flush(self) -> None:
        run, places, self._run, self._places = self._run, list(self._places.values()), [], {}

        def deliver(replies: Any) -> None:  # a Rejected, or a list
            if isinstance(
                replies, Rejected
            ):  # the disk is full: but what was stored before has its receipt
                for place, command in zip(places, run, strict=True):
                    self._submit(place, command)
                return
            for place, reply in zip(places, replies, strict=True):
                self._answers[place] = answer_to(reply, self._encode)

        if len(run) > 1:
            self._engine.submit(self._kind(tuple(run)), deliver)
        elif run:
            self._submit(places[0], run[0])

    def _submit(self, place: int, command: object) -> None:
        def deliver(reply: object) -> None:
            self._answers[place] = answer_to(reply, self._encode)

        self._engine.submit(command, deliver)


NOT_YET = Answer(OK, b"")  # in the place of an answer that is to come


def answer_to(reply: object, encode: Encode) -> Answer:
    """One request's answer: the core's no, or the reply as `encode` has it."""
    if isinstance(reply, Rejected):
        return Answer(*reply_for(reply.error(reply.message, hint=reply.hint, detail=reply.detail)))
    return Answer(OK, encode(reply))


def fence(engine: Engine, session: Session) -> Rejected | None:
    """The no to what an older incarnation of a producer instance sends."""
    assert session.instance is not None, "asked of instances only"
    return fenced(engine.state, *session.instance, session.incarnation)


def _too_large(part: StorePart, most: int) -> Rejected | None:
    for batch in part.batches:
        if no := admission.too_large(batch.header, batch.data, most, "the broker"):
            return no
    return None


def store_part(part: Part, origin: bytes = b"") -> StorePart:
    """The command that stores a part, sent by process `origin`. Raises TxmqError where
    a batch is damaged or cannot be kept.
    """
    batches: list[GroupBatch] = []
    for batch in part.batches:
        _add(batches, batch)
    decider, service, actions, check_after, participants = part.description or NO_DESCRIPTION
    return StorePart(
        part.token,
        part.part,
        tuple(batches),
        part.sealed,
        part.commit,
        part.digest,
        part.epoch,
        decider,
        service,
        actions,
        check_after,
        participants,
        origin,
    )


def _add(batches: list[GroupBatch], batch: PartBatch) -> None:
    """The batch; or its messages one by one, if any is delayed."""
    topic, partition, epoch, data = batch
    header = verify(data)
    if not header.columns & DELIVER_AT:
        batches.append(GroupBatch(topic, epoch, partition, data, header))
        return
    singles = [single.data for single in split(data, header)]
    batches += [
        GroupBatch(topic, epoch, partition, single, read_header(single)) for single in singles
    ]


def _deciding(payload: bytes) -> decisions.Decide:
    request = unpack_decide(payload)
    return decisions.Decide(request.token, request.outcome, request.by)


def _group_receipt(reply: half_storage.GroupReceipt) -> bytes:
    return pack_group_receipt(GroupReceipt(reply.state, reply.ticket))


def _decide_receipt(reply: decisions.DecideReceipt) -> bytes:
    return pack_decide_receipt(headers.DecideReceipt(*reply))
