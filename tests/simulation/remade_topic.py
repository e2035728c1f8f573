"""A topic that is deleted and made again while a member reads it."""

from __future__ import annotations

from tests.simulation.actors import Actor
from tests.simulation.client_consumers import ClientConsumer
from tests.simulation.network import RequestLost
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.errors import TopicExists, UnknownTopic
from txmq.wire import data_requests as h
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode

SHARE = 0.2  # of the seeds have one
TOPIC, GROUP = "w", "w"
TIMES = 3


class TopicRemaker(Actor):
    """A producer that deletes its topic between two series of messages."""

    async def run(self) -> None:
        await self.connection.connect()
        for time in range(TIMES):
            if time:
                await self._repeat("topic.delete")
                await self.connection.pause(0.02)
            await self._repeat("topic.create", partitions=2)
            self.world.remade = await self._send(time)
            self.world.history.counts["topics remade"] += time > 0
            await self.connection.pause(0.1)

    async def _repeat(self, call: str, **args: int) -> None:
        """Make a call until it is answered. A member may make the topic, too."""
        while True:
            try:
                payload = encode_call(call, {"name": TOPIC, **args})
                await self.connection.request(Opcode.CALL, payload)
            except RequestLost:
                await self.connection.connect()
            except (UnknownTopic, TopicExists):
                return
            else:
                return

    async def _send(self, time: int) -> set[str]:
        producer = self.new_id()
        bodies = [f"k|0|{time}-{number}" for number in range(self.rng.randint(1, 6))]
        for sequence, body in enumerate(bodies):
            data = self.batch(producer, sequence, ("k", body))
            await self.request(Opcode.SEND, h.send_header(TOPIC, 0, 0) + data)
        return set(bodies)


class RemadeTopicConsumer(ClientConsumer):
    """A member that reads whatever topic has the name."""

    group, topic = GROUP, TOPIC

    async def _handle(self, message: DeliveredMessage) -> None:
        await self.connection.pause(0.01)
        self.world.history.handled[f"{GROUP}:{message.body.decode()}"] += 1
        self._operations.ack(message, self._now())
