"""A producer that sends to several partitions in one frame.

Its frames also hold repeated sends, and sends that the broker must refuse.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.simulation.actors import PLAIN_KEYS, ROW_KEYS, TOPIC, Actor, partition_for
from tests.simulation.history import InvariantBroken
from tests.simulation.network import RequestLost
from txmq.errors import BadRequest, UnknownTopic
from txmq.wire import data_requests as h
from txmq.wire.batched import BatchedReply, pack_requests, unpack_replies
from txmq.wire.data_requests import Opcode
from txmq.wire.status import to_error

SHARE = 0.4  # of the seeds have one
AT_ONCE = (2, 3, 5)  # sends in a frame
NO_HEADER = b"?"


class SendRequest(NamedTuple):
    """The payload of one send, the same at each repetition."""

    payload: bytes
    key: str
    bodies: list[str]


class MultiSendProducer(Actor):
    """Repeat each frame whose reply was lost, and now and then a send that was answered
    before.
    """

    async def run(self, frames: int) -> None:
        await self.connection.connect()
        self._producer, self._sequence = self.new_id(), 0
        self._answered: list[tuple[SendRequest, int]] = []  # with the offsets of their receipts
        for _ in range(frames):
            await self._insist([self._send() for _ in range(self.rng.choice(AT_ONCE))])
            await self.connection.pause(0.02)

    def _send(self) -> SendRequest:
        key, history = self.rng.choice(PLAIN_KEYS + ROW_KEYS), self.world.history
        first, self._sequence = self._sequence, self._sequence + self.rng.randint(1, 2)
        bodies = [f"{key}|0|{self.name}-{row}" for row in range(first, self._sequence)]
        history.attempted.update(bodies)
        history.sent_at.update(dict.fromkeys(bodies, self.world.clock.seconds()))
        data = self.batch(self._producer, first, *((key, body) for body in bodies))
        return SendRequest(h.send_header(TOPIC, partition_for(key), 0) + data, key, bodies)

    async def _insist(self, sends: list[SendRequest]) -> None:
        while True:
            requests: list[SendRequest | bytes] = [*sends]
            for other in self._other_requests():
                requests.insert(self.rng.randrange(len(requests) + 1), other)
            payloads = [one if isinstance(one, bytes) else one.payload for one in requests]
            try:
                reply = await self.connection.request(
                    Opcode.SENDS, b"".join(pack_requests(payloads))
                )
            except RequestLost:
                await self.connection.connect()
                continue
            for one, answer in zip(requests, unpack_replies(reply, len(requests)), strict=True):
                self._check(one, answer)
            self.world.history.counts["sent together"] += len(sends)
            return

    def _other_requests(self) -> list[SendRequest | bytes]:
        """Return sends that were answered before, and invalid ones: to an unknown
        topic, or without a header.
        """
        unknown_topic = h.send_header("none", 0, 0) + self.batch(
            self.new_id(), 0, (PLAIN_KEYS[0], "lost")
        )
        before = [sent for sent, _offset in self._answered]
        found: list[SendRequest | bytes] = [
            *self.rng.sample(before, min(len(before), self.rng.randrange(3)))
        ]
        return found + [unknown_topic, NO_HEADER][: self.rng.randrange(3)]

    def _check(self, one: SendRequest | bytes, answer: BatchedReply) -> None:
        error = to_error(*answer) if answer.status else None
        if isinstance(one, bytes):
            if not isinstance(error, BadRequest if one == NO_HEADER else UnknownTopic):
                raise InvariantBroken(f"an invalid send was answered with {answer}")
            return
        if error is not None:
            raise InvariantBroken(f"{one.bodies} of a frame of sends: {error}")
        receipt, history = h.unpack_send_receipt(answer.payload), self.world.history
        known = next((offset for sent, offset in self._answered if sent is one), None)
        if known is None:
            self._answered.append((one, receipt.offset))
        elif (known, True) != (receipt.offset, receipt.duplicate):
            raise InvariantBroken(f"{one.bodies} repeated: {receipt}, before at {known}")
        history.counts["duplicate receipts"] += receipt.duplicate
        for row, body in enumerate(one.bodies):
            history.acknowledged[body] = (
                None if receipt.offset < 0 else (partition_for(one.key), receipt.offset + row)
            )
