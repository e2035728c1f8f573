"""A topic that is deleted and made again while a member reads it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from tests.simulation.actors import Actor
from tests.simulation.client_consumers import ClientConsumer
from tests.simulation.network import RequestLost
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.errors import NotLeased, TopicExists, UnknownTopic
from txmq.store.tables import FAILED_KEY
from txmq.wire import data_requests as h
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode

if TYPE_CHECKING:
    from txmq.core.state.state import State

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
    """A member that reads whatever topic has the name. All messages of a topic that
    will be deleted fail, or wait behind one.
    """

    group, topic = GROUP, TOPIC

    async def _handle(self, message: DeliveredMessage) -> None:
        await self.connection.pause(0.01)
        if int(message.body.decode().split("|")[2].split("-")[0]) < TIMES - 1:
            with suppress(NotLeased):
                self._operations.nack(message, None, "failed")
            return
        self.world.history.handled[f"{GROUP}:{message.body.decode()}"] += 1
        self._operations.ack(message, self._now())


def ghosts(state: State) -> int:
    """Return how much groups have of deleted topics: failed messages, fences, and
    messages to be delivered.
    """
    deleted = {topic.topic_id for topic in state.topics_by_id.values() if topic.deleted}
    groups = state.groups.by_id.values()
    return (
        sum(FAILED_KEY.unpack(key)[1] in deleted for key, _row in state.failed_messages.range(b""))
        + sum(topic_id in deleted for group in groups for topic_id in group.fences)
        + sum(
            state.topics_by_id[tp[0]].end_offsets[tp[1]] - position.floor
            for group in groups
            for tp, position in group.positions.items()
            if tp[0] in deleted
        )
    )
