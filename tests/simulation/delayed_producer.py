"""A producer of delayed messages that recalls some of them."""

from __future__ import annotations

from tests.simulation.actors import PLAIN_KEYS, ROW_KEYS, TOPIC, Actor, partition_for
from tests.simulation.network import RequestLost
from tests.simulation.simulated_broker import EPOCH_US
from tests.simulation.world import SimulatedWorld
from txmq.batch import encode
from txmq.errors import RecallTooLate
from txmq.model.message import Message, message_id
from txmq.model.units import SECOND
from txmq.wire import data_requests as h
from txmq.wire.data_requests import Opcode

SHARE = 0.15  # of the seeds have such clients
LONGEST_US = 400_000


class DelayedProducer(Actor):
    """Send batches whose messages have a delivery time each, and recall some."""

    def __init__(self, world: SimulatedWorld, name: str) -> None:
        super().__init__(world, name)
        self._sent = 0

    async def run(self, batches: int) -> None:
        await self.connection.connect()
        producer, sequence = self.new_id(), 0
        for _ in range(batches):
            key = self.rng.choice(PLAIN_KEYS + ROW_KEYS)
            bodies = await self._send(producer, sequence, key, self.rng.choice((1, 1, 3)))
            if self.rng.random() < 0.5:
                await self.connection.pause(0.1)
                at = self.rng.randrange(len(bodies))
                await self._recall(message_id(producer, sequence + at), bodies[at])
            sequence += len(bodies)
            await self.connection.pause(0.02)

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
            history.due_at[body] = due
            # the time that decides its order within the key
            history.sent_at[body] = (due - EPOCH_US) / SECOND
        history.attempted.update(bodies)
        data = encode(
            rows, producer_id=producer, epoch=0, sequence=sequence, born_at=self.world.now()
        )
        await self.request(Opcode.SEND, h.send_header(TOPIC, partition_for(key), 0) + data)
        history.acknowledged.update(dict.fromkeys(bodies))
        history.delayed.update(body for body in bodies if history.due_at[body] > self.world.now())
        history.counts["delayed"] += count
        return bodies

    async def _recall(self, name: str, body: str) -> None:
        """Recall a message, and repeat the request until it is answered."""
        while True:
            try:
                await self.connection.call("message.recall", ids=[name])
            except RequestLost:
                await self.connection.connect()
            except RecallTooLate:
                self.world.history.counts["recalled too late"] += 1
                return
            else:
                del self.world.history.acknowledged[body]
                self.world.history.recalled.add(body)
                self.world.history.counts["recalled"] += 1
                return
