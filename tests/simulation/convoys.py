"""A producer whose sends to several partitions share frames, beside bad neighbours and
repeated sends.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.simulation.actors import PLAIN_KEYS, ROW_KEYS, TOPIC, Actor, place_of
from tests.simulation.history import Broken
from tests.simulation.network import Lost
from txmq.errors import BadRequest, UnknownTopic
from txmq.wire import headers as h
from txmq.wire.headers import Opcode
from txmq.wire.status import to_error
from txmq.wire.together import Answer, pack_requests, unpack_answers

SHARE = 0.4  # of the seeds have one
AT_ONCE = (2, 3, 5)  # sends in a frame
NOTHING = b"?"


class Sent(NamedTuple):
    """One send as it goes out, each time."""

    payload: bytes
    key: str
    bodies: list[str]


class Convoys(Actor):
    """Repeats a frame whose reply was lost, and now and then a send that was answered
    long ago.
    """

    async def run(self, frames: int) -> None:
        await self.peer.connect()
        self._producer, self._sequence = self.new_id(), 0
        self._answered: list[tuple[Sent, int]] = []  # with the offsets of their receipts
        for _ in range(frames):
            await self._insist([self._send() for _ in range(self.rng.choice(AT_ONCE))])
            await self.peer.pause(0.02)

    def _send(self) -> Sent:
        key, history = self.rng.choice(PLAIN_KEYS + ROW_KEYS), self.world.history
        first, self._sequence = self._sequence, self._sequence + self.rng.randint(1, 2)
        bodies = [f"{key}|0|{self.name}-{row}" for row in range(first, self._sequence)]
        history.attempted.update(bodies)
        history.started.update(dict.fromkeys(bodies, self.world.clock.seconds()))
        data = self.batch(self._producer, first, *((key, body) for body in bodies))
        return Sent(h.send_header(TOPIC, place_of(key), 0) + data, key, bodies)

    async def _insist(self, sends: list[Sent]) -> None:
        while True:
            requests: list[Sent | bytes] = [*sends]
            for other in self._neighbours():
                requests.insert(self.rng.randrange(len(requests) + 1), other)
            payloads = [one if isinstance(one, bytes) else one.payload for one in requests]
            try:
                reply = await self.peer.request(Opcode.SENDS, b"".join(pack_requests(payloads)))
            except Lost:
                await self.peer.connect()
                continue
            for one, answer in zip(requests, unpack_answers(reply, len(requests)), strict=True):
                self._check(one, answer)
            self.world.history.counts["sent together"] += len(sends)
            return

    def _neighbours(self) -> list[Sent | bytes]:
        """Perhaps what was answered before, and what must be refused: of no topic, and
        no send at all.
        """
        stranger = h.send_header("none", 0, 0) + self.batch(
            self.new_id(), 0, (PLAIN_KEYS[0], "lost")
        )
        before = [sent for sent, _offset in self._answered]
        found: list[Sent | bytes] = [
            *self.rng.sample(before, min(len(before), self.rng.randrange(3)))
        ]
        return found + [stranger, NOTHING][: self.rng.randrange(3)]

    def _check(self, one: Sent | bytes, answer: Answer) -> None:
        error = to_error(*answer) if answer.status else None
        if isinstance(one, bytes):
            if not isinstance(error, BadRequest if one == NOTHING else UnknownTopic):
                raise Broken(f"a bad neighbour of a send was answered with {answer}")
            return
        if error is not None:
            raise Broken(f"{one.bodies} of a frame of sends: {error}")
        receipt, history = h.unpack_send_receipt(answer.payload), self.world.history
        known = next((offset for sent, offset in self._answered if sent is one), None)
        if known is None:
            self._answered.append((one, receipt.offset))
        elif (known, True) != (receipt.offset, receipt.duplicate):
            raise Broken(f"{one.bodies} repeated: {receipt}, before at {known}")
        history.counts["duplicate receipts"] += receipt.duplicate
        for row, body in enumerate(one.bodies):
            history.acknowledged[body] = (
                None if receipt.offset < 0 else (place_of(one.key), receipt.offset + row)
            )
