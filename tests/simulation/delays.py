"""Clients that send what is to be delivered later, and take some of it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.actors import PLAIN_KEYS, ROW_KEYS, TOPIC, Actor, place_of
from tests.simulation.network import Lost
from tests.simulation.node import EPOCH_US
from txmq.batch import encode
from txmq.errors import RecallTooLate
from txmq.model.message import Message, message_id
from txmq.wire import headers as h
from txmq.wire.headers import Opcode

if TYPE_CHECKING:
    from tests.simulation.world import World

SHARE = 0.15  # of the seeds have such clients
LONGEST_US = 400_000


class Scheduler(Actor):
    """Sends batches whose messages have each their time, and recalls some."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._sent = 0

    async def run(self, batches: int) -> None:
        await self.peer.connect()
        producer, sequence = self.new_id(), 0
        for _ in range(batches):
            key = self.rng.choice(PLAIN_KEYS + ROW_KEYS)
            bodies = await self._send(producer, sequence, key, self.rng.choice((1, 1, 3)))
            if self.rng.random() < 0.5:
                await self.peer.pause(0.1)
                at = self.rng.randrange(len(bodies))
                await self._recall(message_id(producer, sequence + at), bodies[at])
            sequence += len(bodies)
            await self.peer.pause(0.02)

    async def _send(self, producer: bytes, sequence: int, key: str, count: int) -> list[str]:
        history = self.world.history
        rows, bodies = [], []
        for _ in range(count):
            body, due = (
                f"{key}|0|{self.name}x{self._sent}-0",
                self.world.now() + self.rng.randrange(LONGEST_US),
            )
            self._sent += 1
            bodies.append(body)
            rows.append(Message(body.encode(), key, deliver_at=due))
            history.due[body] = due
            history.started[body] = (
                due - EPOCH_US
            ) / 1_000_000  # it takes its place among its key's then
        history.attempted.update(bodies)
        data = encode(
            rows, producer_id=producer, epoch=0, sequence=sequence, born_at=self.world.now()
        )
        await self.insist(Opcode.SEND, h.send_header(TOPIC, place_of(key), 0) + data)
        history.acknowledged.update(dict.fromkeys(bodies))
        history.waited.update(body for body in bodies if history.due[body] > self.world.now())
        history.counts["delayed"] += count
        return bodies

    async def _recall(self, name: str, body: str) -> None:
        """Until there is an answer: it can be repeated."""
        while True:
            try:
                await self.peer.call("message.recall", ids=[name])
            except Lost:
                await self.peer.connect()
            except RecallTooLate:
                self.world.history.counts["recalled too late"] += 1
                return
            else:
                del self.world.history.acknowledged[body]
                self.world.history.recalled.add(body)
                self.world.history.counts["recalled"] += 1
                return
