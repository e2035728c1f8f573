"""Several requests in one frame, and their answers in one reply.

Requests that do not depend on each other become one command: the core decides them in
one turn and the log gets one record. An error in one of them is answered in its place,
and concerns no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.errors import RequestRejected
from txmq.wire.batched import BatchedReply, pack_replies
from txmq.wire.status import OK, error_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.errors import TxmqError

    Encode = Callable[[Any], bytes]

PENDING = BatchedReply(OK, b"")  # in the place of an answer that is to come


class MultiRequest:
    """The requests of one frame, each about a token. `batch_of` makes one command of
    several.
    """

    def __init__(
        self, engine: Engine, batch_of: Callable[[tuple[Any, ...]], object], encode: Encode
    ) -> None:
        self._engine, self._batch_of, self._encode = engine, batch_of, encode
        self._batch: list[Any] = []
        self._places: dict[bytes, int] = {}  # of the batch's answers, by token
        self._answers: list[BatchedReply] = []

    def refuse(self, error: TxmqError) -> None:
        """Answer the next request with an error."""
        self._answers.append(BatchedReply(*error_reply(error)))

    def add(self, token: bytes, command: object, *, batchable: bool) -> None:
        """Submit the next request, in one batch with its neighbours if it is batchable.
        A token that occurs again comes after its first request.
        """
        if not batchable or token in self._places:
            self._submit_batch()
        self._places[token] = len(self._answers)
        self._batch.append(command)
        self._answers.append(PENDING)
        if not batchable:
            self._submit_batch()

    def end(self, reply: Callable[[Sequence[bytes]], None]) -> None:
        """End the frame: `reply` gets the payload once all that it rests on is
        durable.
        """
        self._submit_batch()
        self._engine.answer_when_durable(lambda _none: reply(pack_replies(self._answers)), None)

    def _submit_batch(self) -> None:
        batch, places, self._batch, self._places = self._batch, [*self._places.values()], [], {}

        def deliver(replies: Any) -> None:  # noqa: ANN401  # a RequestRejected, or a list
            if isinstance(replies, RequestRejected):
                # the disk is full, but a repeated request still has its receipt
                for place, command in zip(places, batch, strict=True):
                    self._submit(place, command)
                return
            for place, reply in zip(places, replies, strict=True):
                self._answers[place] = encode_answer(reply, self._encode)

        if len(batch) > 1:
            self._engine.submit(self._batch_of(tuple(batch)), deliver)
        elif batch:
            self._submit(places[0], batch[0])

    def _submit(self, place: int, command: object) -> None:
        def deliver(reply: object) -> None:
            self._answers[place] = encode_answer(reply, self._encode)

        self._engine.submit(command, deliver)


def encode_answer(reply: object, encode: Encode) -> BatchedReply:
    """Return one request's answer: a refusal of the core, or the encoded reply."""
    if isinstance(reply, RequestRejected):
        return BatchedReply(*error_reply(reply))
    return BatchedReply(OK, encode(reply))
